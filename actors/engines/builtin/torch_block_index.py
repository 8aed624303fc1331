"""Block index of one decode step in torch: maps KV blocks to rows.

Shapes: n rows, B blocks of one row's own, A blocks that rows have in common, M rows of the latter at most, H query
heads, K key heads, G = H / K, S = H + 2 K, J blocks of the longest row. A unit is one block for one query head of one
row: U of (B K G) and, behind these, (A K M G).
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from actors.engines.builtin.block_pool import BlockPool


@dataclass(frozen=True, slots=True)
class BlockIndex:
    """Of rows 0 .. n-1; blocks of rows behind these are computed, and not read."""

    n_rows: int
    longest: int  # J
    n_own: int  # B
    n_common: int  # A
    row_B: Tensor  # that each block is of
    query_U: Tensor  # of those in common, (n S): row and head
    unit_X: Tensor  # (n H J): of the rows' heads, one after the other
    share_U: Tensor  # where each unit is in these
    part_X: Tensor  # what is added up: units; blocks where nothing is in common
    first: Tensor  # where the parts of a row's head, or of a row, begin among these


def ordered(n: int, own: BlockPool, common: BlockPool, *, n_query: int, n_key: int) -> BlockIndex:
    """Where blocks are, as it is now."""
    tables = own.tables[:n]
    return _shared(tables, own, common, n_query, n_key) if common.users else _apart(tables, own, n_query)


def _apart(tables: list[list[int]], own: BlockPool, heads: int) -> BlockIndex:
    """Nothing is in common."""
    n_own, longest, head_H = len(own.users), max(map(len, tables)), torch.arange(heads)
    padded_nJ = torch.tensor([table + [0] * (longest - len(table)) for table in tables])  # block 0 is masked there
    rows, at = [0] * n_own, [0] * n_own
    for row, table in enumerate(tables):
        for which, block in enumerate(table):
            rows[block], at[block] = row, which
    row_B = torch.tensor(rows)
    return BlockIndex(
        len(tables),
        longest,
        n_own,
        0,
        row_B=row_B,
        query_U=row_B[:0],
        unit_X=(padded_nJ[:, None] * heads + head_H[:, None]).flatten(),
        share_U=((row_B[:, None] * heads + head_H) * longest + torch.tensor(at)[:, None]).flatten(),
        part_X=torch.tensor([block for table in tables for block in table]),
        first=torch.tensor([0, *accumulate(map(len, tables[:-1]))]),
    )


def _shared(tables: list[list[int]], own: BlockPool, common: BlockPool, n_query: int, n_key: int) -> BlockIndex:
    n_own, n_common, most = len(own.users), len(common.users), max(map(len, common.users))
    n, near, group = len(tables), len(own.users) * n_query, n_query // n_key
    places = [{row: at for at, row in enumerate(users)} for users in common.users]
    far = [[block * n_key * most + places[block][row] for block in common.tables[row]] for row in range(n)]
    blocks = [mine + others for mine, others in zip(far, tables, strict=True)]
    longest = max(map(len, blocks))
    block_n1J = torch.tensor([row + [0] * (longest - len(row)) for row in blocks])[:, None]
    n_far_n11, n_blocks_n11 = torch.tensor([[len(row) for row in far], [len(row) for row in blocks]])[:, :, None, None]
    at_J, head_H = torch.arange(longest), torch.arange(n_query)
    far_H = near + head_H // group * (most * group) + head_H % group
    unit_nHJ = torch.where(at_J < n_far_n11, block_n1J * group + far_H[:, None], block_n1J * n_query + head_H[:, None])
    has_X = (at_J < n_blocks_n11).expand_as(unit_nHJ).flatten()
    unit_X = unit_nHJ.flatten()  # what a row does not have is block 0, which is masked there
    share_U = torch.zeros(near + n_common * most * n_query, dtype=torch.long)
    share_U[unit_X[has_X]] = has_X.nonzero()[:, 0]
    head_U = share_U // longest
    far_U = head_U[near:]
    n_blocks_nH = n_blocks_n11.flatten().repeat_interleave(n_query)
    return BlockIndex(
        n,
        longest,
        n_own,
        n_common,
        row_B=head_U[:near:n_query] // n_query,
        query_U=far_U // n_query * (n_query + 2 * n_key) + far_U % n_query,
        unit_X=unit_X,
        share_U=share_U,
        part_X=unit_X[has_X],
        first=n_blocks_nH.cumsum(0) - n_blocks_nH,
    )
