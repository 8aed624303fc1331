"""Paged KV cache for the C kernels on CPU: its block manager, and decode attention over its blocks.

A row has as many blocks as its tokens need. The blocks in use are contiguous, so attention reads memory in one pass and
short rows do not pay for long ones. Rows with the same prompt share its full blocks. Where the kernels do not apply,
the engine has a dense one (actors/engines/builtin).

Shapes: n rows, C blocks of capacity, P positions of a block, H query heads, K key heads, S = H + 2 K, D head width, L
positions, T tokens of a packed forward, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from areal_cpu.decode_step import DecodeStep, Draws
from areal_cpu.paged_attention import Decode, P, Tables
from areal_cpu.sequences import CachePiece

FEWEST = 8  # smallest capacity, in blocks
LOOKS = 256  # calls of `settle` between two checks whether to shrink: a group that ends is soon replaced


class GivenTokens(Protocol):
    """Keys and values that a packed forward pass does not compute: those of a prefix cache."""

    @property
    def computed_T(self) -> Tensor:
        """Places of the computed tokens."""

    def spread(self, keys_1KTD: Tensor, values_1KTD: Tensor, index: int, /) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens, given ones and these computed ones of a layer."""

    def rows(self, qkv_TA: Tensor, index: int, /) -> Tensor:
        """Rows of queries, keys and values of all tokens; given ones have no queries."""


