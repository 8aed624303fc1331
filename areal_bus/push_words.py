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

HELD, WRONG = 1, 2  # a member's report
SHUT = "shut"  # in the store, of no single push: a member could not open the root's memory, though it should


@dataclass(frozen=True, slots=True)
class Ready:
    """A member has room for the model that was announced."""

    group: str  # that it still holds of this view; "" for none
    place: Place  # where it receives

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> "Ready":
        value = decoded(text)
        try:
            return Ready(str(value["group"]), Place(**value["place"]))
        except (KeyError, TypeError) as error:
            raise PushFailed(f"a member says with which group it is ready, and where: {text[:200]!r}") from error


@dataclass(frozen=True, slots=True)
class Go:
    """All are ready: how it goes on."""

    group: str  # to be built by whoever does not hold it
    handle: Handle | None  # of the root's memory, to copy from; None: buckets are broadcast

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> "Go":
        value = decoded(text)
        handle = value.get("handle")
        if not isinstance(value.get("group"), str) or not isinstance(handle, dict | None):
            raise PushFailed(f"the root names a group, and a handle or none: {text[:200]!r}")
        return Go(value["group"], handle)


def decoded(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise PushFailed(f"a word of a push is JSON: {text[:200]!r}") from error
    if not isinstance(value, dict):
        raise PushFailed(f"a word of a push is an object: {text[:200]!r}")
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
