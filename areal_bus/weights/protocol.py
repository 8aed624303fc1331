"""The protocol of a push: keys and values in the store, and the reports of members that complete it.

They share the root's process numbers (`MemoryPlace`), so the kernel says when one of them has ended, however it did.
"""

import json
import os
import select
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from areal_bus.errors import PushFailed
from areal_bus.messages import PushBegin
from areal_bus.weights.process_group import PushWaits, brief
from areal_bus.weights.shared_memory import Handle, MemoryPlace

HELD, WRONG = 1, 2  # a member's report by its group


@dataclass(frozen=True, slots=True)
class SnapshotOffer:
    """The root's snapshot lies in memory that others may be able to open."""

    place: MemoryPlace
    handle: Handle

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> "SnapshotOffer":
        value = decoded(text)
        try:
            return SnapshotOffer(MemoryPlace(**value["place"]), dict(value["handle"]))
        except (KeyError, TypeError, ValueError) as error:
            raise PushFailed(f"the root says where its memory is, and its handle: {text[:200]!r}") from error


@dataclass(frozen=True, slots=True)
class MemberReady:
    """A member has room for the model that was announced."""

    group: str  # that it still holds of this view; "" for none
    place: MemoryPlace  # where it receives; if that is the root's, it has opened the root's memory
    pid: int  # of its process, as that place numbers them

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> "MemberReady":
        value = decoded(text)
        try:
            return MemberReady(str(value["group"]), MemoryPlace(**value["place"]), pid_of(value["pid"]))
        except (KeyError, TypeError, ValueError) as error:
            said = repr(text[:200])
            raise PushFailed(f"a member says with which group it is ready, where and as which pid: {said}") from error


@dataclass(frozen=True, slots=True)
class PushGo:
    """All are ready: how it goes on."""

    group: str  # buckets are broadcast in it; to be built by whoever does not hold it. "": members copy

    @property
    def copies(self) -> bool:
        """Each member out of the root's memory, without a group."""
        return not self.group

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> "PushGo":
        group = decoded(text).get("group")
        if not isinstance(group, str):
            raise PushFailed(f"the root names a group, or none: {text[:200]!r}")
        return PushGo(group)


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


def read(store: TCPStore, begin: PushBegin, name: str, watch: PushWaits) -> str:
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


def report(store: TCPStore, begin: PushBegin, name: str) -> None:
    """A member's, to the root: it has copied, and looked at every byte. Whether all were right it tells the head.

    Raises RuntimeError where the root's store is gone.
    """
    store.set(_key(begin, name), "done")
    store.check([_key(begin, name)])  # answered after the one before, which is not


class CompletionReports:
    """What the root waits for. A context, which watches the members' processes."""

    def __init__(self, store: TCPStore, begin: PushBegin, pids: Mapping[str, int]) -> None:
        self._store = store
        self._begin = begin
        self._keys = {name: _key(begin, name) for name in sorted(pids)}
        self._pids = pids
        self._processes: dict[int, str] = {}  # descriptors, readable when the process has ended
        self._poll = select.poll()
        self._ended: set[str] = set()

    def __enter__(self) -> "CompletionReports":
        for name, pid in self._pids.items():
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._ended.add(name)
            except (OSError, AttributeError):  # no such thing, or a policy forbids it: the head's word ends the push
                continue
            else:
                self._processes[descriptor] = name
                self._poll.register(descriptor, select.POLLIN)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for descriptor in self._processes:
            with suppress(OSError):
                os.close(descriptor)

    def are_there(self) -> bool:
        """All of them. Raises PushFailed when a member has ended without one."""
        self._ended.update(self._processes[descriptor] for descriptor, _ in self._poll.poll(0))
        if self._store.check(list(self._keys.values())):  # asked after the ends: what they have told is there by now
            return True
        silent = [name for name in sorted(self._ended) if not self._store.check([self._keys[name]])]
        if silent:
            raise PushFailed(f"{title(self._begin)} must be reported by each member: {', '.join(silent)} ended before")
        return False

    def waits_for(self) -> str:
        missing = [name for name, at in self._keys.items() if not self._store.check([at])]
        return "the members' reports: " + (", ".join(missing) or "they have just come")


def _key(begin: PushBegin, name: str) -> str:
    return key(begin, f"report/{name}")
