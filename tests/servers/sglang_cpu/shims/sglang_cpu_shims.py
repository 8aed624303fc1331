"""Lets torchvision be imported beside a torch of another build: its wheel from PyPI needs CUDA libraries.

Without its C++ part it still declares fake versions of two operators, which fails as nobody has declared the operators
themselves. So they are declared before it is imported, where that part does not load. SGLang imports torchvision, and
does not use these.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Finds nothing; acts once, when torchvision is looked for."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            spec = importlib.machinery.PathFinder.find_spec(fullname, path)
            if spec is not None and spec.submodule_search_locations:
                declare(spec.submodule_search_locations[0])


def declare(folder: str) -> None:
    import torch

    try:
        torch.ops.load_library(f"{folder}/_C.so")
    except OSError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", SCHEMA)


class BeforeAdapters(importlib.abc.MetaPathFinder):
    """Finds nothing; acts once, when SGLang's adapters are looked for: they ask for pinned memory on every device."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname == "sglang.srt.lora":
            sys.meta_path.remove(self)
            pin_nothing()


def pin_nothing() -> None:
    """Pinned memory needs an accelerator: make plain memory instead."""
    import torch

    def plain(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*given: Any, **more: Any) -> Any:
            more.pop("pin_memory", None)
            return make(*given, **more)

        return made

    for name in ("tensor", "empty", "zeros", "ones", "full"):
        setattr(torch, name, plain(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *given: self  # type: ignore[method-assign]


sys.meta_path[:0] = [BeforeTorchvision(), BeforeAdapters()]
