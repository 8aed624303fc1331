"""Compiles the C sources in `csrc` into one library (areal_bus/native)."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

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
