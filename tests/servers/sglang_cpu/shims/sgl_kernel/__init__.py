"""Stands for SGLang's CUDA kernels where there is no GPU: every name is there, and raises when it is called.

The wheel holds CUDA code only, and SGLang imports names of it on CPU, too. What a plain Llama does on CPU calls none of
them; speculative decoding, moves of the key-value cache and seeded sampling would.
"""

from collections.abc import Callable
from typing import NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError(f"sgl_kernel.{name} needs a GPU")

    return missing
