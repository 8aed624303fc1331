"""What there is to know of a kind of server before one is met; knows none of them."""

import hashlib
import re
from dataclasses import dataclass
from typing import Protocol

from actors.context import Context
from actors.engines.servers.link import Link
from actors.engines.servers.process import ServerProcess
from actors.engines.servers.protocol import Server
from actors.engines.servers.shape import Shape
from areal_bus.config import Config

LOOPBACK = ("127.0.0.1", "lo")  # where servers of ours listen: address and interface


@dataclass(frozen=True, slots=True)
class Met:
    """A server that answers, and what it is to serve."""

    link: Link
    process: ServerProcess | None  # None: it was attached to
    config: Config
    shape: Shape  # of the model
    architecture: str  # of the model, by its config.json; "" where that does not say
    stop_ids: frozenset[int]
    name: str  # unique among all meetings
    address: str  # of ours, for a group with it
    interface: str
    is_known: bool  # one like it has served this run before

    @property
    def longest(self) -> int:
        """Tokens of the longest sample of one turn, as far as the settings tell."""
        return longest(self.config, self.shape.most_tokens)


class Command(Protocol):
    def __call__(self, context: Context, config: Config, *, most_tokens: int, port: int) -> list[str]: ...


class Environment(Protocol):
    def __call__(self, context: Context) -> dict[str, str]: ...


class Meet(Protocol):
    def __call__(self, met: Met) -> Server: ...


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of server."""

    packages: tuple[str, ...]  # of which its environment has one
    oldest: tuple[int, ...]  # version of it that may serve
    ready: str  # path that answers as soon as it can serve
    command: Command  # what follows the interpreter
    environment: Environment  # beside its own
    meet: Meet


def longest(config: Config, most_tokens: int) -> int:
    """Tokens of a prompt and its completion at most."""
    return min(config.data.max_prompt_tokens + config.gconfig.max_new_tokens, most_tokens)


def seed(run_seed: int, context: Context) -> int:
    """Another number for each generator and each of its lives: their samples of one prompt are to differ."""
    text = f"{run_seed},{context.index},{context.incarnation}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little") >> 1


def number(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found.group().split("."))) if found else ()