class BlockPool:
    """Preallocated (2, C, K, P, D) per layer, keys first. Used blocks are contiguous, but for holes until `settle`."""

    def __init__(self, n_key: int) -> None:
        self.tables: list[list[int]] = []  # block table of each row, in the order of its positions
        self.users: list[list[int]] = []  # rows that use each block; none: a hole
        self._n_key, self._capacity = n_key, FEWEST
        self._holes: list[int] = []
        self._n_looks = self._most = 0  # calls since the last check, and the most blocks needed in one of them
        self._layers: dict[int, Tensor] = {}

    @property
    def capacity(self) -> int:
        """Capacity in positions, over all rows."""
        return self._capacity * P

    def layer(self, index: int, like: Tensor) -> Tensor:
        """Keys and values of a layer; allocated on first use with the dtype of `like` (.., D)."""
        if index not in self._layers:
            self._layers[index] = self._new(like)
        return self._layers[index]

    def layers(self) -> list[tuple[int, Tensor]]:
        return list(self._layers.items())

    def add(self, rows: Sequence[int]) -> int:
        """Assign one more block to these rows; `grow` allocates it."""
        if not self._holes:
            self._holes.append(len(self.users))
            self.users.append([])
        block = self._holes.pop()
        for row in rows:
            self.join(row, block)
        return block

    def join(self, row: int, block: int) -> None:
        """Let the row share this block."""
        self.users[block].append(row)
        self.tables[row].append(block)

    def take_first(self, row: int) -> int:
        """Release the first block of a row; its content stays until the next `add` or `settle`."""
        block = self.tables[row].pop(0)
        self._leave(row, block)
        return block

    def drop(self, row: int, last: int) -> None:
        """Free a row; the last row takes its index."""
        for block in self.tables[row]:
            self._leave(row, block)
        self.tables[row] = self.tables[last]
        self.tables.pop()
        for block in self.tables[row] if row < last else ():
            users = self.users[block]
            users[users.index(last)] = row

    def grow(self) -> None:
        """Allocate all assigned blocks, and a quarter more."""
        if len(self.users) > self._capacity:
            self._resize(len(self.users))

    def settle(self, n_soon: int) -> bool:
        """Close holes, except those that the next `n_soon` blocks fill. Shrink if LOOKS calls needed a quarter of the
        capacity at most. Returns whether blocks moved.
        """
        n_soon = max(n_soon, len(self.users) - len(self._holes))
        closes = len(self.users) > n_soon
        if closes:
            self._close()
        self._most = max(self._most, n_soon)
        self._n_looks += 1
        if self._n_looks == LOOKS:
            if self._capacity > 4 * max(self._most, FEWEST):
                self._resize(self._most)
            self._n_looks = self._most = 0
        return closes

    def _close(self) -> None:
        """Move the last blocks into the holes, in one copy."""
        n_left = len(self.users) - len(self._holes)
        if self._holes:
            movers = sorted(set(range(n_left, len(self.users))).difference(self._holes))
            targets = [hole for hole in self._holes if hole < n_left]
            for mover, target in zip(movers, targets, strict=True):
                for row in self.users[mover]:
                    self.tables[row][self.tables[row].index(mover)] = target
                self.users[target] = self.users[mover]
            del self.users[n_left:]
            self._holes.clear()
            for layer in self._layers.values() if movers else ():
                layer[:, targets] = layer[:, movers]

    def _leave(self, row: int, block: int) -> None:
        self.users[block].remove(row)
        if not self.users[block]:
            self._holes.append(block)

    def _resize(self, n: int) -> None:
        old, self._capacity = self._capacity, max(n * 5 // 4, FEWEST)
        kept = min(old, self._capacity)
        for index, layer in self._layers.items():
            self._layers[index] = self._new(layer, layer[:, :kept])

    def _new(self, like: Tensor, kept: Tensor | None = None) -> Tensor:
        new = like.new_empty(2, self._capacity, self._n_key, P, like.shape[-1])
        if kept is not None:
            new[:, : kept.shape[1]] = kept
        # zeros: a masked cell enters a product with weight 0, and 0 * NaN is NaN
        new[:, 0 if kept is None else kept.shape[1] :] = 0
        return new


Cells = tuple[int, int, int, int]  # block, first position in it, how many, the token of the first


class PagedCache:
    """Rows are those of the engine. The shared blocks of a row come first, then its own."""

    def __init__(self, n_query: int, n_key: int) -> None:
        self._n_query, self._n_key = n_query, n_key
        self.own, self.common = BlockPool(n_key), BlockPool(n_key)
        self._tables: Tables | None = None  # valid until a block table changes

    @property
    def capacity(self) -> int:
        """Capacity in positions, over all rows."""
        return self.own.capacity + self.common.capacity

    def reserve(self, lengths: Sequence[int], n_cached: int) -> None:
        """Allocate `lengths` positions for each of the first `n_cached` rows; keeps their content."""
        self._begin(len(lengths))
        tables = zip(self.own.tables, self.common.tables, lengths[:n_cached], strict=False)
        for row, (own, common, length) in enumerate(tables):
            if (len(own) + len(common)) * P < length:
                self._extend(row, length)
        self.own.grow()
        n_soon = sum(-(-length // P) for length in lengths) if n_cached < len(lengths) else 0
        if any([self.own.settle(n_soon), self.common.settle(n_soon)]):
            self._tables = None

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a row to another. Full blocks are shared, not copied."""
        n_full = length // P
        while len(self.common.tables[source]) < n_full:
            self._publish(source)
        self._begin(target + 1)
        self._tables = None
        for block in self.common.tables[source][:n_full]:
            self.common.join(target, block)
        if length % P:
            self._extend(target, length)
            self.own.grow()
            rest = self.own.tables[target][0]
            blocks = self.common.tables[source] + self.own.tables[source]
            pool = self.common if n_full < len(self.common.tables[source]) else self.own
            for index, layer in pool.layers():
                self.own.layer(index, layer)[:, rest] = layer[:, blocks[n_full]]

    def drop(self, row: int, last: int, length: int) -> None:
        """Free a row; the last row takes its index. `reserve` fills or closes the holes."""
        self.own.drop(row, last)
        self.common.drop(row, last)
        self._tables = None

    def read(self, row: int, begin: int, end: int) -> Mapping[int, Tensor]:
        """Layer -> (n, 2, K, D), keys first, of the blocks of a row at positions begin .. end, multiples of P."""
        common, own = self.common.tables[row], self.own.tables[row]
        first, last, n_common = begin // P, end // P, len(common)
        found: dict[int, list[Tensor]] = {}
        for pool, blocks in (
            (self.common, common[first:last]),
            (self.own, own[max(first - n_common, 0) : max(last - n_common, 0)]),
        ):
            for index, layer in pool.layers() if blocks else ():
                found.setdefault(index, []).append(layer[:, blocks].permute(1, 3, 0, 2, 4).flatten(0, 1))
        return {index: torch.cat(parts) for index, parts in found.items()}

    def filling(self, pieces: Sequence[CachePiece], given: GivenTokens | None = None) -> "FillBlocks":
        """A view that writes the pieces of one packed prefill."""
        for piece in pieces:
            n = piece.end - piece.begin
            is_new = not any(self.own.tables[row] or self.common.tables[row] for row in piece.rows)
            if len(piece.rows) > 1 and is_new:
                self._tables = None
                for _ in range(n // P):
                    self.common.add(piece.rows)
            for row in piece.rows:
                self._extend(row, piece.start + n)
        self.own.grow()
        self.common.grow()
        return FillBlocks(self, pieces, given)

    def decoding(
        self, positions: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> tuple["DecodeBlocks", None]:
        """A view that writes the next token of rows 0 .. n-1 and attends to their cache; no mask is needed."""
        return self.steps(positions), None

    def steps(self, positions: Sequence[int], *, n_steps: int = 1) -> "DecodeBlocks":
        """The same for one or several steps."""
        n = len(positions)
        if self._tables is None or len(self._tables) != n:
            self._tables = Tables(self.common.tables[:n], self.own.tables[:n])
        return DecodeBlocks(self, Decode(self._tables, positions, self._n_query, self._n_key, n_steps=n_steps))

    def _begin(self, n_rows: int) -> None:
        """Add block tables up to `n_rows`."""
        for pool in (self.own, self.common):
            pool.tables += [[] for _ in range(n_rows - len(pool.tables))]

    def _extend(self, row: int, length: int) -> None:
        n_missing = -(-length // P) - len(self.common.tables[row]) - len(self.own.tables[row])
        if n_missing > 0:
            self._tables = None
            for _ in range(n_missing):
                self.own.add([row])

    def _publish(self, row: int) -> None:
        """Move the first own block of a row to the shared pool."""
        block = self.common.add([row])
        self.common.grow()
        mine = self.own.take_first(row)
        for index, layer in self.own.layers():
            self.common.layer(index, layer)[:, block] = layer[:, mine]
        self._tables = None


class FillBlocks:
    """Writes the pieces of one packed prefill into their rows; attention reads the packed sequence itself."""

    def __init__(self, blocks: PagedCache, pieces: Sequence[CachePiece], given: GivenTokens | None) -> None:
        self.given = given
        cells: tuple[list[Cells], list[Cells]] = ([], [])  # of own blocks, of shared blocks
        written = set[tuple[int, int]]()
        for piece in pieces:
            end = piece.start + piece.end - piece.begin
            for row in piece.rows:
                common = blocks.common.tables[row]
                table = common + blocks.own.tables[row]
                for which in range(piece.start // P, -(-end // P)):
                    is_common, block = which < len(common), table[which]
                    if is_common and (block, piece.begin) in written:
                        continue
                    if is_common:
                        written.add((block, piece.begin))
                    first, last = max(piece.start, which * P), min(end, which * P + P)
                    cells[is_common].append((block, first % P, last - first, piece.begin + first - piece.start))
        pools = zip((blocks.own, blocks.common), cells, strict=True)
        self._parts = [(pool, *_indices(of_pool)) for pool, of_pool in pools if of_pool]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        if self.given is not None:
            key_states, value_states = self.given.spread(key_states, value_states, layer_idx)
        self.write(key_states, value_states, layer_idx)
        return key_states, value_states

    def write(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> None:
        """Write keys and values of all tokens, given and computed."""
        for pool, block_T, position_T, token_T in self._parts:
            layer = pool.layer(layer_idx, key_states)
            layer[0, block_T, :, position_T] = key_states[0, :, token_T].transpose(0, 1)
            layer[1, block_T, :, position_T] = value_states[0, :, token_T].transpose(0, 1)


def _indices(cells: Sequence[Cells]) -> tuple[Tensor, Tensor, Tensor]:
    """Block, position in it and token of each cell."""
    block_T = [block for block, _, n, _ in cells for _ in range(n)]
    position_T = [at for _, first, n, _ in cells for at in range(first, first + n)]
    token_T = [at for _, _, n, first in cells for at in range(first, first + n)]
    return torch.tensor(block_T), torch.tensor(position_T), torch.tensor(token_T)


class DecodeBlocks:
    """Writes one or several tokens of rows 0 .. n-1 and attends to their cache, in one C call."""

    def __init__(self, blocks: PagedCache, decode: Decode) -> None:
        self._blocks, self._decode = blocks, decode

    @property
    def n_positions(self) -> int:
        """Number of positions whose RoPE angles are needed."""
        return self._decode.n_positions

    def attended(self, qkv_nSD: Tensor, cos_nD: Tensor, sin_nD: Tensor, index: int, scale: float) -> Tensor:
        """(n, H D): attention of this layer, from all heads of each token before RoPE."""
        return self._decode.attended(qkv_nSD, cos_nD, sin_nD, *self._pools(index, qkv_nSD), scale)

    def decoded(self, step: DecodeStep, ids: Sequence[int], cos_LD: Tensor, sin_LD: Tensor) -> Tensor:
        """(n, V) logits after these tokens, in one call for all layers."""
        return step(ids, self._decode, cos_LD, sin_LD, self._all_pools(step, cos_LD))

    def decoded_on(
        self, step: DecodeStep, ids: Sequence[int], cos_LD: Tensor, sin_LD: Tensor, draws: Draws
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Next tokens and log-probs of each row, in one call for all steps."""
        return step.on(ids, self._decode, cos_LD, sin_LD, self._all_pools(step, cos_LD), draws)

    def _all_pools(self, step: DecodeStep, like: Tensor) -> list[tuple[Tensor, Tensor | None]]:
        return [self._pools(index, like) for index in range(len(step))]

    def _pools(self, index: int, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """Own and shared blocks of a layer."""
        own, common = self._blocks.own, self._blocks.common
        return own.layer(index, like), common.layer(index, like) if common.users else None
