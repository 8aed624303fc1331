"""Keys and values in blocks of a few positions, and attention of one token a row over whole blocks; for a CPU.

A row has as many blocks as its tokens need, wherever they lie, and the blocks in use lie behind one another: reading
them is one run through memory, as fast as it gets, and short rows cost nothing for the long ones beside them. Between
the two products over blocks the scores are put into the order of the rows, for the softmax.

Shapes: n rows, B blocks in use, P positions of a block, H query heads, K key heads, G = H / K, X = B K, D head width,
J blocks of the longest row, L = J P, T tokens of a packed forward.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.engines.slots import Piece

P = 32
FEWEST = 8  # blocks that there is room for, at least


@dataclass(frozen=True, slots=True)
class Order:
    """Which block is where, as indices."""

    n_rows: int
    longest: int  # J
    row_B: Tensor  # that each block is of
    block_B: Tensor  # the blocks row by row, each row's in order
    first_n: Tensor  # where a row begins among these
    to_rows: Tensor  # (n K G J): of the scores by block, those of a row's heads one after the other
    to_blocks: Tensor  # (B K G): and back


class Blocks:
    """Preallocated, (2, C, K, P, D) a layer, keys first; the first of C are in use. Rows are those of the engine."""

    def __init__(self, n_query: int, n_key: int) -> None:
        self._n_query, self._n_key = n_query, n_key
        self._room = FEWEST
        self._layers: dict[int, Tensor] = {}
        self._tables: list[list[int]] = []  # blocks of each row
        self._places: list[tuple[int, int]] = []  # (row, which of its blocks) of each block, holes included
        self._holes: list[int] = []  # blocks that nobody uses; none when attention reads
        self._order: Order | None = None  # until something changes

    @property
    def capacity(self) -> int:
        """Positions that there is room for, over all rows."""
        return self._room * P

    def reserve(self, lengths: Sequence[int], n_cached: int) -> None:
        """Room for so many positions of each row; what is there is kept."""
        for row, length in enumerate(lengths):
            if row == len(self._tables) or len(self._tables[row]) * P < length:
                self._extend(row, length)
        self._close()
        self._resize(len(self._places))

    def copy(self, source: int, target: int, length: int) -> None:
        """The first `length` positions of one row to another."""
        self._extend(target, length)
        if len(self._places) > self._room:
            self._resize(len(self._places))
        n = -(-length // P)
        taken, given = self._tables[source][:n], self._tables[target][:n]
        for layer in self._layers.values():
            layer[:, given] = layer[:, taken]

    def drop(self, row: int, last: int, length: int) -> None:
        """A row ends, and the last one takes its place. What its blocks leave is filled or closed by `reserve`."""
        self._holes += self._tables[row]
        self._tables[row] = self._tables[last]
        self._tables.pop()
        for which, block in enumerate(self._tables[row] if row < last else ()):
            self._places[block] = (row, which)
        self._order = None

    def filling(self, pieces: Sequence[Piece]) -> "FillBlocks":
        """Where the pieces of one packed forward go."""
        return FillBlocks(self, pieces)

    def decoding(
        self, positions: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> tuple["DecodeBlocks", None]:
        """Where the next token of rows 0 .. n-1 goes, and all that it sees."""
        return DecodeBlocks(self, positions, dtype, self._ordered(len(positions))), None

    def places(self, row: int, first: int, n: int) -> list[tuple[int, int]]:
        """Block, and position in it, of so many positions of a row."""
        table = self._tables[row]
        return [(table[position // P], position % P) for position in range(first, first + n)]

    def nexts(self, positions: Sequence[int]) -> list[tuple[int, int]]:
        """The same of one position of each of rows 0 .. n-1."""
        return [(table[at // P], at % P) for table, at in zip(self._tables, positions, strict=False)]

    def layer(self, index: int, like: Tensor) -> Tensor:
        """Keys and values of a layer; of the type of `like` (.., D) when first asked for."""
        if index not in self._layers:
            self._layers[index] = self._new(like)
        return self._layers[index]

    def _extend(self, row: int, length: int) -> None:
        if row == len(self._tables):
            self._tables.append([])
        table = self._tables[row]
        while len(table) * P < length:
            self._order = None
            if not self._holes:
                self._holes.append(len(self._places))
                self._places.append((row, 0))
            block = self._holes.pop()
            self._places[block] = (row, len(table))
            table.append(block)

    def _close(self) -> None:
        """The last blocks take the place of holes, all at once."""
        if not self._holes:
            return
        n_left = len(self._places) - len(self._holes)
        movers = sorted(set(range(n_left, len(self._places))).difference(self._holes))
        targets = [hole for hole in self._holes if hole < n_left]
        for mover, target in zip(movers, targets, strict=True):
            row, which = self._places[target] = self._places[mover]
            self._tables[row][which] = target
        del self._places[n_left:]
        self._holes.clear()
        if movers:
            for layer in self._layers.values():
                layer[:, targets] = layer[:, movers]

    def _resize(self, n: int) -> None:
        """Room for so many blocks, and a quarter more; less room when there is four times too much."""
        if n <= self._room <= 4 * max(n, FEWEST):
            return
        old, self._room = self._room, max(n * 5 // 4, FEWEST)
        kept = min(old, self._room)
        for index, layer in self._layers.items():
            self._layers[index] = self._new(layer)
            self._layers[index][:, :kept] = layer[:, :kept]

    def _new(self, like: Tensor) -> Tensor:
        # zeros, for a masked cell still enters a product with weight 0, and 0 * NaN is NaN
        return like.new_zeros(2, self._room, self._n_key, P, like.shape[-1])

    def _ordered(self, n: int) -> Order:
        if self._order is None or self._order.n_rows != n:
            self._order = self._ordered_anew(n)
        return self._order

    def _ordered_anew(self, n: int) -> Order:
        """Of rows 0 .. n-1; blocks of rows behind these are computed, and not read."""
        tables, heads = self._tables[:n], self._n_query
        longest = max(len(table) for table in tables)
        head_H = torch.arange(heads)
        padded_nJ = torch.tensor([table + [0] * (longest - len(table)) for table in tables])  # block 0 is masked there
        place_B2 = torch.tensor([place if place[0] < n else (0, 0) for place in self._places])
        first = [0]
        for table in tables[:-1]:
            first.append(first[-1] + len(table))
        return Order(
            n,
            longest,
            row_B=place_B2[:, 0],
            block_B=torch.tensor([block for table in tables for block in table]),
            first_n=torch.tensor(first),
            to_rows=(padded_nJ[:, None] * heads + head_H[:, None]).flatten(),
            to_blocks=((place_B2[:, :1] * heads + head_H) * longest + place_B2[:, 1:]).flatten(),
        )


class FillBlocks:
    """Writes the pieces of one packed forward into their rows; attention sees the packed sequence itself."""

    def __init__(self, blocks: Blocks, pieces: Sequence[Piece]) -> None:
        self._blocks = blocks
        places: list[tuple[int, int]] = []
        tokens: list[int] = []
        for piece in pieces:
            for row in piece.rows:
                places += blocks.places(row, piece.start, piece.end - piece.begin)
                tokens += range(piece.begin, piece.end)
        self._block_T, self._position_T = torch.tensor(places).unbind(1)
        self._token_T = torch.tensor(tokens)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        layer = self._blocks.layer(layer_idx, key_states)
        layer[0, self._block_T, :, self._position_T] = key_states[0, :, self._token_T].transpose(0, 1)
        layer[1, self._block_T, :, self._position_T] = value_states[0, :, self._token_T].transpose(0, 1)
        return key_states, value_states


class DecodeBlocks:
    """Writes one token of rows 0 .. n-1 and attends to all that they have."""

    def __init__(self, blocks: Blocks, positions: Sequence[int], dtype: torch.dtype, order: Order) -> None:
        self._blocks, self._order = blocks, order
        self._block_n1, self._position_n1 = torch.tensor(blocks.nexts(positions)).tensor_split(2, dim=1)
        self._cells = torch.empty(0)
        unseen_nL = torch.arange(order.longest * P) > torch.tensor(positions)[:, None]
        mask_nL = torch.zeros(unseen_nL.shape, dtype=dtype)
        self._mask_n1L = mask_nL.masked_fill_(unseen_nL, torch.finfo(dtype).min)[:, None]

    def attended(self, qkv_nSD: Tensor, n_query: int, n_key: int, index: int, scale: float) -> Tensor:
        """(n, H D): attention of this layer; of each token its queries', keys' and values' heads are given."""
        layer, order, width = self._blocks.layer(index, qkv_nSD), self._order, qkv_nSD.shape[-1]
        if not index:
            self._cells = self._cells_of(layer.shape[1], n_key)
        layer.view(-1, width).index_put_((self._cells,), qkv_nSD[:, n_query:])
        x, in_layer = len(order.row_B) * n_key, layer.stride(0)
        keys_XDP = layer.as_strided((x, width, P), (P * width, 1, width))
        values_XPD = layer.as_strided((x, P, width), (P * width, width, 1), in_layer)
        q_XGD = qkv_nSD[:, :n_query].index_select(0, order.row_B).view(x, -1, width)
        score_XGP = torch.bmm(q_XGD, keys_XDP)
        score_nHL = score_XGP.view(-1, P).index_select(0, order.to_rows).view(len(qkv_nSD), n_query, -1)
        share_nHL = torch.softmax(torch.add(self._mask_n1L, score_nHL, alpha=scale), dim=-1)
        share_XGP = share_nHL.view(-1, P).index_select(0, order.to_blocks).view(x, -1, P)
        part_BE = torch.bmm(share_XGP, values_XPD).view(-1, n_query * width)
        return torch.embedding_bag(part_BE, order.block_B, order.first_n, False, 0)[0]

    def _cells_of(self, room: int, n_key: int) -> Tensor:
        """(n, 2 K): where keys and values of the new tokens are in a layer that is a table of vectors."""
        layer_S = torch.arange(2).repeat_interleave(n_key) * room * n_key + torch.arange(n_key).repeat(2)
        return (self._block_n1 * n_key + layer_S) * P + self._position_n1
