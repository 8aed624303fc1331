"""The checksum of a push: the same however the bytes are cut, another one for what goes wrong with offsets."""

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_bus.checksum import LANE_BYTES, Checksum, checksum

SEVERAL_ROWS = 3 * LANE_BYTES + 1004


def data(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (n,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@given(
    n=st.one_of(st.integers(0, 40), st.integers(LANE_BYTES - 9, LANE_BYTES + 9), st.just(SEVERAL_ROWS)),
    cuts=st.lists(st.integers(0, SEVERAL_ROWS), max_size=6),
)
def test_pieces_cut_anywhere_have_the_checksum_of_the_whole(n: int, cuts: list[int]) -> None:
    whole, pieces = data(n), Checksum()
    edges = [0, *sorted(min(cut, n) for cut in cuts), n]
    for start, stop in itertools.pairwise(edges):
        pieces.add(whole[start:stop])
    assert pieces.value() == checksum(whole) == checksum(whole.clone())


def test_any_bit_counts() -> None:
    whole, dice = data(SEVERAL_ROWS), random.Random(1)
    right = checksum(whole)
    for _ in range(200):
        at, bit = dice.randrange(SEVERAL_ROWS), 1 << dice.randrange(8)
        whole[at] ^= bit
        assert checksum(whole) != right
        whole[at] ^= bit
    assert checksum(whole) == right


@pytest.mark.parametrize("distance", [4, 256, LANE_BYTES, 2 * LANE_BYTES, LANE_BYTES + 4])
def test_words_that_changed_places_are_seen(distance: int) -> None:
    whole = data(SEVERAL_ROWS)
    words = whole.view(torch.int32)
    apart, dice = distance // 4, random.Random(2)
    right = checksum(whole)
    for _ in range(50):
        at = dice.randrange(len(words) - apart)
        swapped = words.clone()
        swapped[at], swapped[at + apart] = words[at + apart], words[at]
        assert checksum(swapped.view(torch.uint8)) != right


def test_bytes_at_a_wrong_offset_are_seen() -> None:
    whole = data(SEVERAL_ROWS)
    sums = [checksum(torch.roll(whole, n)) for n in (0, 1, 4, 64, LANE_BYTES, 2 * LANE_BYTES)]
    assert len(set(sums)) == len(sums)
