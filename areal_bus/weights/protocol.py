"""The protocol of a push: keys and values in the store, reports of members, and the tree of process groups.

The root sets three words, in this order: ANNOUNCE, GO and END. Members report in two phases, READY and REPORT; the last
one of a phase wakes the root. Either side stops a push by values that begin with `STOP`.

Members that copy from shared memory are in the root's PID namespace (`MemoryPlace`), so the root can watch their
processes with pidfd.

A member relays each bucket to its own group, so that no group grows with the view. Rank 0 is the root of a push. Rank r
sends to the ranks FAN_OUT * r + 1 to FAN_OUT * r + FAN_OUT. So a view of up to FAN_OUT members is one group. A group
connects each of its processes with each other one.
"""

import json
import os
import select
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Literal

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from areal_bus.errors import PushFailed
from areal_bus.messages import PushBegin
from areal_bus.weights.manifest import Manifest
from areal_bus.weights.process_group import PushGroup, StoreListener, brief, meet, retire
from areal_bus.weights.shared_memory import Handle, MemoryPlace
from areal_bus.weights.waits import STOP, PushWaits, StoreWatch

ANNOUNCE, GO, END = "announce", "go", "end"
ALL = "all"  # value that ends a phase

Phase = Literal["ready", "report"]
READY: Phase = "ready"
REPORT: Phase = "report"
PHASES = (READY, REPORT)

HELD, WRONG = 1, 2  # report of a member in its group


@dataclass(frozen=True, slots=True)
class SnapshotOffer:
    """Place and handle of the root's snapshot memory, which members may be able to open."""

    place: MemoryPlace
    handle: Handle


@dataclass(frozen=True, slots=True)
class Announcement:
    """What the root is going to send."""

    manifest: Manifest
    offer: SnapshotOffer | None

    def encode(self) -> str:
        offer = None if self.offer is None else asdict(self.offer)
        return json.dumps({"manifest": self.manifest.encode(), "offer": offer})

    @staticmethod
    def decode(text: str) -> "Announcement":
        value = decoded(text)
        try:
            offer = value["offer"]
            manifest = Manifest.decode(str(value["manifest"]))
            if offer is not None:
                offer = SnapshotOffer(MemoryPlace(**offer["place"]), dict(offer["handle"]))
        except (KeyError, TypeError, ValueError) as error:
            raise PushFailed(f"invalid announcement: it needs a manifest and an offer: {text[:200]!r}") from error
        return Announcement(manifest, offer)


@dataclass(frozen=True, slots=True)
class MemberReady:
    """Report of a member that has buffers for the announced model."""

    name: str
    group: str  # groups of this view that it still holds; "" for none
    place: MemoryPlace  # where it receives; equal to the root's place if it has opened the root's memory
    pid: int  # in the PID namespace of `place`
    held: str = ""  # digest of weights that a delta may start from; "" for none

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> "MemberReady":
        value = decoded(text)
        try:
            place = MemoryPlace(**value["place"])
            held = str(value.get("held", ""))
            return MemberReady(str(value["name"]), str(value["group"]), place, pid_of(value["pid"]), held)
        except (KeyError, TypeError, ValueError) as error:
            shown = repr(text[:200])
            raise PushFailed(f"invalid ready report: it needs a name, group, place and pid: {shown}") from error


@dataclass(frozen=True, slots=True)
class DeltaHeader:
    """The buckets are the payload of a delta (`delta.py`), not the flat buffer of the manifest."""

    n_bytes: int
    bases: tuple[str, ...]  # digests of the weights that it may start from


