"""The checksum of a push: the same however the bytes are cut, another one for what goes wrong with offsets; and bytes
summed up as they are copied: the same numbers and the same sum as by torch, with a compiler or without.
"""

import itertools
import platform
import random
from ctypes import CDLL
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from areal_bus import native
from areal_bus.messages import PROTOCOL
from areal_bus.weights import checksum
from areal_bus.weights.checksum import LANE_BYTES, ROWS_AT_ONCE, Checksum

SEVERAL_ROWS = 3 * LANE_BYTES + 1004


def data(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (n,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_the_checksum_is_fixed_for_a_protocol_version() -> None:
    ascending = (torch.arange(3 * LANE_BYTES + 6) % 251).to(torch.uint8)
    assert (PROTOCOL, checksum.checksum(ascending)) == (20, 1495766039)  # another sum is another protocol


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
    assert pieces.value() == checksum.checksum(whole) == checksum.checksum(whole.clone())


def test_rows_folded_together_have_the_checksum_of_rows_one_by_one() -> None:
    """More rows than are folded at once on a device, so that powers wrap and a whole block follows another."""
    whole, blocks = data((2 * ROWS_AT_ONCE + 3) * LANE_BYTES + 5), Checksum(rows_at_once=ROWS_AT_ONCE)
    blocks.add(whole)
    assert blocks.value() == checksum.checksum(whole)


@pytest.mark.parametrize("distance", [4, 64, 256, LANE_BYTES, 2 * LANE_BYTES, LANE_BYTES + 4])
def test_checksum_differs_with_any_bit_words_that_changed_places_and_a_wrong_offset(distance: int) -> None:
    whole, dice, apart = data(SEVERAL_ROWS), random.Random(distance), distance // 4
    words, right = whole.view(torch.int32), checksum.checksum(whole)
    for _ in range(50):
        flipped, swapped = whole.clone(), words.clone()
        flipped[dice.randrange(SEVERAL_ROWS)] ^= 1 << dice.randrange(8)
        at = dice.randrange(len(words) - apart)
        swapped[at], swapped[at + apart] = words[at + apart], words[at]
        assert right not in (checksum.checksum(flipped), checksum.checksum(swapped.view(torch.uint8)))
    assert right not in (checksum.checksum(torch.roll(whole, n)) for n in (1, distance))


# copied and summed up at once

MANY = [checksum.N_LANES * 2 - 1, checksum.N_LANES * 2 + 3, 70_001, 200_003, 600_003]  # last: several rows at once
SIZES = st.integers(0, 5000) | st.sampled_from(MANY)
KINDS = [
    (torch.float32, torch.bfloat16), (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16),
    (torch.uint8, torch.uint8), (torch.int64, torch.int64), (torch.float32, torch.float16),
]  # fmt: skip


def numbers(n: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Any bits but NaN's, whose payload nobody promises."""
    dice = random.Random(seed)
    raw = torch.frombuffer(bytearray(dice.randbytes(max(n, 1) * dtype.itemsize)), dtype=torch.uint8).view(dtype)[:n]
    return torch.nan_to_num(raw, nan=0.0, posinf=torch.inf, neginf=-torch.inf) if dtype.is_floating_point else raw


def plainly(source: Tensor, target: Tensor) -> int:
    """The sum of what torch copies."""
    target.copy_(source)
    whole = Checksum()
    whole.add(target.view(torch.uint8))
    return whole.value()


@pytest.mark.slow
@pytest.mark.parametrize("kinds", KINDS, ids=str)
@given(n=SIZES, seed=st.integers(0, 1000), cuts=st.lists(st.integers(0, 5000), max_size=3))
def test_copied_bytes_and_checksum_equal_those_of_a_separate_copy_and_sum(
    kinds: tuple[torch.dtype, torch.dtype], n: int, seed: int, cuts: list[int]
) -> None:
    source = numbers(n, kinds[0], seed)
    expected, found = (torch.zeros(n, dtype=kinds[1]) for _ in range(2))
    sum_of_all = plainly(source, expected)
    ends = sorted({*(min(cut, n) for cut in cuts), n})
    running = Checksum()
    for start, stop in zip([0, *ends], ends, strict=False):
        running.copy(source[start:stop], found[start:stop])
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    assert running.value() == sum_of_all


@given(before=SIZES, n=SIZES, seed=st.integers(0, 1000), rows_at_once=st.sampled_from([0, 3]))
def test_a_sum_that_is_restarted_is_as_a_new_one(before: int, n: int, seed: int, rows_at_once: int) -> None:
    running = Checksum(rows_at_once=rows_at_once)
    for size in (before, n):
        running.restart()
        raw = numbers(size, torch.uint8, seed + size)
        running.copy(raw, torch.empty_like(raw))
        assert running.value() == checksum.checksum(raw)


def test_numbers_are_rounded_as_torch_rounds_them() -> None:
    """To the nearest, ties to even; infinities, the smallest ones, and what overflows to infinity."""
    bits = [0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x00000001, 0x80000000, 0x00008000]
    source = torch.tensor([bit - (1 << 32) if bit >> 31 else bit for bit in bits * 4], dtype=torch.int32).view(
        torch.float32
    )
    for n_times in (1, 10_000):  # in one row, and in several at once
        many = source.repeat(n_times)
        target = torch.empty(len(many), dtype=torch.bfloat16)
        Checksum().copy(many, target)
        assert torch.equal(target.view(torch.int16), many.bfloat16().view(torch.int16))


ONE = 0x3F800000
NOT_NUMBERS = [0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001, 0x7FC00000]  # by adding: infinity, -0, 0, ...


@pytest.mark.parametrize("n_times", [4, 20_000])
def test_of_all_that_is_no_number_one_is_made(n_times: int) -> None:
    """Whatever its bits are, in one row and in several at once, where C rounds; the sum is of what is there."""
    source = torch.tensor([*NOT_NUMBERS, ONE] * n_times, dtype=torch.uint32).view(torch.float32)
    target = torch.empty(len(source), dtype=torch.bfloat16)
    running, expected = Checksum(), Checksum()
    running.copy(source, target)
    expected.add(target.view(torch.uint8))
    assert target.isnan().tolist() == [*[True] * len(NOT_NUMBERS), False] * n_times
    if checksum._copy_function(source, target):
        assert set(target.view(torch.int16).tolist()) == {0x7FC0, ONE >> 16}
    assert running.value() == expected.value()


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "skipped", [(0, 0), (1, 0), (0, 1), (0, 2), (3, 8), (5, 16), (0, 32), (16, 0), (0, 600)], ids=str
)
def test_it_does_not_matter_where_in_a_cache_line_the_bytes_lie(to: torch.dtype, skipped: tuple[int, int]) -> None:
    """Several rows, from a source and to a target that begin so many numbers later."""
    n = 5 * 2 * checksum.N_LANES + 77
    raw = numbers(n + skipped[0] + 1, torch.float32, 3)
    source, target = raw[skipped[0] : skipped[0] + n], torch.empty(n + skipped[1], dtype=to)[skipped[1] :]
    expected = torch.empty(n, dtype=to)
    sum_of_all, running = plainly(source, expected), Checksum()
    running.copy(source, target)
    assert torch.equal(target.view(torch.int16), expected.view(torch.int16))
    assert running.value() == sum_of_all


@pytest.mark.slow
@pytest.mark.parametrize("to", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("poorer", [("-mno-avx512f",), ("-mno-avx512f", "-mno-avx2")], ids=str)
def test_on_a_lesser_processor_it_is_the_same(
    poorer: tuple[str, ...], to: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = native.compiler()
    if compiler is None or platform.machine() != "x86_64":
        pytest.skip("needs a C compiler, on x86")
    folder, source, found = Path(native.__file__).parent, numbers(200_003, torch.float32, 2), []
    monkeypatch.setattr(checksum, "_function", checksum._function.__wrapped__)
    for flags in ((), poorer):  # each must be compiled: `native.library` would go on with less
        path = native._compiled(native.sources(folder), compiler, (*native.FLAGS, *native.WIDE, *flags), tmp_path)
        monkeypatch.setattr(native, "library", {folder: CDLL(str(path))}.get)
        running, target = Checksum(), torch.empty(len(source), dtype=to)
        running.copy(source, target)
        found.append((running.value(), target))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def test_it_is_c_that_is_tested() -> None:
    """Where there is a compiler: else everything above holds for torch alone."""
    if native.compiler() is None:
        pytest.skip("no C compiler on this machine")
    checksum.prepare()
    for kinds in ((torch.float32, torch.bfloat16), (torch.uint8, torch.uint8), (torch.float32, torch.float32)):
        assert checksum._copy_function(*(torch.zeros(8, dtype=kind) for kind in kinds)) is not None, kinds
    askew = torch.zeros(9, dtype=torch.uint8)[1:]
    assert checksum._copy_function(askew, torch.zeros(8, dtype=torch.uint8)) is None
    assert checksum._copy_function(torch.zeros(8, dtype=torch.uint8), askew) is None
    assert checksum._copy_function(torch.zeros(16)[::2], torch.zeros(8)) is None


def test_without_a_compiler_torch_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    source = numbers(300_001, torch.float32, 1)
    sums, targets = [], []
    for by_torch in (False, True):
        if by_torch:
            monkeypatch.setattr(checksum, "_function", lambda name: None)
        running, target = Checksum(), torch.empty(300_001, dtype=torch.bfloat16)
        running.copy(source, target)
        sums.append(running.value())
        targets.append(target)
    assert sums[0] == sums[1]
    assert torch.equal(*targets)
