"""The hash chain of a journal: each line ends with a hash of itself and of the hash before it.

`follows` continues the incarnation before; the head's `seals` names all journals' ends. Any later change breaks it.
"""

import contextlib
import re
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path

from areal_bus.storage.journal_segments import NAME, TIMES, tail

DIGEST_BYTES = 8
TAIL_BYTES = 1 << 20  # holds a whole line
END = re.compile(rb',"chain":"([0-9a-f]{16})"\}\n?\Z')
LAST = re.compile(rb',"chain":"([0-9a-f]{16})"\}\n')


def chained(before: str, lines: Iterable[bytes]) -> Iterator[tuple[bytes, str]]:
    """Each line, an object without its newline, with its hash as last field; and the hash."""
    for line in lines:
        body = line.removesuffix(b"}")
        before = link(before, body)
        yield b'%b,"chain":"%b"}' % (body, before.encode()), before


def link(before: str, body: bytes) -> str:
    """The hash of a line; `body`: without its last brace. Times of single spans do not count: old files lose them."""
    counted = TIMES.sub(b"", body) if b'"at_' in body else body
    return blake2b(before.encode() + counted, digest_size=DIGEST_BYTES).hexdigest()


def split(raw: bytes) -> tuple[bytes, str] | None:
    """A line without its hash and its last brace, and the hash; None for one without."""
    found = END.search(raw)
    return None if found is None else (raw[: found.start()], found[1].decode())


def end_of(path: Path) -> str:
    """The hash of the last whole line of a journal; "" without one."""
    with contextlib.suppress(OSError):
        found = LAST.findall(tail(path, TAIL_BYTES))
        return found[-1].decode() if found else ""
    return ""


def follows(path: Path) -> str:
    """NAME=HASH of the end of the incarnation before, in the same folder; "" without one."""
    name, _, inc = path.name.removesuffix(".jsonl").rpartition(".")
    for earlier in range(int(inc) - 1, -1, -1):
        before = path.with_name(f"{name}.{earlier}.jsonl")
        if end := end_of(before):
            return f"{name}.{earlier}={end}"
    return ""


def seals(path: Path) -> list[str]:
    """NAME=HASH of the end of each other journal in the folder of this one."""
    found = {match["journal"] for file in path.parent.iterdir() if (match := NAME.fullmatch(file.name))}
    ends = {name: end_of(path.with_name(f"{name}.jsonl")) for name in sorted(found - {path.stem})}
    return [f"{name}={end}" for name, end in ends.items() if end]
