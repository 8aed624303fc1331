"""Context parallelism: several learner ranks compute one packed row, each a part of its tokens.

Every layer works on a rank's own rows; attention first gathers the keys and values of all rows (all-gather context
parallelism, as in the training of Llama 3, arXiv 2407.21783, section 3.3.2). In the backward pass their gradients are
summed over the ranks. A row is cut into 2 P chunks, and rank r of P has chunks r and 2 P - 1 - r, so that causal
attention costs each rank alike.

The ranks of a context group hold the same batch. Each computes the whole loss, from the log-probs of all, and sends
gradients only through its own rows. So the sum over all learner ranks, which FSDP2 computes, is the gradient.

Shapes: S tokens of a packed row, R = S / P of this rank, N wanted tokens, M of this rank (the most of any, filled up).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from actors.learner.link.rendezvous import ContextGroup
from actors.models.packed_row import PackedRow
from areal_cpu.matmul import stepped

BLOCK = 512  # queries that attend together on a CPU: its kernels need a mask, which is small for few of them


def padded(n_rows: int, size: int, device: torch.device) -> int:
    """The next number of rows from `n_rows` on that `size` ranks share evenly, in two chunks each."""
    own = stepped(-(-n_rows // size), device)
    return size * (own + own % 2)


def rows_by_rank(n_rows: int, size: int) -> list[Tensor]:
    """The rows of each rank: chunks r and 2 `size` - 1 - r of 2 `size`. `n_rows` is a multiple of 2 `size`."""
    chunks = torch.arange(n_rows).view(2 * size, -1)
    return [torch.cat([chunks[rank], chunks[-1 - rank]]) for rank in range(size)]


class RowSplit:
    """This rank's part of a packed row, and its attention to all of it. No dataclass: FSDP2 rebuilds those."""

    __slots__ = ("_back_R", "_base", "_group", "_keys", "_places_N", "_queries_R", "_runs", "part")

    def __init__(self, row: PackedRow, group: ContextGroup, device: torch.device) -> None:
        """`row` has a number of rows that `padded` gave."""
        shares = rows_by_rank(len(row.ids_S), group.size)
        own_R = shares[group.index]
        self._group = group
        self._base: Tensor | None = None  # of the masks
        wanted_M, targets_M, heat_M = self._choose_wanted(row, shares, device)
        self.part = replace(  # of the row: what a forward pass of this rank's tokens needs
            row,
            ids_S=row.ids_S[own_R],
            positions_S=row.positions_S[own_R],
            lengths=(len(own_R),),
            wanted_N=wanted_M,
            targets_N=targets_M,
            heat_N=heat_M,
            expand_E=None,
            keep_S=None,
        )
        self._plan_attention(row, shares, device)

    def _choose_wanted(
        self, row: PackedRow, shares: Sequence[Tensor], device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """This rank's wanted rows, as places among its own, and their targets and temperatures; the first row again
        fills them up.
        """
        owner_S, local_S = torch.empty_like(row.positions_S), torch.empty_like(row.positions_S)
        for rank, rows in enumerate(shares):
            owner_S[rows], local_S[rows] = rank, torch.arange(len(rows))
        owner_N, size = owner_S[row.wanted_N], self._group.size
        counts = torch.bincount(owner_N, minlength=size)
        n_own = stepped(max(int(counts.max()), 1), device)
        nth_N = torch.empty_like(owner_N)
        for rank in range(size):
            nth_N[owner_N == rank] = torch.arange(int(counts[rank]))
        self._places_N = (owner_N * n_own + nth_N).to(device)
        is_own_N = owner_N == self._group.index
        fill = torch.zeros(n_own - int(counts[self._group.index]), dtype=torch.int64)
        own = torch.cat([local_S[row.wanted_N[is_own_N]], fill])
        heat_M = None if row.heat_N is None else torch.cat([row.heat_N[is_own_N], torch.ones(len(fill))])
        return own, torch.cat([row.targets_N[is_own_N], fill.to(row.targets_N.dtype)]), heat_M

    def _plan_attention(self, row: PackedRow, shares: Sequence[Tensor], device: torch.device) -> None:
        """Runs of own tokens that are neighbours in a sequence: they see it from its beginning to the run's end."""
        n_tokens = sum(row.lengths)
        ends = torch.tensor(row.lengths).cumsum(0)
        expand_E = torch.arange(n_tokens) if row.expand_E is None else row.expand_E
        place_S = torch.arange(n_tokens) if row.keep_S is None else row.keep_S
        places, queries_R = place_S[shares[self._group.index]].sort()
        sequence_R = torch.searchsorted(ends, places, right=True)
        is_new = torch.ones(len(places), dtype=torch.bool)
        is_new[1:] = (places.diff() != 1) | (sequence_R.diff() != 0)
        begins = is_new.nonzero()[:, 0]
        lasts = torch.cat([begins[1:], torch.tensor([len(places)])]) - 1
        starts = (ends - torch.tensor(row.lengths))[sequence_R[begins]]
        gathered_S = torch.empty(len(row.ids_S), dtype=torch.int64)  # place of each row behind an all-gather
        gathered_S[torch.cat(list(shares))] = torch.arange(len(row.ids_S))
        spans = list(zip(starts.tolist(), (places[lasts] + 1).tolist(), strict=True))
        self._keys = torch.cat([gathered_S[expand_E[start:end]] for start, end in spans]).to(device)
        n_queries = (lasts - begins + 1).tolist()
        self._runs = [(n, end - start) for n, (start, end) in zip(n_queries, spans, strict=True)]
        self._queries_R, self._back_R = queries_R.to(device), queries_R.argsort().to(device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None) -> Tensor:
        """Query (1, heads, R, d), key and value (1, key heads, R, d) -> (1, R, heads, d). A collective."""
        own = torch.cat([key, value], dim=-1)[0].transpose(0, 1)
        seen = _Gathered.apply(own, self._group).index_select(0, self._keys)  # type: ignore[no-untyped-call]
        queries = torch.split(query[0].index_select(1, self._queries_R), [n for n, _ in self._runs], dim=1)
        outputs: list[Tensor] = []
        for q, kv in zip(queries, torch.split(seen, [n for _, n in self._runs]), strict=True):
            k, v = torch.split(kv.transpose(0, 1).unsqueeze(0), [key.shape[-1], value.shape[-1]], dim=-1)
            outputs.append(self._attention(q.unsqueeze(0), k, v, scaling)[0])
        whole = torch.cat(outputs, dim=1).index_select(1, self._back_R)
        return whole.transpose(0, 1).unsqueeze(0)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, scaling: float | None) -> Tensor:
        """Causal attention of the last tokens of a sequence to all of it."""
        n_q, n_k, is_grouped = q.shape[2], k.shape[2], q.shape[1] != k.shape[1]
        if n_q == n_k or n_q == 1:
            return scaled_dot_product_attention(q, k, v, is_causal=n_q > 1, scale=scaling, enable_gqa=is_grouped)
        if q.device.type == "cuda":
            if is_grouped:  # of torch's kernels for this mask not all take fewer key heads
                k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
            return scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(n_q, n_k), scale=scaling)
        outputs: list[Tensor] = []
        for first in range(0, n_q, BLOCK):
            block = q[:, :, first : first + BLOCK]
            end = n_k - n_q + first + block.shape[2]
            seen = (block, k[:, :, :end], v[:, :, :end])
            mask = self._mask(block.shape[2], end, q)
            outputs.append(scaled_dot_product_attention(*seen, attn_mask=mask, scale=scaling, enable_gqa=is_grouped))
        return torch.cat(outputs, dim=2)

    def _mask(self, n_q: int, n_k: int, like: Tensor) -> Tensor:
        """(n_q, n_k): 0 where a query sees a key, else -inf: part of one mask, in the queries' type (else copied)."""
        if self._base is None or self._base.dtype is not like.dtype:
            longest = max(n for _, n in self._runs)
            n_most = min(BLOCK, longest)
            self._base = like.new_zeros(n_most, longest)
            self._base[:, longest - n_most :] = like.new_full((n_most, n_most), float("-inf")).triu(1)
        return self._base[self._base.shape[0] - n_q :, self._base.shape[1] - n_k :]

    def whole(self, found_M: Tensor) -> Tensor:
        """(N,) the numbers of all wanted tokens, in the order of the row, from (M,) of this rank. A collective."""
        gathered: Tensor = _GatheredOnce.apply(found_M, self._group)  # type: ignore[no-untyped-call]
        return gathered[self._places_N]


def _all_gather(part: Tensor, group: ContextGroup) -> Tensor:
    """(n, ...) -> (P n, ...), by rank."""
    found = part.new_empty(group.size * len(part), *part.shape[1:])
    dist.all_gather_single(found, part.contiguous(), group=group.handle)
    return found


class _Gathered(torch.autograd.Function):
    """The rows of all ranks. The gradient of a row is the sum of what all ranks have for it, in float32."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ContextGroup) -> Tensor:
        ctx.group = group
        return _all_gather(part, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        group: ContextGroup = ctx.group
        whole = gradients[0].float().contiguous()
        own = whole.new_empty(len(whole) // group.size, *whole.shape[1:])
        dist.reduce_scatter_single(own, whole, group=group.handle)
        return own.to(gradients[0].dtype), None


class _GatheredOnce(torch.autograd.Function):
    """The numbers of all ranks. Each rank computes the same loss from them: its own part of the gradient is all."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ContextGroup) -> Tensor:
        ctx.group, ctx.n = group, len(part)
        return _all_gather(part, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        first = ctx.group.index * ctx.n
        return gradients[0][first : first + ctx.n], None
