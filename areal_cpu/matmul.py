"""Matrix products with a weight, by oneDNN where it is faster than torch.

torch multiplies float32 on a CPU by MKL, which uses AVX-512 on Intel processors only. oneDNN uses it on all. Sums
come in another order, so results differ by rounding. oneDNN compiles a product for each new number of rows (some
milliseconds, half a megabyte) and keeps about a thousand. So callers pad to `stepped` numbers of rows where they can.

Shapes: N rows, E in, F out.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST = 600_000  # multiplications: for fewer the call costs more than it saves
MOST_PACKED = 64 << 20  # bytes of a model's weights that are kept a second time, in the order in which they are read
PARTS = 32  # steps from one power of two to the next: on average 1 % of the rows fill up
LEAST_STEP = 8
IS_FASTER = torch._C._has_mkldnn and "AVX512" in torch.backends.cpu.get_cpu_capability()
_plain = torch.ops.mkldnn._linear_pointwise.default
_onto = torch.ops.mkldnn._linear_pointwise.binary


def stepped(n: int, device: torch.device) -> int:
    """The next common number of rows from `n` on; `n` itself where nothing is compiled."""
    if not IS_FASTER or device.type != "cpu" or n < 1:
        return n
    step = max(LEAST_STEP, (1 << n.bit_length() - 1) // PARTS)
    return -(-n // step) * step


def is_taken(weight: Tensor) -> bool:
    """Whether oneDNN multiplies with this weight."""
    return IS_FASTER and weight.device.type == "cpu" and weight.dtype is torch.float32


def product(x_NE: Tensor, weight_FE: Tensor, bias_F: Tensor | None = None) -> Tensor:
    """x weight^T + bias by oneDNN; all in float32, on a CPU."""
    out_NF: Tensor = _plain(x_NE, weight_FE, bias_F, "none", [], "")
    return out_NF


def multiplied(x_NE: Tensor, weight_FE: Tensor, bias_F: Tensor | None = None) -> Tensor:
    """x weight^T + bias, by oneDNN where it is faster."""
    return product(x_NE, weight_FE, bias_F) if is_taken(weight_FE) else F.linear(x_NE, weight_FE, bias_F)


def added(x_NE: Tensor, weight_FE: Tensor, to_NF: Tensor) -> Tensor:
    """The product plus `there`, in one operation."""
    if not is_taken(weight_FE):
        return torch.addmm(to_NF, x_NE, weight_FE.t())
    sum_NF: Tensor = _onto(x_NE, to_NF, weight_FE, None, "add")
    return sum_NF


class Weight:
    """One weight to multiply with, as it was when this was made. `packs`: it may be kept a second time."""

    def __init__(self, weight_FE: Tensor, bias_F: Tensor | None, *, packs: bool) -> None:
        self._weight_FE, self._bias_F = weight_FE, bias_F
        self._ready_FE: Tensor | None = None
        if is_taken(weight_FE):
            self._ready_FE = torch.ops.mkldnn._reorder_linear_weight(weight_FE, 32) if packs else weight_FE

    def __call__(self, x_NE: Tensor) -> Tensor:
        if self._ready_FE is None or len(x_NE) * self._weight_FE.numel() < LEAST:
            return F.linear(x_NE, self._weight_FE, self._bias_F)
        return product(x_NE, self._ready_FE, self._bias_F)

    def added(self, x_NE: Tensor, to_NF: Tensor) -> Tensor:
        """The product plus `there`, in one operation."""
        if self._ready_FE is not None and len(x_NE) * self._weight_FE.numel() >= LEAST:
            sum_NF: Tensor = _onto(x_NE, to_NF, self._ready_FE, self._bias_F, "add")
            return sum_NF
        sum_NF = torch.addmm(to_NF, x_NE, self._weight_FE.t())
        return sum_NF if self._bias_F is None else sum_NF + self._bias_F
