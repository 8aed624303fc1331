"""The checksum of a push: the same however the bytes are cut, another one for what goes wrong with offsets."""

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_bus.messages import PROTOCOL
from areal_bus.weights.checksum import LANE_BYTES, ROWS_AT_ONCE, Checksum, checksum

SEVERAL_ROWS = 3 * LANE_BYTES + 1004


def data(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (n,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_the_checksum_is_fixed_for_a_protocol_version() -> None:
    ascending = (torch.arange(3 * LANE_BYTES + 6) % 251).to(torch.uint8)
    assert (PROTOCOL, checksum(ascending)) == (18, 1495766039)  # another sum is another protocol


@given(
    n=st.one_of(st.integers(0, 40), st.integers(LANE_BYTES - 9, LANE_BYTES + 9), st.just(SEVERAL_ROWS)),
    cuts=st.lists(st.integers(0, SEVERAL_ROWS), max_size=6),
    rows_at_once=st.integers(1, 4),  # as on a device, where many are
)
def test_pieces_cut_anywhere_have_the_checksum_of_the_whole(n: int, cuts: list[int], rows_at_once: int) -> None:
    whole, pieces = data(n), Checksum(rows_at_once=rows_at_once)
    edges = [0, *sorted(min(cut, n) for cut in cuts), n]
    for start, stop in itertools.pairwise(edges):
        pieces.add(whole[start:stop])
    assert pieces.value() == checksum(whole) == checksum(whole.clone())


def test_rows_folded_together_have_the_checksum_of_rows_one_by_one() -> None:
    """More rows than are folded at once on a device, so that powers wrap and a whole block follows another."""
    whole, blocks = data((2 * ROWS_AT_ONCE + 3) * LANE_BYTES + 5), Checksum(rows_at_once=ROWS_AT_ONCE)
    blocks.add(whole)
    assert blocks.value() == checksum(whole)


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
