"""Block manager of the paged KV cache: contiguous blocks, and the rows that use each block.

Shapes: C blocks of capacity, K key heads, P positions of a block, D head width.
"""

from collections.abc import Sequence

from torch import Tensor

from actors.cpu.paged_attention import P

FEWEST = 8  # smallest capacity, in blocks
LOOKS = 256  # calls of `settle` between two checks whether to shrink: a group that ends is soon replaced


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
        """The allocated layers."""
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
