"""What root and members of a push say to each other by keys in the root's store; knows no group and no weights."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from areal_bus.collective import Watch, brief
from areal_bus.errors import PushFailed
from areal_bus.messages import PushBegin
from areal_bus.shared_memory import Handle, Place

HELD, WRONG = 1, 2  # a member's report by its group


@dataclass(frozen=True, slots=True)
class Offer:
    """The root's snapshot lies in memory that others may be able to open."""

    place: Place
    handle: Handle

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> "Offer":
        value = decoded(text)
        try:
            return Offer(Place(**value["place"]), dict(value["handle"]))
        except (KeyError, TypeError, ValueError) as error:
            raise PushFailed(f"the root says where its memory is, and its handle: {text[:200]!r}") from error


@dataclass(frozen=True, slots=True)
class Ready:
    """A member has room for the model that was announced."""

    group: str  # that it still holds of this view; "" for none
    place: Place  # where it receives; if that is the root's, it has opened the root's memory
    pid: int  # of its process, as that place numbers them

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> "Ready":
        value = decoded(text)
        try:
            return Ready(str(value["group"]), Place(**value["place"]), pid_of(value["pid"]))
        except (KeyError, TypeError, ValueError) as error:
            said = repr(text[:200])
            raise PushFailed(f"a member says with which group it is ready, where and as which pid: {said}") from error


@dataclass(frozen=True, slots=True)
class Go:
    """All are ready: how it goes on."""

    group: str  # buckets are broadcast in it; to be built by whoever does not hold it. "": members copy

    @property
    def copies(self) -> bool:
        """Each member out of the root's memory, without a group."""
        return not self.group

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> "Go":
        group = decoded(text).get("group")
        if not isinstance(group, str):
            raise PushFailed(f"the root names a group, or none: {text[:200]!r}")
        return Go(group)


def decoded(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise PushFailed(f"a word of a push is JSON: {text[:200]!r}") from error
    if not isinstance(value, dict):
        raise PushFailed(f"a word of a push is an object: {text[:200]!r}")
    return value


def pid_of(value: object) -> int:
    if type(value) is not int or not 0 < value < 1 << 31:
        raise ValueError(f"{value!r} numbers no process")
    return value


def read(store: TCPStore, begin: PushBegin, name: str, watch: Watch) -> str:
    """What the root sets under this name, as soon as it is there."""
    at = key(begin, name)
    watch.until(lambda: store.check([at]), lambda: f"the root's {name}")
    return str(store.get(at).decode())


def bucket(index: int, n: int) -> Callable[[], str]:
    return lambda: f"bucket {index + 1} of {n}"


def key(begin: PushBegin, name: str) -> str:
    return f"push/{begin.push}/{name}"


def title(begin: PushBegin) -> str:
    return f"push {begin.push} of version {begin.version}"


def reason(error: Exception) -> str:
    return str(error) if isinstance(error, PushFailed) else brief(error)
