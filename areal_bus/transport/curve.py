"""CURVE keys of ranks, and the allow-list: which public key may speak as which actor; knows nothing of sockets.

A rank makes one key pair at its start; its actors and their later incarnations use it. A key is 40 characters of Z85.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import zmq

from areal_bus.errors import ConfigError, WireError

Z85 = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A rank's own. The secret half goes to its actors through their standard input, and nowhere else."""

    public: str
    secret: str = field(repr=False)


def new_pair() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def seat_of(name: str) -> str:
    """Role and index of an actor's name, without its incarnation: "generator-3.1" -> "generator-3"."""
    return name.rpartition(".")[0] or f"{name}-0"  # the head is "head" to all


class Keyring:
    """What one process knows: its own pair, and whose key is whose."""

    def __init__(self, own: KeyPair, seats: Mapping[str, str]) -> None:
        """`seats`: public key by seat ("generator-3"). "generator-*": all of that role that are not named."""
        self.own = own
        for seat, public in seats.items():
            check(seat, public)
        self._key_of = dict(seats)

    def allow(self, seat: str, public: str) -> None:
        """From now on this key, and no other, speaks as that seat. Raises ConfigError when it is no key."""
        check(seat, public)
        self._key_of = {**self._key_of, seat: public}  # a new one: another thread may be reading

    def knows(self, public: str) -> bool:
        """Whether this key may speak at all."""
        return public in self._key_of.values()

    def may_speak(self, public: str, name: str) -> bool:
        """Whether this key may speak as the actor of that name, whatever its incarnation."""
        return bool(public) and self._find(seat_of(name)) == public

    def is_shared(self, name: str) -> bool:
        """Whether its key is one that several seats have in common: guests'."""
        return seat_of(name) not in self._key_of

    def key_of(self, name: str) -> str:
        """The key that an actor must have. Raises WireError when there is none."""
        public = self._find(seat_of(name))
        if public is None:
            raise WireError(f"only actors with a known key are spoken to: {name!r} has none", "key")
        return public

    def _find(self, seat: str) -> str | None:
        return self._key_of.get(seat) or self._key_of.get(f"{seat.rpartition('-')[0]}-*")


def check(seat: str, public: str) -> None:
    """Raises ConfigError for what is no public key."""
    if not Z85.fullmatch(public):
        raise ConfigError(f"a public key is 40 characters of Z85: that of {seat} is {public[:40]!r}")
