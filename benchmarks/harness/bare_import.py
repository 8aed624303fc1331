"""Imports single modules of a package without its __init__, which would import the whole stack."""

import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType


def bare(*packages: str) -> None:
    """Register these packages without running their __init__, so later imports load single modules."""
    for name in packages:
        first, *rest = name.split(".")
        spec = PathFinder.find_spec(first)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"{first} is not installed: run `make bench-peers`")
        package = ModuleType(name)
        package.__path__ = [str(Path(spec.origin).parent.joinpath(*rest))]
        sys.modules[name] = package


def absent(module: str, name: str) -> None:
    """Replace an imported name that the measured code does not use by an empty class."""
    found = sys.modules.setdefault(module, ModuleType(module))
    setattr(found, name, type(name, (), {}))
