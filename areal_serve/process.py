"""The front's process: `python -m areal_serve.process RUN HOST PORT N_SAMPLERS FOLDER NAME DOOR PARENT`.

The key is in its environment. It starts the trainer and the samplers as its children (those of other ranks arrive at
DOOR, a folder), prints the address when all are ready, and serves until SIGTERM; it ends with GAVE_UP when one of them
does not stay up.
"""

import os
import select
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from actors.models.loading import max_positions
from areal_bus.config.removed import saved
from areal_bus.config.sections import Config
from areal_bus.process.parent_death import die_with_parent
from areal_bus.transport.web_server import WebServer
from areal_serve.front import WATCH_S, Front
from areal_serve.links.rank_door import RankDoor
from areal_serve.links.worker_link import Child, Place, WorkerLink
from areal_serve.registry import Registry
from areal_serve.samplers import Samplers
from areal_serve.storage.client_journal import ClientJournal
from areal_serve.worker import Frame

KEY = "TINKER_API_KEY"
QUIET = "AREAL_BUS_SERVE_QUIET"  # in the environment of a front that is started again
N_CONNECTIONS = 1024
GAVE_UP = 3  # exit code
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Workers:
    """The trainer and the samplers of a front, started on its event loop."""

    def __init__(self, config: Config, run: Path, folder: str, *, n_samplers: int, door: str) -> None:
        self._config, self._run, self._words, self._n_samplers = config, run, [str(run), folder], n_samplers
        self.samplers = Samplers()
        self.registry = Registry(run, save_every=config.serve.save_every, to_trainer=self._to_trainer)
        self._trainer: WorkerLink | None = None
        self._all: list[WorkerLink] = []
        self._journal: ClientJournal | None = None
        self._starting = set(range(1 + n_samplers))
        self._door = RankDoor(Path(door)) if door else None
        self.on_ready: Callable[[], None] = lambda: None
        self.on_give_up: Callable[[], None] = lambda: None  # a worker does not stay up

    def _to_trainer(self, frame: Frame) -> None:
        if self._trainer is not None:
            self._trainer.send(frame)

    async def start(self, app: web.Application) -> None:
        if self._door is not None:
            await self._door.listen()
        self._journal = ClientJournal(self._run, self._config)
        self.registry.on_done = self.samplers.on_done = self._journal.call
        self._trainer = self._worker("trainer", 0, self.registry.on_trainer, self.registry.on_trainer_start)
        for index in range(self._n_samplers):
            self.samplers.add(
                self._worker(
                    "sampler",
                    1 + index,
                    partial(self.samplers.on_frame, index),
                    partial(self.samplers.on_start, index),
                )
            )

    def _worker(self, role: str, index: int, on_frame: Any, on_start: Any) -> WorkerLink:
        def started() -> None:
            on_start()
            if index in self._starting:  # not again
                self._starting.remove(index)
                if not self._starting:
                    self.on_ready()

        if self._door is not None and index:
            place: Place = self._door.place(index)
        else:
            variables = worker_variables(self._config, index, 1 + self._n_samplers)
            place = Child([role, *self._words], variables)
        assert self._journal is not None
        on_end = partial(self._journal.worker_ended, role, index)
        give_up = self.on_give_up
        self._all.append(
            WorkerLink(role, place, on_frame=on_frame, on_start=started, on_end=on_end, on_give_up=give_up)
        )
        return self._all[-1]

    def watch(self) -> None:
        """Called every WATCH_S."""
        self.registry.end_silent_sessions()
        if self._journal is not None:
            self._journal.mark()

    async def close(self, app: web.Application) -> None:
        if self._door is not None:
            self._door.close()
        for worker in self._all:
            worker.kill()
        for worker in self._all:  # they end together
            worker.close()
        if self._journal is not None:
            self._journal.close()


def worker_variables(config: Config, index: int, size: int) -> dict[str, str]:
    """Of the environment of worker `index` of `size` on this host: its threads and its GPU."""
    n_threads = max(1, (os.cpu_count() or 1) // size)
    variables = {name: os.environ.get(name, str(n_threads)) for name in THREADS}
    if n_gpus := config.topology.gpus_per_host:
        variables["CUDA_VISIBLE_DEVICES"] = str(index % n_gpus)
    return variables


def main(words: list[str]) -> None:
    run, host, port, n_samplers, folder, name, door, parent = words
    die_with_parent(int(parent))
    key, is_quiet = os.environ.pop(KEY), os.environ.pop(QUIET, "")
    ended, end = os.pipe()  # a handler takes no lock: it may interrupt the thread that has it
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os.write(end, b"."))
    config = saved((Path(run) / "config.json").read_text(encoding="utf-8"))
    workers = Workers(config, Path(run), folder, n_samplers=int(n_samplers), door=door)
    context = max_positions(folder) or 1 << 20
    front = Front(workers.registry, workers.samplers, key=key, name=name, context=context, tokenizer=folder)

    def give_up() -> None:
        os.write(end, b"!")

    workers.on_give_up = give_up
    front.app.on_startup.append(workers.start)
    front.app.on_cleanup.append(workers.close)
    if not is_quiet:
        workers.on_ready = lambda: print(f"TINKER_BASE_URL=http://{host}:{port}\n{KEY}={key}", flush=True)
    server = WebServer(front.app, name="front", n_connections=N_CONNECTIONS, address=(host, int(port)))
    while not select.select([ended], [], [], WATCH_S)[0]:
        server.thread.soon(workers.watch)
    if door:  # at once: mpirun leaves its ranks a second, and the folder tells the others that the job ends
        shutil.rmtree(door, ignore_errors=True)
    given_up = os.read(ended, 1) == b"!"
    server.close()
    if given_up:
        sys.exit(GAVE_UP)


if __name__ == "__main__":
    main(sys.argv[1:])
