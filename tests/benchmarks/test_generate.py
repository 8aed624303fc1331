"""Bench `generate`: the requests to both sides and the figures. Nothing is timed."""

from statistics import mean

import pytest

from benchmarks.generate import bench as generate
from benchmarks.generate.requests import BATCHES, LONGEST, N_GIVEN, N_NEW, SHAPE, WAVES, requests
from benchmarks.harness import worker_process
from benchmarks.harness.interleave import Rounds


def test_both_sides_are_asked_the_same_and_each_round_something_else() -> None:
    assert requests(8, mixed=True, seed=1) == requests(8, mixed=True, seed=1)
    assert requests(8, mixed=True, seed=1) != requests(8, mixed=True, seed=2)
    equal, mixed = (requests(128, mixed=is_mixed, seed=1) for is_mixed in (False, True))
    assert len(equal) == len(mixed) == 128 * WAVES
    assert {(len(one.ids), one.n_new) for one in equal} == {(N_GIVEN, N_NEW)}
    assert N_NEW * 0.85 < mean(one.n_new for one in mixed) < N_NEW * 1.15
    assert max(one.n_new for one in mixed) <= LONGEST
    assert max(max(one.ids) for one in mixed) < SHAPE["vocab_size"]


@pytest.mark.slow
def test_our_half_samples_every_request_to_its_length() -> None:
    with worker_process.ours("generate.ours") as ours:
        assert ours.ask("engine", batch=2, mixed=True, seed=1) > 0  # it raises when a token is missing
        assert ours.ask("floor", batch=2) > 0


def test_the_ratio_named_is_of_batch_32_and_mixed_lengths() -> None:
    costs = {"ours": 1.0, "generate": 2.0, "floor": 0.25, "continuous": 8.0}
    measured = {
        (batch, mixed): Rounds(({**costs, "generate": 3.0 if (batch, mixed) == (32, True) else 2.0},), 0, 1e-3, 1.0)
        for batch in BATCHES
        for mixed in (False, True)
    }
    found = generate.figures(measured)
    assert found["ratio"] == pytest.approx(3.0)
    assert found["ratio_8_equal"] == pytest.approx(2.0)
    assert found["ratio_continuous_32_equal"] == pytest.approx(8.0)
    assert found["ratio_continuous_8_mixed"] == pytest.approx(8.0)
    assert found["floor_share_128_mixed"] == pytest.approx(0.25)
    assert "ratio_32_mixed" not in found
