"""Waits end by events: a waiting member and a waiting root send the store no requests."""

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from areal_bus.errors import PushFailed
from areal_bus.messages import PushBegin
from areal_bus.weights import receiver
from areal_bus.weights.process_group import join_store, serve_store
from areal_bus.weights.receiver import WeightReceiver
from areal_bus.weights.sender import WeightSender
from areal_bus.weights.snapshot import take_snapshot
from areal_bus.weights.waits import PushWaits, StoreConnections, StoreWatch, Wakeup
from tests.support.polling import wait_until

NAMES = [f"generator-{index}.0" for index in range(3)]


class CountedStore:
    """A connection to a store that counts its requests."""

    def __init__(self, store: Any, requests: Counter[str]) -> None:
        self._store, self._requests = store, requests

    def clone(self) -> "CountedStore":
        return CountedStore(self._store.clone(), self._requests)

    def __getattr__(self, name: str) -> Any:
        self._requests[name] += 1
        return getattr(self._store, name)


def test_a_push_that_waits_for_a_late_member_sends_the_store_no_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = Counter[str]()
    server, endpoint = serve_store("127.0.0.1")
    monkeypatch.setattr(receiver, "join_store", lambda *at: CountedStore(join_store(*at), requests))
    root = WeightSender(CountedStore(server, requests), interface="lo", address="127.0.0.1", route="shared")  # type: ignore[arg-type]
    members = [WeightReceiver(name, address="127.0.0.1", interface="lo") for name in NAMES]
    sent = take_snapshot(1, {"w": torch.ones(8)}, bucket_bytes=64, shared_on=torch.device("cpu"))
    assert sent is not None
    begin = PushBegin(1, 1, 0, NAMES, endpoint, 30.0)
    with ThreadPoolExecutor(len(NAMES) + 1) as pool:
        pushed = pool.submit(root.push, sent, begin)
        early = [pool.submit(member.receive, begin) for member in members[:2]]
        wait_until(lambda: requests["append"] >= 2, "both are ready")
        time.sleep(0.2)  # the requests that follow their report; no event ends them
        before = requests.total()
        time.sleep(0.5)  # under test: no request while time passes
        assert requests.total() == before
        late = pool.submit(members[2].receive, begin)
        assert {found.result(30)[1] for found in (*early, late)} == {pushed.result(30).digest}
    assert requests.total() < 30 * len(NAMES), "a member's requests do not grow with the time or with the members"


def test_a_watch_wakes_for_each_value_and_for_the_end_of_the_store() -> None:
    server, endpoint = serve_store("127.0.0.1")
    connections, wake = StoreConnections(join_store(endpoint, 5.0)), Wakeup()
    watch = StoreWatch(connections, ["a", "b"], wake, timeout_s=30.0)
    waits = PushWaits("a push", watch, timeout_s=30.0, cancelled=threading.Event(), wake=wake)
    server.set("a", "first")
    assert waits.value("a", str) == "first"
    del server
    with pytest.raises(RuntimeError):
        waits.value("b", str)


def test_a_value_that_stops_the_push_is_no_value() -> None:
    server, _ = serve_store("127.0.0.1")
    wake = Wakeup()
    watch = StoreWatch(StoreConnections(server), ["a"], wake, timeout_s=30.0)
    waits = PushWaits("a push", watch, timeout_s=30.0, cancelled=threading.Event(), wake=wake)
    server.set("a", "stop:the member is full")
    with pytest.raises(PushFailed, match="a push was aborted: the member is full"):
        waits.value("a", str)
