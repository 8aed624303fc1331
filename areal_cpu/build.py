"""The C sources in `csrc` as one library (areal_bus/native), and the checks that its functions need of tensors."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from areal_bus import native

HERE = Path(__file__).parent / "csrc"


def library() -> ctypes.CDLL | None:
    """The kernels, or None where they cannot be compiled."""
    return native.library(HERE)


def applies(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels compute such tensors: float32 on a CPU, with one thread a process, as torch is told."""
    is_theirs = dtype is torch.float32 and device.type == "cpu" and torch.get_num_threads() == 1
    return is_theirs and library() is not None


def function(name: str, *kinds: type) -> Callable[..., None]:
    """One of the library's, which there must be, by the types of its arguments."""
    return native.function(HERE, name, *kinds)


def alike(shape: tuple[int, ...], *tensors: Tensor) -> None:
    """Check that all tensors have this shape; C cannot."""
    for tensor in tensors:
        if tensor.shape != shape:
            raise ValueError(f"tensors of a kernel must have one shape: {tuple(shape)}; one has {tuple(tensor.shape)}")


def addresses(*tensors: Tensor) -> list[int]:
    """Addresses of contiguous float32 CPU tensors, checked because C cannot."""
    for tensor in tensors:
        if not is_plain(tensor):
            raise ValueError(f"a kernel takes contiguous float32 on a CPU: not {tensor.dtype}, {tensor.stride()}")
    return [tensor.data_ptr() for tensor in tensors]


def is_plain(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.is_cpu and tensor.is_contiguous()
