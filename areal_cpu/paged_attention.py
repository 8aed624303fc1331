"""Paged decode attention in C: one new token per row against KV blocks.

Shapes: n rows, J blocks of a row at most, C blocks of a pool, H query heads, K key heads, S = H + 2 K, P positions of a
block, D head width.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from areal_cpu.build import addresses, alike, function

P, WIDEST = 16, 512  # as in kernels.h


class Cache(ctypes.Structure):
    """Of kernels.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("n_query", "n_key", "most")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("at", "blocks", "common")),
        *((name, ctypes.c_void_p) for name in ("far_keys", "far_values", "near_keys", "near_values")),
    )


class Tables:
    """Which blocks rows 0 .. n-1 have: of the common pool first, then their own."""

    def __init__(self, common: Sequence[Sequence[int]], own: Sequence[Sequence[int]]) -> None:
        self.most = max(len(far) + len(near) for far, near in zip(common, own, strict=True))
        padded = [
            [*far, *near] + [0] * (self.most - len(far) - len(near)) for far, near in zip(common, own, strict=True)
        ]
        self.blocks_nJ = torch.tensor(padded, dtype=torch.int32)
        self.common_n = torch.tensor([len(far) for far in common], dtype=torch.int32)
        self._room = [(len(far) * P, (len(far) + len(near)) * P) for far, near in zip(common, own, strict=True)]

    def __len__(self) -> int:
        return len(self._room)

    def check(self, positions: Sequence[int]) -> None:
        """Raises ValueError unless each position is in a block of its row's own."""
        for at, (first, end) in zip(positions, self._room, strict=True):
            if not first <= at < end:
                raise ValueError(f"a row's next position is in its own blocks, from {first} to {end - 1}; it is {at}")


@cache
def _call() -> Callable[..., None]:
    return function("attended", *[ctypes.c_int64] * 2, ctypes.POINTER(Cache), *[ctypes.c_void_p] * 5)


class Decode:
    """A step, or some, of rows 0 .. n-1, whose next tokens are at these positions. Raises ValueError without room."""

    def __init__(self, tables: Tables, positions: Sequence[int], n_query: int, n_key: int, *, n_steps: int = 1) -> None:
        tables.check(positions)
        if n_steps > 1:
            tables.check([position + n_steps - 1 for position in positions])
        if n_key < 1 or n_query % n_key:
            raise ValueError(
                f"the number of query heads must be a multiple of that of key heads: {n_query} and {n_key}"
            )
        self.n_steps = n_steps
        self.n_positions = max(positions) + n_steps  # that rotations are needed of
        self._tables, self._at_n = tables, torch.tensor(positions)  # kept, as C has their addresses alone
        self.cache = Cache(n_query=n_query, n_key=n_key, most=tables.most, at=self._at_n.data_ptr(),
                           blocks=tables.blocks_nJ.data_ptr(), common=tables.common_n.data_ptr())  # fmt: skip

    def __len__(self) -> int:
        return len(self._tables)

    @property
    def n_scores(self) -> int:
        """Floats that C needs for one row's scores."""
        return int(self.cache.n_query * self.cache.most * P)

    def places(self, near: Tensor, far: Tensor | None, width: int) -> tuple[int, int, int, int]:
        """Where keys and values are in a layer's pools, (2, C, K, P, D) each: of the rows' own, of the common one."""
        far = near if far is None else far
        for pool in (near, far):
            if pool.shape[0] != 2 or pool.shape[2:] != (self.cache.n_key, P, width):
                raise ValueError(f"a pool is (2, C, {self.cache.n_key}, {P}, {width}), not {tuple(pool.shape)}")
        keys, far_keys = addresses(near, far)
        return keys, keys + near.nbytes // 2, far_keys, far_keys + far.nbytes // 2

    def attended(
        self, qkv_nSD: Tensor, cos_nD: Tensor, sin_nD: Tensor, near: Tensor, far: Tensor | None, scale: float
    ) -> Tensor:
        """(n, H D). Applies RoPE to queries and keys in place and writes keys and values to the pools of the layer."""
        cache, (n, _, width) = self.cache, qkv_nSD.shape
        if width > WIDEST or width % 2:
            raise ValueError(f"the width of a head must be even and at most {WIDEST}: got {width}")
        alike((len(self), cache.n_query + 2 * cache.n_key, width), qkv_nSD)
        alike((n * width,), cos_nD.view(-1), sin_nD.view(-1))
        cache.near_keys, cache.near_values, cache.far_keys, cache.far_values = self.places(near, far, width)
        cache.scale = scale
        score, out_nX = qkv_nSD.new_empty(self.n_scores), qkv_nSD.new_empty(n, cache.n_query * width)
        _call()(n, width, cache, *addresses(qkv_nSD, cos_nD, sin_nD, score, out_nX))
        return out_nX
