"""The protocol of a push: keys and values in the store, and the completion reports of members.

Members that copy from shared memory are in the root's PID namespace (`MemoryPlace`), so the root can waits their
processes with pidfd.
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

HELD, WRONG = 1, 2  # report of a member in its group


@dataclass(frozen=True, slots=True)
class SnapshotOffer:
    """Place and handle of the root's snapshot memory, which members may be able to open."""

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
            raise PushFailed(f"an offer of the root has a place and a handle: {text[:200]!r}") from error


@dataclass(frozen=True, slots=True)
class MemberReady:
    """Report of a member that has buffers for the announced model."""

    group: str  # process group of this view that it still holds; "" for none
    place: MemoryPlace  # where it receives; equal to the root's place if it has opened the root's memory
    pid: int  # in the PID namespace of `place`

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> "MemberReady":
        value = decoded(text)
        try:
            return MemberReady(str(value["group"]), MemoryPlace(**value["place"]), pid_of(value["pid"]))
        except (KeyError, TypeError, ValueError) as error:
            shown = repr(text[:200])
            raise PushFailed(f"a ready report has a group, a place and a pid: {shown}") from error


@dataclass(frozen=True, slots=True)
class PushGo:
    """All members are ready: the group to use."""

    group: str  # members without it build it; buckets are broadcast in it. "": members copy

    @property
    def copies(self) -> bool:
        """Whether members copy from the root's memory, without a group."""
        return not self.group

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> "PushGo":
        group = decoded(text).get("group")
        if not isinstance(group, str):
            raise PushFailed(f"a go message has a group, possibly empty: {text[:200]!r}")
        return PushGo(group)


def decoded(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise PushFailed(f"a value of a push is JSON: {text[:200]!r}") from error
    if not isinstance(value, dict):
        raise PushFailed(f"a value of a push is a JSON object: {text[:200]!r}")
    return value


def pid_of(value: object) -> int:
    if type(value) is not int or not 0 < value < 1 << 31:
        raise ValueError(f"{value!r} is not a process id")
    return value


def read(store: TCPStore, begin: PushBegin, name: str, waits: PushWaits) -> str:
    """Wait for the value that the root sets under this name."""
    at = key(begin, name)
    waits.until(lambda: store.check([at]), lambda: f"the root's {name}")
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
    """Report to the root that this member has copied and checked every byte. The head receives the outcome.

    Raises RuntimeError when the root's store is gone.
    """
    store.set(_key(begin, name), "done")
    store.check([_key(begin, name)])  # waits for an answer, so the value above has arrived


class CompletionReports:
    """Completion reports of the members. As a context manager it watches their processes."""

    def __init__(self, store: TCPStore, begin: PushBegin, pids: Mapping[str, int]) -> None:
        self._store = store
        self._begin = begin
        self._keys = {name: _key(begin, name) for name in sorted(pids)}
        self._pids = pids
        self._processes: dict[int, str] = {}  # pidfds, readable when the process has ended
        self._poll = select.poll()
        self._ended: set[str] = set()

    def __enter__(self) -> "CompletionReports":
        for name, pid in self._pids.items():
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._ended.add(name)
            except (OSError, AttributeError):  # no pidfd support, or forbidden: the head ends the push
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
        """Whether all reports are there. Raises PushFailed when a member has ended without one."""
        self._ended.update(self._processes[descriptor] for descriptor, _ in self._poll.poll(0))
        if self._store.check(list(self._keys.values())):  # checked after the ends: their reports have arrived by now
            return True
        silent = [name for name in sorted(self._ended) if not self._store.check([self._keys[name]])]
        if silent:
            raise PushFailed(f"{title(self._begin)} must be reported by each member: {', '.join(silent)} ended before")
        return False

    def waits_for(self) -> str:
        missing = [name for name, at in self._keys.items() if not self._store.check([at])]
        return "the members' reports: " + (", ".join(missing) or "all have just arrived")


def _key(begin: PushBegin, name: str) -> str:
    return key(begin, f"report/{name}")
