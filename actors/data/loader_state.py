"""The state of a loader as JSON, without pickle: plain values, bytes, arrays and tensors."""

import base64
import importlib
from typing import Any

import numpy as np

from areal_bus.errors import ConfigError

KIND = "kind"  # marks an object that stands for a value that JSON has not


def encode(value: Any, path: str = "state") -> Any:
    """JSON that `decode` reads. Raises ConfigError for a value of another type, with its place."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [encode(one, f"{path}[{i}]") for i, one in enumerate(value)]
    if isinstance(value, tuple):
        return {KIND: "tuple", "items": encode(list(value), path)}
    if isinstance(value, dict):
        return {KIND: "dict", "items": [[encode(k), encode(v, f"{path}[{k!r}]")] for k, v in value.items()]}
    if isinstance(value, bytes):
        return {KIND: "bytes", "data": base64.b64encode(value).decode()}
    if isinstance(value, np.generic):
        return encode(value.item(), path)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {KIND: "array", "dtype": value.dtype.str, "shape": list(value.shape), "data": data}
    if type(value).__module__ == "torch" and hasattr(value, "numpy"):
        return {KIND: "tensor", "array": encode(value.detach().cpu().numpy(), path)}
    raise ConfigError(
        f"the state of a loader must hold plain values, bytes, arrays and tensors: {path} is a {type(value).__name__}"
    )


def decode(value: Any) -> Any:
    """The value that was encoded."""
    if isinstance(value, list):
        return [decode(one) for one in value]
    if not isinstance(value, dict):
        return value
    match value[KIND]:
        case "tuple":
            return tuple(decode(value["items"]))
        case "dict":
            return {decode(key): decode(one) for key, one in value["items"]}
        case "bytes":
            return base64.b64decode(value["data"])
        case "array":
            flat = np.frombuffer(base64.b64decode(value["data"]), np.dtype(value["dtype"]))
            return flat.reshape(value["shape"]).copy()
        case _:
            return importlib.import_module("torch").from_numpy(decode(value["array"]))
