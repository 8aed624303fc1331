"""The header of a message: one small msgpack map, read without ever making much more of it than it is.

msgpack by itself makes 70 MiB of objects of a megabyte of empty lists, takes 1,000 levels, keys that come twice and
NaN. Knows nothing of records: what the map must hold is for `areal_bus.wire.codec`.
"""

from typing import Any

import msgpack

from areal_bus.errors import WireError

MAX_HEADER_BYTES = 64 << 10
MAX_DEPTH = 8
MAX_OBJECT_BYTES = 2 * MAX_HEADER_BYTES  # of the objects that a header becomes
PACKER_BYTES = 1024  # to begin with, it grows: the default of 256 KiB costs 1 us each time

# what unpacking takes at most, in bytes
MAP, ENTRY = 256, 208  # a dict, and each entry of it (with the pair that it comes from), without its key and value
LIST, ITEM = 88, 8
NUMBER = 32
STRING = 80
CONTAINERS = bytes([*range(0x80, 0xA0), *range(0xDC, 0xE0)])  # first bytes of maps and arrays
EXT = {*range(0xC7, 0xCA), *range(0xD4, 0xD9)}  # first bytes of ext types
WIDTHS = {  # first byte -> bytes that follow: of a number itself, else of the length
    0xC4: 1, 0xC5: 2, 0xC6: 4, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4,
    0xD3: 8, 0xD9: 1, 0xDA: 2, 0xDB: 4, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4,
}  # fmt: skip
NO_MSGPACK = (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException)  # what unpacking raises


def pack_header(header: dict[str, Any], kind: str) -> bytes:
    """Raises WireError for what the other side would refuse: nothing oversize is ever sent."""
    packed: bytes = msgpack.Packer(buf_size=PACKER_BYTES).pack(header)
    weigh(packed, kind)
    return packed


def unpack_weighed(packed: bytes, n_containers: int) -> dict[str, Any]:
    """The map, of bytes that have been weighed and may have so many containers.

    Raises WireError with the rule that they break, before much is made of them.
    """
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
    except NO_MSGPACK as error:
        raise WireError(f"a header is one msgpack map: {type(error).__name__}", "header") from None
    if type(header) is not dict:
        raise WireError("a header is one msgpack map", "header")
    if n_containers > MAX_DEPTH and _is_deeper(header, MAX_DEPTH):
        raise WireError(f"a header is nested at most {MAX_DEPTH} deep", "depth")
    return header


def weigh(packed: bytes, kind: str = "one") -> int:
    """Containers that there are at most. Raises WireError when a header, of a message of this `kind`, is too large or
    unpacking would make more than MAX_OBJECT_BYTES of it, judged from the bytes alone.

    Most headers are short, and their length and the bytes that might begin a container bound what they can become.
    """
    n_bytes = len(packed)
    if n_bytes > MAX_HEADER_BYTES:
        raise WireError(f"a header is at most {MAX_HEADER_BYTES} bytes; this {kind} has {n_bytes}", "size")
    n_containers = n_bytes - len(packed.translate(None, CONTAINERS))
    if 144 * n_bytes + n_containers * (MAP + ITEM * n_bytes) > MAX_OBJECT_BYTES:
        _walk(packed)
    return n_containers


def _walk(packed: bytes) -> None:
    """As `weigh`, value by value; ends early where the bytes are no msgpack, which unpacking will say."""
    cost, at = 0, 0
    still: list[int] = []  # values to come in each open container
    while at < len(packed):
        while still and not still[-1]:
            still.pop()
        if still:
            still[-1] -= 1
        n_values, n_bytes, price = _value(packed, at)
        cost, at = cost + price, at + n_bytes
        if cost > MAX_OBJECT_BYTES:
            raise WireError(f"a header becomes at most {MAX_OBJECT_BYTES} bytes of objects; this one is larger", "size")
        if n_values:
            still.append(n_values)
            if len(still) > MAX_DEPTH:
                raise WireError(f"a header is nested at most {MAX_DEPTH} deep", "depth")


def _value(packed: bytes, at: int) -> tuple[int, int, int]:
    """What begins at `at`: values inside it, bytes of its own, bytes of objects."""
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
        raise WireError(f"a header has no ext types; this one has 0x{first:02x}", "ext")
    width = WIDTHS.get(first, 0)
    if not width:
        return 0, 1, 0  # nil, false, true; 0xC1 is none
    if first not in (0xC4, 0xC5, 0xC6) and first < 0xD9:
        return 0, 1 + width, NUMBER
    n = int.from_bytes(packed[at + 1 : at + 1 + width], "big")
    if first < 0xDC:
        return _string(packed, at + 1 + width, n, 1 + width)
    return _container(n, 1 + width, is_map=first >= 0xDE)


def _container(n: int, n_bytes: int, *, is_map: bool) -> tuple[int, int, int]:
    return (2 * n, n_bytes, MAP + ENTRY * n) if is_map else (n, n_bytes, LIST + ITEM * n)


def _string(packed: bytes, start: int, n: int, n_bytes: int) -> tuple[int, int, int]:
    """A character takes 1, 2 or 4 bytes by the widest one of its string; UTF-8 leads them with 0xC4 and 0xF0 on."""
    text = packed[start : start + n]
    widest = 0 if text.isascii() else max(text)
    return 0, n_bytes + n, STRING + n * (4 if widest >= 0xF0 else 2 if widest >= 0xC4 else 1)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise WireError("a header has no key twice", "header")
    return made


def _no_ext(code: int, _data: bytes) -> Any:
    raise WireError(f"a header has no ext types; this one has type {code}", "ext")


def _is_deeper(container: dict[str, Any] | list[Any], levels: int) -> bool:
    """Whether containers are nested in this one, itself the first level, more than so many levels deep."""
    if levels == 0:
        return True
    for value in container.values() if type(container) is dict else container:
        if (type(value) is list or type(value) is dict) and _is_deeper(value, levels - 1):
            return True
    return False
