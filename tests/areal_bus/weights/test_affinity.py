"""A thread beside the main one stays on its core where cores are short."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeVar

import pytest

from areal_bus.weights import affinity
from areal_bus.weights.process_group import serve_store
from areal_bus.weights.receiver import ReceiveBuffers, WeightReceiver
from areal_bus.weights.sender import WeightSender
from tests.areal_bus.weights.test_push_from_learner import begin
from tests.areal_bus.weights.test_push_shared_memory import snapshot

if not hasattr(os, "sched_setaffinity"):
    pytest.skip("this system does not let threads be bound to cores", allow_module_level=True)

Found = TypeVar("Found")
ALL = os.sched_getaffinity(0)
N_CORES = os.cpu_count() or 1


def threads_cores() -> set[int]:
    return os.sched_getaffinity(threading.get_native_id())


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (float(N_CORES), 0.0, 0.0))


@pytest.fixture(params=sorted(ALL)[:2])
def main_core(request: pytest.FixtureRequest) -> Iterator[int]:
    """Where the main thread of this process runs."""
    main = os.getpid()
    before = os.sched_getaffinity(main)
    os.sched_setaffinity(main, {request.param})
    yield request.param
    os.sched_setaffinity(main, before)


def in_a_thread(do: Callable[[], Found]) -> Found:
    """Which may use all cores, at first."""

    def unbound() -> Found:
        os.sched_setaffinity(threading.get_native_id(), ALL)
        return do()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(unbound).result(60)


def cores_within() -> set[int]:
    with affinity.own_core():
        return threads_cores()


@pytest.mark.usefixtures("crowded")
def test_where_cores_are_short_a_thread_has_the_main_threads_until_the_end_of_the_block(main_core: int) -> None:
    def cores_of_it() -> list[set[int]]:
        found = []
        with suppress(ValueError), affinity.own_core():
            found.append(threads_cores())
            raise ValueError("a push may fail")
        return [*found, threads_cores()]

    assert in_a_thread(cores_of_it) == [{main_core}, ALL]
    assert os.sched_getaffinity(os.getpid()) == {main_core}


@pytest.mark.skipif(len(ALL) == 1, reason="one core is all that there is")
@pytest.mark.parametrize(
    ("load", "is_crowded"), [(N_CORES - 1.0, False), (N_CORES - 0.9, True), (10.0 * N_CORES, True)]
)
def test_cores_are_short_where_the_load_of_the_last_minute_leaves_less_than_one(
    load: float, is_crowded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 500.0, 500.0))
    assert affinity.is_crowded() == is_crowded
    assert (in_a_thread(cores_within) == ALL) == (not is_crowded)


@pytest.mark.usefixtures("crowded")
@pytest.mark.parametrize("fails", ["load", "count", "binding", "proc"])
def test_a_system_that_does_not_say_or_forbids_it_changes_nothing(
    fails: Literal["load", "count", "binding", "proc"], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    def within() -> set[int]:
        with monkeypatch.context() as patch:
            if fails == "count":
                patch.setattr(os, "cpu_count", lambda: None)
            elif fails == "proc":
                patch.setattr(Path, "read_bytes", forbidden)
            else:
                patch.setattr(os, {"load": "getloadavg", "binding": "sched_setaffinity"}[fails], forbidden)
            return cores_within()

    assert in_a_thread(within) == ALL


@pytest.mark.usefixtures("crowded")
def test_weights_come_down_on_the_core_of_the_engine_that_they_are_for(
    main_core: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cores_where_they_come_down(monkeypatch, staging="auto") == {main_core}


@pytest.mark.usefixtures("crowded")
def test_weights_of_an_engine_that_computes_elsewhere_come_down_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cores_where_they_come_down(monkeypatch, staging="host") == ALL


def cores_where_they_come_down(monkeypatch: pytest.MonkeyPatch, *, staging: Literal["auto", "host"]) -> set[int]:
    """Of one push; afterwards the thread may have all again."""
    store, endpoint = serve_store("127.0.0.1")
    root = WeightSender(store, interface="lo", address="127.0.0.1")
    one = WeightReceiver("generator-0.0", interface="lo", address="127.0.0.1", staging=staging)
    found, land = list[set[int]](), ReceiveBuffers.land

    def seen(landing: ReceiveBuffers, *piece: object) -> None:
        found.append(threads_cores())
        land(landing, *piece)  # type: ignore[arg-type]

    monkeypatch.setattr(ReceiveBuffers, "land", seen)
    order, sent = begin(1, endpoint, one.name), snapshot(1)
    with ThreadPoolExecutor(1) as pool:
        pushed = pool.submit(root.push, sent, order)
        assert in_a_thread(lambda: (one.receive(order)[1], threads_cores())) == (sent.digest, ALL)
        assert pushed.result(60).digest == sent.digest
    root.close()
    one.close()
    assert found
    assert all(one_time == found[0] for one_time in found)
    return found[0]
