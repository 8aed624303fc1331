"""Micro-batches under a token budget."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.learner.batching.micro_batches import pack

LENGTHS = st.lists(st.integers(1, 300), max_size=80)


@given(LENGTHS, st.integers(1, 400), st.integers(1, 12))
def test_every_sequence_is_in_exactly_one_micro_batch_under_the_budget(
    lengths: list[int], capacity: int, k_min: int
) -> None:
    k_min = min(k_min, max(len(lengths), 1))
    parts = pack(lengths, capacity=capacity, k_min=k_min)
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    assert all(parts)
    assert all(sum(lengths[i] for i in part) <= capacity for part in parts if len(part) > 1)
    assert len(parts) >= (k_min if lengths else 0)


@given(LENGTHS, st.integers(300, 900))
def test_no_two_micro_batches_could_be_one(lengths: list[int], capacity: int) -> None:
    least = math.ceil(sum(lengths) / capacity)
    parts = pack(lengths, capacity=capacity)
    totals = sorted(sum(lengths[i] for i in part) for part in parts)
    assert len(parts) <= 1 or totals[0] + totals[1] > capacity  # no two could be one
    assert len(parts) <= 2 * max(least, 1)


def test_a_sequence_over_the_budget_is_alone() -> None:
    assert sorted(map(sorted, pack([3, 50, 4], capacity=10))) == [[0, 2], [1]]


def test_the_fullest_micro_batch_that_holds_it_is_taken() -> None:
    assert pack([6, 5, 4, 3], capacity=10) == [[0, 2], [1, 3]]


def test_two_short_ones_fill_a_room_to_the_last_token() -> None:
    assert pack([9, 8, 7, 4, 3, 2, 2, 1, 4], capacity=10) == [[0, 7], [1, 5], [2, 4], [3, 8, 6]]


def test_many_sequences_take_as_few_micro_batches_as_their_tokens_ask_for() -> None:
    for seed in range(3):
        draw = random.Random(seed)
        lengths = [min(int(draw.lognormvariate(7, 1)) + 1, 8192) for _ in range(2000)]
        assert len(pack(lengths, capacity=8192)) == math.ceil(sum(lengths) / 8192)


def test_more_micro_batches_than_sequences_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot fill k_min = 3"):
        pack([1, 2], capacity=10, k_min=3)
