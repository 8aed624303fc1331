"""A thread beside the main one stays on its core where no other is free."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

import pytest

from areal_bus import cores
from areal_bus.landing import Landing
from areal_bus.weights import Member, Root, serve_store
from tests.test_weights_learner import begin
from tests.test_weights_shared import snapshot

Found = TypeVar("Found")
ALL = os.sched_getaffinity(0)


def threads_cores() -> set[int]:
    return os.sched_getaffinity(threading.get_native_id())


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (float(len(ALL)), 0.0, 0.0))


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


@pytest.mark.usefixtures("crowded")
def test_where_no_core_is_free_a_thread_has_the_main_threads_until_the_end_of_the_block(main_core: int) -> None:
    def cores_of_it() -> list[set[int]]:
        found = []
        with suppress(ValueError), cores.own_core():
            found.append(threads_cores())
            raise ValueError("a push may fail")
        return [*found, threads_cores()]

    assert in_a_thread(cores_of_it) == [{main_core}, ALL]
    assert os.sched_getaffinity(os.getpid()) == {main_core}


@pytest.mark.parametrize(
    ("load", "is_crowded"), [(0.0, len(ALL) == 1), (len(ALL) - 1.0, False), (len(ALL) - 0.9, True), (500.0, True)]
)
def test_a_core_is_free_where_the_load_of_the_last_minute_leaves_one(
    load: float, is_crowded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 500.0, 500.0))
    if load == 0.0 and len(ALL) == 1:
        pytest.skip("a single core is never free")

    def cores_of_it() -> set[int]:
        with cores.own_core():
            return threads_cores()

    assert in_a_thread(cores.is_crowded) == is_crowded
    assert (in_a_thread(cores_of_it) == ALL) == (not is_crowded or len(ALL) == 1)


@pytest.mark.usefixtures("crowded")
@pytest.mark.parametrize("missing", ["sched_setaffinity", "sched_getaffinity"])
def test_a_system_that_knows_no_cores_or_forbids_it_changes_nothing(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    if missing == "sched_getaffinity":
        monkeypatch.delattr(os, missing)
    else:
        monkeypatch.setattr(os, missing, forbidden)
    with cores.own_core():
        pass


@pytest.mark.usefixtures("crowded")
def test_weights_come_down_on_the_core_of_the_engine_that_they_are_for(
    main_core: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, endpoint = serve_store("127.0.0.1")
    root = Root(store, interface="lo", address="127.0.0.1")
    one, found = Member("generator-0.0", interface="lo", address="127.0.0.1"), list[set[int]]()
    land = Landing.land

    def seen(landing: Landing, *piece: object) -> None:
        found.append(threads_cores())
        land(landing, *piece)  # type: ignore[arg-type]

    monkeypatch.setattr(Landing, "land", seen)
    order, sent = begin(1, endpoint, one.name), snapshot(1)

    def received() -> tuple[str, set[int]]:
        return one.receive(order)[1], threads_cores()

    with ThreadPoolExecutor(1) as pool:
        pushed = pool.submit(root.push, sent, order)
        assert in_a_thread(received) == (sent.digest, ALL)
        assert pushed.result(60).digest == sent.digest
    assert found
    assert all(cores_of_it == {main_core} for cores_of_it in found)
    root.close()
    one.close()
