"""numpy's functions that the published tests of EvalPlus call, for a sandbox without numpy. Numbers, sequences."""

import importlib.util
import math
import sys
import types
from typing import Any


class ndarray:
    """No value has this type."""


def allclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    """|a - b| <= atol + rtol * |b| for all numbers. Raises ValueError for different shapes.

    numpy repeats a number to the shape of the other side, so that the answer [] is close to any number. Not here.
    """
    if isinstance(b, list | tuple) or isinstance(a, list | tuple):
        if not (isinstance(a, list | tuple) and isinstance(b, list | tuple)) or len(a) != len(b):
            raise ValueError(f"the shapes of {a!r} and {b!r} differ")
        return all(allclose(x, y, rtol, atol, equal_nan) for x, y in zip(a, b, strict=True))
    if a == b or (equal_nan and a != a and b != b):
        return True
    return bool(abs(a - b) <= atol + rtol * abs(b)) and not math.isinf(abs(b))


def assert_allclose(actual: Any, desired: Any, rtol: float = 1e-7, atol: float = 0, equal_nan: bool = True) -> None:
    if not allclose(actual, desired, rtol, atol, equal_nan):
        raise AssertionError(f"{actual!r} is not {desired!r}")


def install() -> None:
    if "numpy" in sys.modules or importlib.util.find_spec("numpy"):
        return
    numpy: Any = types.ModuleType("numpy")
    testing: Any = types.ModuleType("numpy.testing")
    testing.assert_allclose = assert_allclose
    vars(numpy).update(ndarray=ndarray, allclose=allclose, isclose=allclose, testing=testing)
    vars(numpy).update(float64=float, float32=float, inf=math.inf, nan=math.nan, pi=math.pi)
    sys.modules |= {"numpy": numpy, "numpy.testing": testing}
