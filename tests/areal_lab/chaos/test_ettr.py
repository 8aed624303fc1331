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


@pytest.mark.parametrize(
    ("times", "faults", "begins", "ends", "expected"),  # updates, seconds, pace, share of the time that is not lost
    [
        # ten updates of 2 s; the sixth takes 7 s: 5 of 25 s are lost
        ([0, 2, 4, 6, 8, 10, 17, 19, 21, 23, 25], [(11.0, 17.0)], 0.0, 25.0, (10, 25.0, 2.0, 0.8)),
        # the calm beginning shows the pace and is no part of the time
        ([0, 1, 2, 6], [(2.5, 6.0)], 2.0, 6.0, (1, 4.0, 1.0, 0.25)),
        ([0, 1, 2, 9], [], 0.0, 2.0, (2, 2.0, 1.0, 1.0)),  # updates after the end do not count
        ([0, 1, 2], [(2.5, math.inf)], 0.0, 8.0, (2, 8.0, 1.0, 0.25)),  # a failed job
    ],
)
def test_ettr_is_the_share_of_the_time_by_which_no_update_is_late(
    times: list[float], faults: list[tuple[float, float]], begins: float, ends: float, expected: tuple[float, ...]
) -> None:
    found = training_share(times, faults, begins=begins, ends=ends)
    assert found is not None
    assert (found.n_updates, found.wall_s, found.pace_s, found.ettr) == pytest.approx(expected)


def test_without_an_undisturbed_update_or_time_there_is_no_share() -> None:
    assert training_share([0.0, 1.0], [(0.5, 1.0)], begins=0.0, ends=1.0) is None
    assert training_share([0.0, 1.0], [], begins=1.0, ends=1.0) is None
    assert training_share([], [], begins=0.0, ends=0.0) is None


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