@dataclass(frozen=True, slots=True)
class PushGo:
    """All members are ready: the tree of groups to use, and what is sent in it."""

    group: str  # members without it build it; buckets are broadcast in it. "": members copy
    delta: DeltaHeader | None = None  # None: all bytes

    @property
    def copies(self) -> bool:
        """Whether members copy from the root's memory, without a group."""
        return not self.group

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> "PushGo":
        value = decoded(text)
        group, delta = value.get("group"), value.get("delta")
        if not isinstance(group, str):
            raise PushFailed(f"missing group in a go message (it may be empty): {text[:200]!r}")
        try:
            header = None if delta is None else DeltaHeader(int(delta["n_bytes"]), tuple(map(str, delta["bases"])))
        except (KeyError, TypeError, ValueError) as error:
            raise PushFailed(f"invalid delta in a go message: {text[:200]!r}; it needs its size and bases") from error
        return PushGo(group, header)


def decoded(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise PushFailed(f"invalid value of a push: {text[:200]!r} is not JSON") from error
    if not isinstance(value, dict):
        raise PushFailed(f"invalid value of a push: {text[:200]!r} is not a JSON object")
    return value


def pid_of(value: object) -> int:
    if type(value) is not int or not 0 < value < 1 << 31:
        raise ValueError(f"invalid process id: {value!r}")
    return value


def bucket(index: int, n: int) -> Callable[[], str]:
    return lambda: f"bucket {index + 1} of {n}"


def key(begin: PushBegin, name: str) -> str:
    return f"push/{begin.push}/{name}"


def title(begin: PushBegin) -> str:
    return f"push {begin.push} of version {begin.version}"


def reason(error: Exception) -> str:
    return str(error) if isinstance(error, PushFailed) else brief(error)


def words(begin: PushBegin) -> list[str]:
    """Keys that the root sets."""
    return [key(begin, name) for name in (ANNOUNCE, GO, END)]


def all_of(begin: PushBegin, phase: Phase) -> str:
    """Key that ends a phase."""
    return key(begin, f"{phase}/all")


def ends_of(begin: PushBegin) -> list[str]:
    """Keys that end the phases, in order."""
    return [all_of(begin, phase) for phase in PHASES]


def keys_of_members(begin: PushBegin) -> list[str]:
    """Keys that members set."""
    return [key(begin, f"{phase}{part}") for phase in PHASES for part in ("", "/n", "/all")]


def arrive(store: TCPStore, begin: PushBegin, phase: Phase, text: str) -> None:
    """Add a member's one-line report; the last one of the phase wakes the root. Returns when the store has it, so that
    the member may end. Raises RuntimeError when the store is lost.
    """
    store.append(key(begin, phase), f"{text}\n")  # type: ignore[attr-defined]  # not in torch's stubs
    if store.add(key(begin, f"{phase}/n"), 1) == len(begin.members):
        store.set(all_of(begin, phase), ALL)
        store.check([all_of(begin, phase)])  # waits for an answer, so the value above has arrived


def arrivals(store: TCPStore, begin: PushBegin, phase: Phase) -> list[str]:
    """The reports so far."""
    at = key(begin, phase)
    return store.get(at).decode().splitlines() if store.check([at]) else []


def ready_reports(store: TCPStore, begin: PushBegin) -> dict[str, MemberReady]:
    """Name -> report of the members that are ready."""
    return {report.name: report for report in map(MemberReady.decode, arrivals(store, begin, READY))}


def missing(reported: Iterable[str], begin: PushBegin) -> list[str]:
    there = set(reported)
    return [name for name in begin.members if name not in there]


def stop_push(store: TCPStore, keys: Iterable[str], why: str) -> None:
    """End the push at the other side. Raises RuntimeError when the store is gone."""
    for at in keys:
        store.set(at, STOP + why)


class CompletionReports:
    """Completion reports of the members. As a context manager it watches their processes."""

    def __init__(self, store: TCPStore, watch: StoreWatch, begin: PushBegin, pids: Mapping[str, int]) -> None:
        self._store = store
        self._watch = watch
        self._begin = begin
        self._pids = pids
        self._processes: dict[int, str] = {}  # pidfds, readable when the process has ended
        self._ended: set[str] = set()

    def __enter__(self) -> "CompletionReports":
        for name, pid in self._pids.items():
            try:
                self._processes[os.pidfd_open(pid)] = name
            except ProcessLookupError:
                self._ended.add(name)
            except (OSError, AttributeError):  # no pidfd support, or forbidden: the head ends the push
                continue
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for descriptor in self._processes:
            with suppress(OSError):
                os.close(descriptor)

    def running(self) -> list[int]:
        """Descriptors that become readable when a process ends."""
        return list(self._processes)

    def are_there(self) -> bool:
        """Whether all reports are there. Raises PushFailed when a member has ended without one."""
        if self._watch.value(all_of(self._begin, REPORT)) == ALL:
            return True
        self._ended.update(map(self._forget, ended(self._processes)))
        if not self._ended:
            return False
        silent = missing(arrivals(self._store, self._begin, REPORT), self._begin)  # read after the ends
        gone = sorted(self._ended.intersection(silent))
        if gone:
            raise PushFailed(f"{title(self._begin)} must be reported by each member: {', '.join(gone)} ended before")
        return not silent

    def waits_for(self) -> str:
        silent = missing(arrivals(self._store, self._begin, REPORT), self._begin)
        return "the members' reports: " + (", ".join(sorted(silent)) or "all have just arrived")

    def _forget(self, descriptor: int) -> str:
        os.close(descriptor)
        return self._processes.pop(descriptor)


def ended(descriptors: Iterable[int]) -> list[int]:
    """The pidfds whose process has ended."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(0)]


FAN_OUT = 32
MAX_TREES = 4  # for the view of the ring and a few catch-up pushes


def sender_to(rank: int) -> int:
    """The rank that sends to this one, which is not 0."""
    return (rank - 1) // FAN_OUT


def receivers_of(rank: int, size: int) -> range:
    """The ranks that this one sends to, in a tree of `size` ranks."""
    first = FAN_OUT * rank + 1
    return range(first, max(first, min(first + FAN_OUT, size)))


@dataclass(frozen=True, slots=True)
class BroadcastTree:
    """The groups of one rank."""

    name: str
    size: int
    above: PushGroup | None  # it receives in this one; None at the root
    below: PushGroup | None  # it sends in this one; None at a rank without receivers

    def check(self) -> None:
        """Raises RuntimeError when an operation in flight has failed."""
        for group in self._groups():
            group.check()

    def retire(self) -> None:
        """Drop the groups."""
        for group in self._groups():
            retire(group)

    def _groups(self) -> list[PushGroup]:
        return [group for group in (self.above, self.below) if group is not None]


def meet_tree(
    name: str, store: TCPStore, waits: PushWaits, *, rank: int, size: int, listener: StoreListener
) -> BroadcastTree:
    """Build the groups of this rank; every rank calls it, its sender first, from the root. Raises as `meet`."""

    def group(sender: int, rank_in_it: int) -> PushGroup:
        n = 1 + len(receivers_of(sender, size))
        return meet(f"{name}/{sender}", store, waits, rank=rank_in_it, size=n, listener=listener)

    above = group(sender_to(rank), (rank - 1) % FAN_OUT + 1) if rank else None
    below = group(rank, 0) if receivers_of(rank, size) else None
    return BroadcastTree(name, size, above, below)


class BroadcastTrees:
    """Trees of the most recent views."""

    def __init__(self) -> None:
        self._by_view: dict[int, BroadcastTree] = {}

    def of_view(self, view: int) -> BroadcastTree | None:
        return self._by_view.get(view)

    def keep(self, view: int, tree: BroadcastTree) -> None:
        self._by_view[view] = tree
        while len(self._by_view) > MAX_TREES:
            self.drop_view(next(iter(self._by_view)))

    def drop_view(self, view: int) -> None:
        tree = self._by_view.pop(view, None)
        if tree is not None:
            tree.retire()

    def clear(self) -> None:
        for view in list(self._by_view):
            self.drop_view(view)
