"""The front's end of a link: connects to a worker, and again to the next one each time that it ends."""

import asyncio
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Protocol

import msgpack

from areal_bus.process.isolation import CHILD, child_path
from areal_serve.worker import LENGTH, READY, Frame

MOST_EARLY = 3  # ends in a row before it was ready


class Place(Protocol):
    """Where the processes of one worker run."""

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The link to a new process."""

    async def code(self) -> int:
        """Exit code of the process whose link has closed."""

    def kill(self) -> None:
        """The process ends, or its link closes."""

    def close(self) -> None:
        """Wait for the end, after `kill`."""


class Child:
    """A child of this process."""

    def __init__(self, words: list[str], variables: Mapping[str, str]) -> None:
        """`words`: role, run, model."""
        self._words, self._variables = words, variables
        self._process: subprocess.Popen[bytes] | None = None

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        ours, theirs = socket.socketpair()
        self._process = start_worker(self._words, theirs, self._variables)
        return await asyncio.open_connection(sock=ours)

    async def code(self) -> int:
        assert self._process is not None
        return await asyncio.to_thread(self._process.wait)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        if self._process is not None:
            self._process.wait()


def start_worker(
    words: list[str], link: socket.socket, variables: Mapping[str, str], before: Callable[[], None] | None = None
) -> subprocess.Popen[bytes]:
    """A worker that ends with this process. It gets the link, which is closed here. `before`: runs in it, at first."""
    role, *rest = words
    with link:
        return subprocess.Popen(
            [*CHILD, "areal_serve.worker", role, str(link.fileno()), *rest, str(os.getpid())],
            env={**os.environ, "PYTHONPATH": child_path(), **variables},
            pass_fds=[link.fileno()],
            preexec_fn=before,
        )


class WorkerLink:
    """Lives on the event loop."""

    def __init__(
        self,
        name: str,
        place: Place,
        *,
        on_frame: Callable[[Frame], None],
        on_start: Callable[[], None],
        on_end: Callable[[int], None],
        on_give_up: Callable[[], None],
    ) -> None:
        """`on_start`: the worker is ready, for the first time or again. `on_end`: gets its exit code. `on_give_up`: it
        does not stay up.
        """
        self._name, self._place, self._on_frame, self._on_start = name, place, on_frame, on_start
        self._on_end, self._on_give_up = on_end, on_give_up
        self._writer: asyncio.StreamWriter | None = None
        self._task = asyncio.get_running_loop().create_task(self._run())

    def send(self, frame: Frame) -> None:
        """A frame to a worker that has ended is lost: `on_start` sends what is needed again."""
        if self._writer is not None:
            body = msgpack.packb(frame, use_bin_type=True)
            self._writer.write(LENGTH.pack(len(body)) + body)

    def kill(self) -> None:
        """It is not started again."""
        self._task.cancel()
        self._place.kill()

    def close(self) -> None:
        self.kill()
        self._place.close()

    async def _run(self) -> None:
        n_early = 0
        while n_early < MOST_EARLY:
            n_early += 1
            reader, self._writer = await self._place.connect()
            try:
                while True:
                    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                    frame = msgpack.unpackb(await reader.readexactly(length), strict_map_key=False)
                    if frame == READY:
                        n_early = 0
                    self._told(frame)
            except (asyncio.IncompleteReadError, ConnectionError):
                self._writer.close()
                code = await self._place.code()
                print(f"{self._name} ended with code {code}: it is started again", file=sys.stderr, flush=True)
                self._on_end(code)
        print(f"error: {self._name} ended {MOST_EARLY} times before it was ready", file=sys.stderr, flush=True)
        self._on_give_up()

    def _told(self, frame: Frame) -> None:
        """A fault in a callback ends the front: the next one begins with what is on disk."""
        try:
            self._on_start() if frame == READY else self._on_frame(frame)
        except Exception:  # noqa: BLE001  no task awaits this one: clients would wait for ever
            traceback.print_exc()
            os._exit(1)
