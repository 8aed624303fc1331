"""CURVE keys, one pair a rank, and the allow-list: which public key (40 characters of Z85) is which actor."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import zmq

from areal_bus.errors import ConfigError, WireError

Z85 = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Keys of one rank. Its actors receive the secret key through standard input only."""

    public: str
    secret: str = field(repr=False)


def new_pair() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def identity_of(name: str) -> str:
    """Role and index of an actor, without its incarnation: "generator-3.1" -> "generator-3"."""
    return name.rpartition(".")[0] or f"{name}-0"  # the head has no index in its name


class Keyring:
    """The key pair of this process and the public keys of its peers."""

    def __init__(self, own: KeyPair, identities: Mapping[str, str]) -> None:
        """`identities`: public key by identity ("generator-3"). "generator-*": all others of that role."""
        self.own = own
        for identity, public in identities.items():
            check(identity, public)
        self._key_of = dict(identities)

    def allow(self, identity: str, public: str) -> None:
        """Let this key, and no other, authenticate that identity. Raises ConfigError when it is not a key."""
        check(identity, public)
        self._key_of = {**self._key_of, identity: public}  # a new dict: another thread may be reading the old one

    def knows(self, public: str) -> bool:
        """Whether this key is on the allow-list."""
        return public in self._key_of.values()

    def authenticates(self, public: str, name: str) -> bool:
        """Whether this key authenticates the actor of that name, in any incarnation."""
        return bool(public) and self._find(identity_of(name)) == public

    def is_shared(self, name: str) -> bool:
        """Whether several identities share its key, as guests do."""
        return identity_of(name) not in self._key_of

    def key_of(self, name: str) -> str:
        """The public key of an actor. Raises WireError when there is none."""
        public = self._find(identity_of(name))
        if public is None:
            raise WireError(f"missing public key of {name!r}: a connection needs it", "key")
        return public

    def _find(self, identity: str) -> str | None:
        return self._key_of.get(identity) or self._key_of.get(f"{identity.rpartition('-')[0]}-*")


def check(identity: str, public: str) -> None:
    """Raises ConfigError when this is not a public key."""
    if not Z85.fullmatch(public):
        raise ConfigError(f"invalid public key of {identity}: it must be 40 characters of Z85, and is {public[:40]!r}")
