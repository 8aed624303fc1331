"""Packs and unpacks message headers (one small msgpack map), and rejects hostile input before unpacking."""

from typing import Any

import msgpack

from areal_bus.errors import WireError
from areal_bus.foreign_text import valid_json

MAX_HEADER_BYTES = 96 << 10  # holds each field of a message at its own limit
MAX_DEPTH = 8
MAX_OBJECT_BYTES = 1 << 20  # of the unpacked objects
PACKER_BYTES = 1024  # initial size; it grows. The default of 256 KiB costs 1 us for each message

# upper bounds of the unpacked size, in bytes
MAP, ENTRY = 256, 208  # a dict and each of its entries (with its temporary pair), without key and value
LIST, ITEM = 88, 8
NUMBER = 32
PAIR = 96  # a list of two small numbers
STRING = 80
CONTAINERS = bytes([*range(0x80, 0xA0), *range(0xDC, 0xE0)])  # first bytes of maps and arrays
EXT = {*range(0xC7, 0xCA), *range(0xD4, 0xD9)}  # first bytes of ext types
WIDTHS = {  # first byte -> bytes of the number or of the length that follow
    0xC4: 1, 0xC5: 2, 0xC6: 4, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4,
    0xD3: 8, 0xD9: 1, 0xDA: 2, 0xDB: 4, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4,
}  # fmt: skip
# raised for invalid msgpack
UNPACK_ERRORS = (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException)


def pack_header(header: dict[str, Any], kind: str) -> bytes:
    """Raises WireError for a header that the receiver would reject. Lone surrogates in its texts are replaced."""
    try:
        packed: bytes = msgpack.Packer(buf_size=PACKER_BYTES).pack(header)
    except UnicodeEncodeError:
        return pack_header(valid_json(header), kind)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"a field of {kind} cannot be packed: {error}", "fields") from None
    check_cost(packed, kind)
    return packed


def unpack_checked(packed: bytes, n_containers: int) -> dict[str, Any]:
    """Unpack bytes that `check_cost` accepted (`n_containers`: its result). Raises WireError with the rule."""
    try:
        header = msgpack.unpackb(
            packed,
            raw=False,
            strict_map_key=True,
            object_pairs_hook=_no_duplicates,
            ext_hook=_no_ext,
            max_ext_len=0,
            max_bin_len=0,
        )
    except WireError:
        raise
    except UNPACK_ERRORS as error:
        raise WireError(f"invalid header, not one msgpack map: {type(error).__name__}", "header") from None
    if type(header) is not dict:
        raise WireError("invalid header, not one msgpack map", "header")
    if n_containers > MAX_DEPTH and _is_deeper(header, MAX_DEPTH):
        raise WireError(f"header nested too deep: at most {MAX_DEPTH} levels are allowed", "depth")
    return header


def count_containers(packed: bytes) -> int:
    """The maximum number of containers in a header."""
    return len(packed) - len(packed.translate(None, CONTAINERS))


def object_bytes(packed: bytes) -> int:
    """About the memory that the objects of a header take: most of them are pairs of numbers (segments, spans)."""
    return 2 * len(packed) + PAIR * count_containers(packed)


def check_cost(packed: bytes, kind: str = "one") -> int:
    """The most containers that a header can hold. Raises WireError where it or its objects are too large, by its bytes.

    For short headers the length and the number of possible container bytes are a sufficient bound. `kind`: for errors.
    """
    n_bytes = len(packed)
    if n_bytes > MAX_HEADER_BYTES:
        most = f"at most {MAX_HEADER_BYTES} are allowed"
        raise WireError(f"header too large: this {kind} has {n_bytes} bytes, and {most}", "size")
    n_containers = count_containers(packed)
    if 144 * n_bytes + n_containers * (MAP + ITEM * n_bytes) > MAX_OBJECT_BYTES:
        _walk(packed)
    return n_containers


def _walk(packed: bytes) -> None:
    """Exact check, value by value. Stops at invalid msgpack, which unpacking rejects."""
    cost, at = 0, 0
    remaining: list[int] = []  # remaining values of each open container
    while at < len(packed):
        while remaining and not remaining[-1]:
            remaining.pop()
        if remaining:
            remaining[-1] -= 1
        n_values, n_bytes, bytes_of_value = _value(packed, at)
        cost, at = cost + bytes_of_value, at + n_bytes
        if cost > MAX_OBJECT_BYTES:
            raise WireError(f"header too large: it unpacks to more than {MAX_OBJECT_BYTES} bytes of objects", "size")
        if n_values:
            remaining.append(n_values)
            if len(remaining) > MAX_DEPTH:
                raise WireError(f"header nested too deep: at most {MAX_DEPTH} levels are allowed", "depth")


def _value(packed: bytes, at: int) -> tuple[int, int, int]:
    """The value at `at`: number of values inside it, its own bytes, bytes of its objects."""
    first = packed[at]
    if first < 0x80 or first >= 0xE0:
        return 0, 1, NUMBER
    if first < 0x90:
        return _container(first & 0x0F, 1, is_map=True)
    if first < 0xA0:
        return _container(first & 0x0F, 1, is_map=False)
    if first < 0xC0:
        return _string(packed, at + 1, first & 0x1F, 1)
    if first in EXT:
        raise WireError(f"ext type in a header: 0x{first:02x}", "ext")
    width = WIDTHS.get(first, 0)
    if not width:
        return 0, 1, NUMBER  # nil, false, true, and the invalid 0xC1: no object, but a step of this loop
    if first not in (0xC4, 0xC5, 0xC6) and first < 0xD9:
        return 0, 1 + width, NUMBER
    n = int.from_bytes(packed[at + 1 : at + 1 + width], "big")
    if first < 0xDC:
        return _string(packed, at + 1 + width, n, 1 + width)
    return _container(n, 1 + width, is_map=first >= 0xDE)


def _container(n: int, n_bytes: int, *, is_map: bool) -> tuple[int, int, int]:
    return (2 * n, n_bytes, MAP + ENTRY * n) if is_map else (n, n_bytes, LIST + ITEM * n)


def _string(packed: bytes, start: int, n: int, n_bytes: int) -> tuple[int, int, int]:
    """Python stores 1, 2 or 4 bytes for each character, by the widest one; UTF-8 lead bytes 0xC4 and 0xF0 show it."""
    text = packed[start : start + n]
    widest = 0 if text.isascii() else max(text)
    return 0, n_bytes + n, STRING + n * (4 if widest >= 0xF0 else 2 if widest >= 0xC4 else 1)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise WireError("duplicate key in a header", "header")
    return made


def _no_ext(code: int, _data: bytes) -> Any:
    raise WireError(f"ext type in a header: type {code}", "ext")


def _is_deeper(container: dict[str, Any] | list[Any], levels: int) -> bool:
    """Whether containers are nested more than `levels` deep, this one being the first level."""
    if levels == 0:
        return True
    for value in container.values() if type(container) is dict else container:
        if (type(value) is list or type(value) is dict) and _is_deeper(value, levels - 1):
            return True
    return False
