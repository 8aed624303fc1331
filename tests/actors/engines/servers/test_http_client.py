"""What a server writes is read in linear time, however it is cut."""

import asyncio
import time
from collections.abc import AsyncIterator

from actors.engines.servers.http_client import _lines


async def lines_of(piece: bytes, n: int) -> list[bytes]:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(n):
            yield piece

    return [line async for line in _lines(pieces())]


def test_lines_of_a_stream_are_whole_however_they_are_cut() -> None:
    assert asyncio.run(lines_of(b"ab\r\nc", 2)) == [b"ab", b"cab", b"c"]
    assert asyncio.run(lines_of(b"", 3)) == [b""]


def test_a_line_without_an_end_is_read_in_linear_time() -> None:
    """Each of its pieces copied all that came before."""
    began = time.thread_time()
    (line,) = asyncio.run(lines_of(b"x" * 1024, 40_000))
    assert len(line) == 40_000 << 10
    assert time.thread_time() - began < 5
