"""The bytes of single tokens, also of those that are a part of a character."""

import re
from functools import lru_cache
from typing import Any

BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # of a vocabulary with byte fallback


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """The UTF-8 bytes that the token stands for. Those of the tokens of a character together are the character."""
    text = str(tokenizer.decode([token]))
    if "\ufffd" not in text:
        return text.encode(errors="replace")
    written = tokenizer.convert_ids_to_tokens(token)
    if not isinstance(written, str):
        return text.encode()
    if found := BYTE.fullmatch(written):
        return bytes.fromhex(found[1])
    known = byte_letters()
    if all(letter in known for letter in written):
        return bytes(known[letter] for letter in written)
    return text.encode()


@lru_cache(maxsize=1)
def byte_letters() -> dict[str, int]:
    """The letter that a byte-level BPE vocabulary (GPT-2's) writes for each byte: its own where that can be printed."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}
