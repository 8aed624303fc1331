"""Attention over blocks is attention: rows of any lengths, in any order of coming and going."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from areal_cpu.build import library
from areal_cpu.paged_attention import P
from areal_cpu.paged_cache import LOOKS, DecodeBlocks, PagedCache
from areal_cpu.sequences import CachePiece

pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler on this machine")

N_QUERY, N_KEY, WIDTH, SCALE = 4, 2, 8, 0.3
DICE = random.Random(1)


@pytest.fixture
def blocks() -> PagedCache:
    """Empty ones."""
    return PagedCache(N_QUERY, N_KEY)


def seen(view: DecodeBlocks, qkv_nSD: Tensor) -> Tensor:
    """What a step's rows attend to, of queries and keys that are turned already."""
    shape = (len(qkv_nSD), WIDTH)
    return view.attended(qkv_nSD, torch.ones(shape), torch.zeros(shape), 0, SCALE)


def attended(blocks: PagedCache, kept: list[Tensor], *more: int) -> None:
    """One token more for every row, by blocks and by torch's own attention; `kept`: (2, K, T, D) of each row.
    `more`: lengths of rows behind these, which do not decode.
    """
    qkv_nSD = torch.randn(len(kept), N_QUERY + 2 * N_KEY, WIDTH)
    blocks.reserve([*(rows.shape[2] + 1 for rows in kept), *more], len(kept))
    view, mask = blocks.decoding([rows.shape[2] for rows in kept], torch.float32, torch.device("cpu"))
    assert mask is None
    found_nE = seen(view, qkv_nSD.clone())
    for row, qkv_SD in enumerate(qkv_nSD):
        new = qkv_SD[N_QUERY:].view(2, N_KEY, 1, WIDTH)
        kept[row] = keys, values = torch.cat([kept[row], new], dim=2)
        q_1H1D = qkv_SD[None, :N_QUERY, None]
        expected = F.scaled_dot_product_attention(q_1H1D, keys[None], values[None], scale=SCALE, enable_gqa=True)
        torch.testing.assert_close(found_nE[row], expected.flatten())


def filled(blocks: PagedCache, kept: list[Tensor], n: int, *, siblings: int = 1) -> None:
    """New rows with the same first n tokens."""
    first = len(kept)
    kept += [torch.randn(2, N_KEY, n, WIDTH)] * siblings
    blocks.reserve([rows.shape[2] + 1 for rows in kept], first)
    view = blocks.filling([CachePiece(list(range(first, first + siblings)), 0, n, 0)])
    view.update(kept[-1][:1], kept[-1][1:], 0)


def test_rows_attend_to_their_own_blocks_when_others_join_and_leave(blocks: PagedCache) -> None:
    kept = list[Tensor]()
    for _ in range(60):
        if len(kept) < 9:
            filled(blocks, kept, DICE.randint(1, 3 * P), siblings=DICE.randint(1, 3))
        attended(blocks, kept)
        for _ in range(DICE.randint(0, 2)):
            row = DICE.randrange(len(kept))
            blocks.drop(row, len(kept) - 1, 0)
            kept[row] = kept[-1]
            kept.pop()
        if DICE.random() < 0.3:
            n = DICE.randint(1, kept[0].shape[2])
            blocks.copy(0, len(kept), n)
            kept.append(kept[0][:, :, :n])
        attended(blocks, kept)


def test_rows_behind_those_that_decode_are_left_alone(blocks: PagedCache) -> None:
    kept = list[Tensor]()
    filled(blocks, kept, 40)
    attended(blocks, kept, 70)


def test_full_blocks_of_a_prompt_are_kept_once_for_all_its_rows(blocks: PagedCache) -> None:
    kept = list[Tensor]()
    filled(blocks, kept, 4 * P + 3, siblings=6)
    for first, length in ((0, 4 * P + 2), (6, P + 5), (7, P)):  # of one with others, and of those that came by copy
        blocks.copy(first, len(kept), length)
        kept.append(kept[first][:, :, :length])
        attended(blocks, kept)
    filled(blocks, kept, 2 * P)
    blocks.copy(len(kept) - 1, len(kept), 2 * P - 1)  # of one that was alone
    kept.append(kept[-1][:, :, : 2 * P - 1])
    attended(blocks, kept)
    assert len(blocks.common.users) == 5
    assert sorted(len(users) for users in blocks.common.users) == [2, 7, 7, 7, 9]
    for _ in range(7):
        blocks.drop(1, len(kept) - 1, 0)
        kept[1] = kept[-1]
        kept.pop()
        attended(blocks, kept)


def test_a_prompt_of_full_blocks_alone_can_be_copied_before_any_row_has_decoded(blocks: PagedCache) -> None:
    kept = list[Tensor]()
    filled(blocks, kept, 2 * P, siblings=2)
    blocks.copy(0, 2, 2 * P - 1)
    kept.append(kept[0][:, :, : 2 * P - 1])
    attended(blocks, kept)


def test_rows_of_two_prompts_may_come_in_turn(blocks: PagedCache) -> None:
    n = 2 * P + 1
    prompts = torch.randn(2, N_KEY, 2 * n, WIDTH)
    blocks.reserve([n + 1] * 4, 0)
    blocks.filling([CachePiece([0, 2], 0, n, 0), CachePiece([1, 3], n, 2 * n, 0)]).update(prompts[:1], prompts[1:], 0)
    attended(blocks, [prompts[:, :, :n], prompts[:, :, n:]] * 2)
    assert len(blocks.common.users) == 4


def test_paged_cache_capacity_follows_its_use(blocks: PagedCache) -> None:
    kept = list[Tensor]()
    filled(blocks, kept, 3000)
    filled(blocks, kept, 5)
    most = blocks.capacity
    assert 3000 <= most <= 4000
    blocks.drop(0, 1, 6)
    attended(blocks, kept[1:])
    assert blocks.capacity == most  # what ends may come again
    for _ in range(2 * LOOKS):
        blocks.reserve([6], 1)
    assert blocks.capacity < most / 4
    attended(blocks, kept[1:])
