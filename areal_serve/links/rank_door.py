"""The Unix socket at which workers of other ranks arrive, each with its number and the exit code of the one before.

A connection begins with HELLO; then it is the worker's link. The socket lies in a folder of mode 0700.
"""

import asyncio
import contextlib
import struct
from pathlib import Path

HELLO = struct.Struct("<Ii")  # number of the worker; exit code of its former process
Arrival = tuple[asyncio.StreamReader, asyncio.StreamWriter, int]
DOOR = "door.sock"  # in the folder


class RankDoor:
    """Lives on the event loop of the front."""

    def __init__(self, folder: Path) -> None:
        self._path = str(folder / DOOR)
        self._arrivals: dict[int, asyncio.Queue[Arrival]] = {}
        self._server: asyncio.Server | None = None

    async def listen(self) -> None:
        self._server = await asyncio.start_unix_server(self._arrive, self._path)  # in place of a former front's

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def place(self, index: int) -> "RankPlace":
        """Of the worker with this number."""
        return RankPlace(self._arrivals.setdefault(index, asyncio.Queue()))

    async def _arrive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            index, code = HELLO.unpack(await reader.readexactly(HELLO.size))
            self._arrivals.setdefault(index, asyncio.Queue()).put_nowait((reader, writer, code))


class RankPlace:
    """A worker of another rank, which starts it again."""

    def __init__(self, arrivals: "asyncio.Queue[Arrival]") -> None:
        self._arrivals = arrivals
        self._next: Arrival | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, self._writer, _ = self._next or await self._arrivals.get()
        self._next = None
        return reader, self._writer

    async def code(self) -> int:
        """Its rank has seen the end, and brings the code with the next process."""
        self._next = await self._arrivals.get()
        return self._next[2]

    def kill(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def close(self) -> None:
        """Its rank waits for the end."""
