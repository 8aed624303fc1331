"""Prefix cache: keys and values of earlier tokens, for later requests that begin with the same tokens.

Blocks of P tokens form a tree for each salt, the weights that computed them: a block is found only behind all tokens
before it, and never by other weights. The least recently used blocks are evicted, a block before the one it follows.

Shapes: C blocks of capacity, P tokens of a block, W numbers of a token (keys and values of all layers), K key heads, D
head width, G tokens that are given to a forward pass, T tokens that it computes.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

P = 16
FEWEST = 64  # smallest capacity, in blocks

Salt = tuple[int, int]  # term and version
States = Mapping[int, Tensor]  # layer -> (n, 2, K, D), keys first
_Key = tuple[Salt, int, tuple[int, ...]]  # of a block: the block before it (-1: none), its tokens


class PrefixCache:
    """Holds nothing before `allow`."""

    def __init__(self) -> None:
        self._most = 0  # blocks
        self._blocks: dict[_Key, int] = {}  # by last use, the oldest first; a block is younger than those behind it
        self._free: list[int] = []
        self._seen: set[int] = set()  # hashes of the beginnings of prompts
        self._pool_CPW: Tensor | None = None
        self._parts: dict[int, tuple[slice, torch.Size]] = {}  # layer -> its part of W, and (2, K, D)

    def allow(self, n_tokens: int) -> None:
        """Hold as many tokens at most, from now on."""
        self._most = max(n_tokens // P, 0)
        self._trim()

    def find(self, salt: Salt, tokens: Sequence[int]) -> list[int]:
        """The blocks of the longest stored beginning of these tokens."""
        path = self._path(salt, tokens)
        self._touch(path)
        return [self._blocks[key] for key in path]

    def keep(self, salt: Salt, tokens: Sequence[int], read: Callable[[int, int], States], *, always: bool) -> None:
        """Store whole blocks of these tokens; `read` gives the states of positions begin .. end.

        Not `always`: only blocks of a beginning that came before, so that prompts that come once take no memory.
        """
        n_all = min(len(tokens) // P if always else self._n_repeated(salt, tokens), self._most)
        path = self._path(salt, tokens[: n_all * P])
        self._touch(path)
        if n_all <= len(path):
            return
        state_TW = self._flat(read(len(path) * P, n_all * P))
        places = [self._place(state_TW) for _ in range(n_all - len(path))]
        assert self._pool_CPW is not None
        self._pool_CPW[places] = state_TW.view(len(places), P, -1)
        before = [self._blocks[path[-1]] if path else -1, *places]
        parts = (tuple(tokens[at * P : at * P + P]) for at in range(len(path), n_all))
        new = [(salt, parent, part) for parent, part in zip(before, parts, strict=False)]
        self._blocks |= dict(zip(reversed(new), reversed(places), strict=True))
        self._touch(path)
        self._trim()

    def keep_only(self, salts: Collection[Salt]) -> None:
        """Drop the blocks of all other weights, and the memory where none are left."""
        self._free += [self._blocks.pop(key) for key in list(self._blocks) if key[0] not in salts]
        self._seen.clear()
        if not self._blocks:
            self._free, self._pool_CPW = [], None

    def read(self, blocks: Sequence[int]) -> States:
        """The states of these blocks, one behind the other."""
        assert self._pool_CPW is not None
        state_GW = self._pool_CPW[list(blocks)].flatten(0, 1)
        return {index: state_GW[:, part].view(-1, *shape) for index, (part, shape) in self._parts.items()}

    @property
    def n_blocks(self) -> int:
        return len(self._blocks)

    def _path(self, salt: Salt, tokens: Sequence[int]) -> list[_Key]:
        path, block = list[_Key](), -1
        for at in range(0, len(tokens) - P + 1, P):
            key = (salt, block, tuple(tokens[at : at + P]))
            if (found := self._blocks.get(key)) is None:
                break
            path.append(key)
            block = found
        return path

    def _touch(self, path: Sequence[_Key]) -> None:
        for key in reversed(path):
            self._blocks[key] = self._blocks.pop(key)

    def _n_repeated(self, salt: Salt, tokens: Sequence[int]) -> int:
        """Blocks at the beginning that were seen before; notes all."""
        if len(self._seen) > 8 * self._most:
            self._seen.clear()
        beginnings = list(_beginnings(salt, tokens))
        n = next((n for n, beginning in enumerate(beginnings) if beginning not in self._seen), len(beginnings))
        self._seen.update(beginnings)
        return n

    def _flat(self, states: States) -> Tensor:
        if not self._parts:
            at = 0
            for index, state in sorted(states.items()):
                width = state[0].numel()
                self._parts[index] = slice(at, at + width), state.shape[1:]
                at += width
        return torch.cat([states[index].flatten(1) for index in self._parts], dim=1)

    def _trim(self) -> None:
        while len(self._blocks) > self._most:
            self._free.append(self._blocks.pop(next(iter(self._blocks))))

    def _place(self, like_TW: Tensor) -> int:
        """A free block: the pool grows up to its limit, then the least recently used block is evicted."""
        if not self._free and (self._pool_CPW is None or len(self._pool_CPW) < self._most):
            self._grow(like_TW)
        if not self._free:
            self._free.append(self._blocks.pop(next(iter(self._blocks))))
        return self._free.pop()

    def _grow(self, like_TW: Tensor) -> None:
        old_CPW = self._pool_CPW
        n_old = 0 if old_CPW is None else len(old_CPW)
        n = min(max(2 * n_old, FEWEST), self._most)
        self._pool_CPW = like_TW.new_empty(n, P, like_TW.shape[1])
        if old_CPW is not None:
            self._pool_CPW[:n_old] = old_CPW
        self._free += range(n - 1, n_old - 1, -1)


def _beginnings(salt: Salt, tokens: Sequence[int]) -> Iterator[int]:
    """A hash of the tokens up to each block's end."""
    so_far = hash(salt)
    for at in range(0, len(tokens) - P + 1, P):
        so_far = hash((so_far, tuple(tokens[at : at + P])))
        yield so_far


