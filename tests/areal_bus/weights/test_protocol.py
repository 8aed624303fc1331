"""Reports without a group: all there, or a member named that has ended without one."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from areal_bus.errors import PushFailed
from areal_bus.messages import PushBegin
from areal_bus.weights.process_group import join_store, serve_store
from areal_bus.weights.protocol import (
    FAN_OUT,
    REPORT,
    CompletionReports,
    MemberReady,
    all_of,
    arrive,
    receivers_of,
    sender_to,
)
from areal_bus.weights.waits import PushWaits, StoreConnections, StoreWatch, Wakeup

A, B = "generator-0.0", "generator-1.0"
BEGIN = PushBegin(push=7, version=3, view=1, store="", members=[A, B], timeout_s=10.0)
WAIT_S = 30.0


@pytest.fixture
def store() -> TCPStore:
    return serve_store("127.0.0.1")[0]


def report(store: TCPStore, begin: PushBegin, name: str) -> None:
    arrive(store, begin, REPORT, name)


class Root:
    """Waits for the reports of one push, as a root does."""

    def __init__(self, store: TCPStore, begin: PushBegin, pids: dict[str, int]) -> None:
        wake = Wakeup()
        self._store, self._key = store, all_of(begin, REPORT)
        watch = StoreWatch(StoreConnections(store), [self._key], wake, timeout_s=WAIT_S)
        self.reports = CompletionReports(store, watch, begin, pids)
        self._waits = PushWaits("a push", watch, timeout_s=WAIT_S, cancelled=threading.Event(), wake=wake)

    def wait(self) -> None:
        """Raises PushFailed when a member has ended without a report."""
        self._waits.until(self.reports.are_there, self.reports.waits_for, also=self.reports.running)

    def __enter__(self) -> CompletionReports:
        return self.reports.__enter__()

    def __exit__(self, *_: object) -> None:
        self.reports.__exit__(None, None, None)
        self._store.set(self._key, "")  # ends the watch, which keeps the store


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """Somebody else's, until it is killed."""
    sleeps = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield sleeps
    sleeps.kill()
    sleeps.communicate()


def test_reports_of_another_push_are_none(store: TCPStore) -> None:
    report(store, PushBegin(8, 3, 1, [A], "", 10.0), A)
    with Root(store, BEGIN, {A: os.getpid()}) as reports:
        assert not reports.are_there()
        assert reports.waits_for() == f"the members' reports: {A}, {B}"


def test_a_member_that_exited_before_the_root_polled_is_named(
    store: TCPStore, process: subprocess.Popen[bytes]
) -> None:
    process.kill()
    process.wait(10)
    with (
        Root(store, BEGIN, {A: os.getpid(), B: process.pid}) as reports,
        pytest.raises(PushFailed, match=f"{B} ended before"),
    ):
        reports.are_there()


def test_the_last_member_may_end_before_it_has_woken_the_root(
    store: TCPStore, process: subprocess.Popen[bytes]
) -> None:
    """Both reports are in the store. The second member died before it set the key for which the root waits."""
    report(store, BEGIN, A)
    store.append(f"push/7/{REPORT}", f"{B}\n")  # type: ignore[attr-defined]  # not in torch's stubs
    root = Root(store, BEGIN, {A: os.getpid(), B: process.pid})
    with root:
        process.kill()
        root.wait()


def test_a_report_is_there_when_its_member_may_end() -> None:
    """By two connections, as member and root have them: what is set by one is not at once seen by the other."""
    server, endpoint = serve_store("127.0.0.1")
    member = join_store(endpoint, 10.0)
    for push in range(50):
        begin = PushBegin(push, 3, 1, [A], endpoint, 10.0)
        report(member, begin, A)
        assert server.get(all_of(begin, REPORT)) == b"all"


@pytest.mark.parametrize("pid", [0, -1, 2**31, "12", 1.5, True, None])
def test_a_member_names_a_process(pid: object) -> None:
    words = {"name": A, "group": "", "place": {"realm": "r", "device": "cpu", "host": "h"}, "pid": pid}
    with pytest.raises(PushFailed, match="invalid ready report"):
        MemberReady.decode(json.dumps(words))
    assert MemberReady.decode(json.dumps(words | {"pid": 12})).pid == 12
    del words["pid"]
    with pytest.raises(PushFailed, match="invalid ready report"):
        MemberReady.decode(json.dumps(words))


@pytest.mark.parametrize("error", [OSError(38, "Function not implemented"), AttributeError("pidfd_open")])
def test_reports_are_awaited_where_the_kernel_has_no_pidfd(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Whoever ends then is told by the head, which calls the push off."""

    def refuse(_: int) -> int:
        raise type(error)(*error.args)  # a new one: its traceback would keep the store

    monkeypatch.setattr(os, "pidfd_open", refuse)
    begin = PushBegin(7, 3, 1, [A], "", 10.0)
    root = Root(store, begin, {A: os.getpid()})
    with root as reports:
        assert not reports.are_there()
        report(store, begin, A)
        root.wait()


def test_processes_are_watched_no_longer_than_a_push(store: TCPStore, process: subprocess.Popen[bytes]) -> None:
    root = Root(store, BEGIN, {A: os.getpid(), B: process.pid})
    before = pidfds()
    with root as reports:
        assert pidfds() == before + 2
        report(store, BEGIN, B)
        process.kill()
        process.wait(10)
        assert not reports.are_there()
        assert pidfds() == before + 1, "one that has ended would end each further wait at once"
    assert pidfds() == before


def pidfds() -> int:
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return links.count("anon_inode:[pidfd]")


@given(st.integers(2, 5000))
def test_each_rank_receives_once_from_a_rank_before_it(size: int) -> None:
    receives = [receiver for rank in range(size) for receiver in receivers_of(rank, size)]
    assert receives == list(range(1, size))
    for rank in range(1, size):
        assert sender_to(rank) < rank
        assert rank in receivers_of(sender_to(rank), size)


@given(st.integers(2, 5000))
def test_no_group_has_more_than_fan_out_receivers(size: int) -> None:
    assert max(len(receivers_of(rank, size)) for rank in range(size)) == min(size - 1, FAN_OUT)
    assert size > 512 or sender_to(sender_to(size - 1)) <= 0
