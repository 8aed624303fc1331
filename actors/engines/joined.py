"""Linear layers with one input as one product; knows no model and no engine.

Shapes: F outputs of all, E inputs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from actors.kernels.step import Panels, Plain
from actors.models.product import Weight


class Joined:
    """Linear layers with one input as one product."""

    def __init__(self, parts: Sequence[nn.Linear], *, packs: bool) -> None:
        self._parts, self._packs = parts, packs
        self._panels: Panels | None = None
        self.bind()

    def bind(self) -> None:
        """Look where the weights are now, and put them together."""
        biases = [part.bias for part in self._parts if part.bias is not None]
        self._weight_FE = together([part.weight for part in self._parts])
        self._bias_F = together(biases) if biases else None
        self._weight = Weight(self._weight_FE, self._bias_F, packs=self._packs)

    def __call__(self, x: Tensor) -> Tensor:
        return self._weight(x)

    def added(self, x: Tensor, to: Tensor) -> Tensor:
        """The product added to what there is."""
        return self._weight.added(x, to)

    def panels(self) -> Panels:
        """As it is now, for C; in the memory that was taken for it at first."""
        if self._panels is None:
            self._panels = Panels(self._weight_FE, self._bias_F)
        else:
            self._panels.fill(self._weight_FE, self._bias_F)
        return self._panels

    def plain(self) -> Plain:
        """As it lies now, for C."""
        return Plain(self._weight_FE, self._bias_F)


def together(parameters: Sequence[Tensor]) -> Tensor:
    """The rows of all as one tensor that shares their memory; moves them when they lie apart."""
    first, expected = parameters[0].data, parameters[0].data_ptr()
    for parameter in parameters:
        is_next = parameter.data_ptr() == expected and parameter.data.is_contiguous()
        if not is_next or parameter.data.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return _moved(parameters)
        expected += parameter.data.nbytes
    n_rows = sum(len(parameter) for parameter in parameters)
    return first.as_strided((n_rows, *first.shape[1:]), first.stride())


def _moved(parameters: Sequence[Tensor]) -> Tensor:
    whole = torch.cat([parameter.data for parameter in parameters])
    parts = torch.split(whole, [len(parameter) for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part
    return whole
