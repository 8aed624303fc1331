"""Private tests of LiveCodeBench as published: JSON text, pickled as one string, compressed by zlib, in base64.

Nothing is unpickled. A pickle of one string consists of six kinds of instructions; any other instruction is refused, so
no file can name a class or call a function.
"""

import base64
import binascii
import zlib
from collections.abc import Iterator
from typing import Final

LARGEST: Final = 512 << 20  # bytes, decompressed
STOP: Final = ord(".")
# instruction -> bytes of its argument
SKIPPED: Final = {0x80: 1, 0x95: 8, 0x94: 0, ord("q"): 1, ord("r"): 4}  # protocol, frame, and notes for later use
TEXT: Final = {0x8C: 1, ord("X"): 4, 0x8D: 8}  # bytes of the length, before UTF-8 text


def unpacked(text: str) -> str:
    """The JSON text. Raises ValueError for another form."""
    try:
        packed = base64.b64decode(text, validate=True)
        inflate = zlib.decompressobj()
        pickled = inflate.decompress(packed, LARGEST)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"neither JSON nor base64 of zlib: {error}") from None
    if inflate.unconsumed_tail or not inflate.eof:
        raise ValueError(f"compressed tests must be complete and at most {LARGEST >> 20} MiB: these are not")
    texts = list(strings(pickled))
    if len(texts) != 1:
        raise ValueError(f"compressed tests must be one pickled string: these have {len(texts)}")
    return texts[0].decode()


def strings(pickled: bytes) -> Iterator[bytes]:
    """The strings of a pickle that holds strings only. Raises ValueError for any other instruction."""
    at = 0
    while at < len(pickled):
        code, at = pickled[at], at + 1
        if code == STOP:
            return
        if code in SKIPPED:
            at += SKIPPED[code]
            continue
        if code not in TEXT:
            raise ValueError(f"compressed tests must be one pickled string: instruction {code:#04x} is not allowed")
        begin = at + TEXT[code]
        end = begin + int.from_bytes(pickled[at:begin], "little")
        if end > len(pickled):
            break
        yield pickled[begin:end]
        at = end
    raise ValueError("compressed tests must be a complete pickle: the end is missing")
