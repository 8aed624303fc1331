"""Packs weights into panels, the layout of the C matrix products.

Shapes: F outputs, E inputs.
"""

import ctypes
from collections.abc import Callable
from functools import cache

from torch import Tensor

from areal_cpu.build import addresses, alike, function

_SIZE, _POINTER = ctypes.c_int64, ctypes.c_void_p


@cache
def _panelled(name: str) -> Callable[..., None]:
    return function(name, *[_SIZE] * 2, *[_POINTER] * 3)


@cache
def sizes() -> tuple[int, int, int, int]:
    """Of a panel, of rows that go through all products together, of a block of positions, of the widest head."""
    found = (_SIZE * 4)()
    function("sizes", ctypes.POINTER(_SIZE))(found)
    panel, chunk, positions, widest = found
    return panel, chunk, positions, widest


def panel() -> int:
    """Outputs of a weight that lie side by side."""
    return sizes()[0]


def panels(weight_FE: Tensor, scale_E: Tensor | None = None, *, to: Tensor | None = None) -> Tensor:
    """Of products x weight^T, or x (weight diag(scale))^T; into `to` where that is given."""
    n_out, n_in = weight_FE.shape
    return _filled("panelled", weight_FE, scale_E, n_floats(n_out, n_in), to)


def panels_back(weight_FE: Tensor, scale_E: Tensor | None = None) -> Tensor:
    """Of products x weight, or x weight diag(scale)."""
    n_in, n_out = weight_FE.shape
    return _filled("panelled_back", weight_FE, scale_E, n_floats(n_out, n_in), None)


def n_floats(n_out: int, n_in: int) -> int:
    """Of all panels."""
    return -(-n_out // panel()) * panel() * n_in


def _filled(name: str, weight_FE: Tensor, scale_E: Tensor | None, n: int, to: Tensor | None) -> Tensor:
    if scale_E is not None:
        alike(weight_FE.shape[1:], scale_E)
    found = weight_FE.new_empty(n) if to is None else to
    alike((n,), found)
    weight, into = addresses(weight_FE, found)
    _panelled(name)(*weight_FE.shape, weight, None if scale_E is None else addresses(scale_E)[0], into)
    return found
