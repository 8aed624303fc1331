"""Python values as one line of JSON and back: numbers, text, bytes, None, list, tuple, set, dict. Nothing else.

Decoded values have exactly these built-in types, so no object of the sender decides a comparison. Any other object
becomes an `Other`, which equals nothing. Both programs in the sandbox contain this module; it imports the standard
library only.
"""

import json
from typing import Any


class Other:
    """An object of another type. It is true and equals only itself."""


def encode(value: Any) -> str:
    """Raises RecursionError for a value that contains itself."""
    return json.dumps(_tagged(value))


def decode(line: str) -> Any:
    """Raises ValueError, TypeError or LookupError for a line that `encode` did not make."""
    return _value(json.loads(line))


def _tagged(value: Any) -> Any:
    """Containers as [tag, items]; a subclass of a built-in type as that type."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, bytes | bytearray):
        return ["bytes", value.hex()]
    for tag, kinds in (("list", list), ("tuple", tuple), ("set", set | frozenset)):
        if isinstance(value, kinds):
            return [tag, [_tagged(item) for item in value]]
    if isinstance(value, dict):
        return ["dict", [[_tagged(key), _tagged(item)] for key, item in value.items()]]
    return ["other"]


def _value(tagged: Any) -> Any:
    if not isinstance(tagged, list):
        if isinstance(tagged, dict):
            raise ValueError("a dict is written as pairs")
        return tagged
    tag, *items = tagged
    if tag == "complex":
        return complex(*map(float, items))
    if tag == "other":
        return Other()
    if tag == "bytes":
        return bytes.fromhex(items[0])
    if tag == "dict":
        return {_value(key): _value(item) for key, item in items[0]}
    kinds: dict[str, Any] = {"list": list, "tuple": tuple, "set": set}
    return kinds[tag](_value(item) for item in items[0])