class GivenKeys:
    """Keys and values that a packed forward pass does not compute, among those that it does."""

    def __init__(self, n_tokens: int, pieces: Sequence[tuple[int, Sequence[int]]], cache: PrefixCache) -> None:
        """`n_tokens`: given and computed. `pieces`: where the tokens of these blocks begin."""
        self._states = cache.read([block for _, blocks in pieces for block in blocks])
        self._n_tokens = n_tokens
        self._sizes = [len(blocks) * P for _, blocks in pieces]
        self._places = [slice(begin, begin + n) for (begin, _), n in zip(pieces, self._sizes, strict=True)]
        is_given = torch.zeros(n_tokens, dtype=torch.bool)
        for place in self._places:
            is_given[place] = True
        self.computed_T = (~is_given).nonzero()[:, 0].to(next(iter(self._states.values())).device)

    def spread(self, keys_1KTD: Tensor, values_1KTD: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens, (1, K, G + T, D) each."""
        keys_GKD, values_GKD = self._states[index].unbind(1)
        return tuple(  # type: ignore[return-value]
            self._joined(computed[0].transpose(0, 1), given_GKD).transpose(0, 1)[None]
            for computed, given_GKD in ((keys_1KTD, keys_GKD), (values_1KTD, values_GKD))
        )

    def rows(self, qkv_TA: Tensor, index: int) -> Tensor:
        """(G + T, A): rows of queries, keys and values of all tokens; given ones have no queries."""
        return self._joined(qkv_TA, self._states[index].flatten(1))

    def _joined(self, computed: Tensor, given: Tensor) -> Tensor:
        """All tokens; a given row fills the end of one that is wider."""
        whole = computed.new_empty(self._n_tokens, *computed.shape[1:])
        whole[self.computed_T] = computed
        for place, part in zip(self._places, torch.split(given, self._sizes), strict=True):
            whole[place, computed.shape[1] - part.shape[1] :] = part
        return whole
