"""Checks and addresses of tensors for C kernels: contiguous float32 on a CPU."""

import torch
from torch import Tensor


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
