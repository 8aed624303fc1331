"""ETTR's arithmetic: bounds, what counts as lost, and times made by hand."""

import math
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.chaos.ettr import TrainingShare, training_share

GAPS = st.lists(st.floats(0.01, 100.0), min_size=2, max_size=30)


def share_of(times: list[float], *faults: tuple[float, float], begins: float = 0.0) -> TrainingShare:
    found = training_share(times, faults, begins=begins, ends=times[-1])
    assert found is not None
    return found


def test_a_recovery_costs_the_time_by_which_its_update_is_late() -> None:
    """Ten updates of 2 s; the sixth takes 7 s: 5 of 25 s are lost."""
    times = [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 17.0, 19.0, 21.0, 23.0, 25.0]
    found = share_of(times, (11.0, 17.0))
    assert (found.n_updates, found.wall_s, found.pace_s) == (10, 25.0, 2.0)
    assert (found.ettr, found.lost_s) == pytest.approx((0.8, 5.0))


def test_the_calm_beginning_shows_the_pace_and_is_no_part_of_the_wall_time() -> None:
    found = share_of([0.0, 1.0, 2.0, 6.0], (2.5, 6.0), begins=2.0)
    assert (found.n_updates, found.wall_s, found.pace_s, found.ettr) == (1, 4.0, 1.0, 0.25)


def test_updates_after_the_end_do_not_count() -> None:
    found = training_share([0.0, 1.0, 2.0, 9.0], [], begins=0.0, ends=2.0)
    assert found == TrainingShare(2, 2.0, 1.0)


def test_a_failed_job_has_lost_the_time_after_its_last_update() -> None:
    found = training_share([0.0, 1.0, 2.0], [(2.5, math.inf)], begins=0.0, ends=8.0)
    assert found is not None
    assert found.ettr == 0.25


def test_without_an_undisturbed_update_or_time_there_is_no_share() -> None:
    assert training_share([0.0, 1.0], [(0.5, 1.0)], begins=0.0, ends=1.0) is None
    assert training_share([0.0, 1.0], [], begins=1.0, ends=1.0) is None
    assert training_share([], [], begins=0.0, ends=0.0) is None


@given(gaps=GAPS)
def test_a_run_without_faults_has_lost_nothing(gaps: list[float]) -> None:
    assert share_of([0.0, *accumulate(gaps)]).ettr == pytest.approx(1.0)


@given(gaps=GAPS, at=st.data(), delay=st.floats(0.0, 1000.0))
def test_ettr_is_a_share_and_falls_with_every_second_of_a_recovery(
    gaps: list[float], at: st.DataObject, delay: float
) -> None:
    """The update under way at a fault comes later by `delay`, and all others after it."""
    hit = at.draw(st.integers(0, len(gaps) - 1))
    times = [0.0, *accumulate(gaps)]
    fault = times[hit] + gaps[hit] / 2
    before = share_of(times, (fault, times[hit + 1]))
    late = [t if n <= hit else t + delay for n, t in enumerate(times)]
    after = share_of(late, (fault, late[hit + 1]))
    assert 0.0 <= after.ettr <= before.ettr + 1e-12 <= 1.0 + 1e-12
    assert 0.0 <= after.lost_s <= after.wall_s
    if before.ettr < 1.0:
        assert after.lost_s == pytest.approx(before.lost_s + delay)
