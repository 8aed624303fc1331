"""What a server writes is read in linear time, however it is cut."""

import asyncio
from collections.abc import AsyncIterator

from actors.engines.servers.http_client import _lines


async def lines_of(piece: bytes, n: int) -> list[bytes]:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(n):
            yield piece

    return [line async for line in _lines(pieces())]


def test_lines_of_a_stream_end_with_a_newline_only_however_they_are_cut() -> None:
    assert asyncio.run(lines_of(b"ab\r\nc", 2)) == [b"ab", b"cab", b"c"]
    separators = "a\u2028b\u0085c\u2029d".encode()  # as orjson writes them
    assert asyncio.run(lines_of(separators + b"\n", 2)) == [separators, separators, b""]
    assert asyncio.run(lines_of(b"", 3)) == [b""]


def test_a_line_without_an_end_is_read_in_linear_time() -> None:
    """Each of its pieces copied all that came before: 800 GB."""
    (line,) = asyncio.run(lines_of(b"x" * 1024, 40_000))
    assert len(line) == 40_000 << 10
