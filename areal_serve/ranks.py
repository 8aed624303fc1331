"""`mpirun -np N python -m areal_bus.launch CONFIG.toml --serve`: the processes of a server in the ranks of a job.

Rank 0 has the front and the trainer, each other rank a sampler: the job of `areal-bus serve CONFIG.toml -np N`.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from actors.runtime.process import leave
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError
from areal_bus.storage.machine import machine
from areal_serve.__main__ import prepare, supervise
from areal_serve.links.rank_door import DOOR, HELLO
from areal_serve.links.worker_link import start_worker
from areal_serve.process import KEY, worker_variables
from launch.commands.local_job import become_child
from launch.commands.main import load_settings
from launch.plan.network import FOLDERS, made_folder
from launch.run.bootstrap import Bootstrap, RanksMissing, open_bootstrap, rank_and_size
from launch.run.rank import report_error

ENDING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
RETRY_S = 0.1  # between two looks for a front that starts
UNANSWERED = (
    "timed out: no answer of rank 0 within launch.timeout_s = {:g}: it was killed, or its front does not begin; go on "
    "with --serve --resume {}"
)
GRACE_S = 5.0  # after a signal: a worker ends with the front, which has the signal, too


@dataclass(frozen=True, slots=True)
class Start:
    """What rank 0 sends the other ranks."""

    run: str
    model: str  # its folder
    door: str  # folder of the socket; the front removes it when the job ends


def main(options: argparse.Namespace) -> int:
    """Exit code of this rank. Raises ConfigError, on every rank."""
    rank, size = rank_and_size()
    if size < 2:
        raise ConfigError("--serve needs at least 2 ranks, a trainer and a sampler: mpirun -np 2 ... --serve")
    config, file = load_settings(options.config, options.resume, options.set)
    try:
        bootstrap = open_bootstrap(config.launch)
        if rank == 0:
            code = serve(bootstrap, options, config, file)
        else:
            start = exchange(bootstrap, {})
            code = sample(start, rank, worker_variables(config, rank, size), patience_s=config.launch.timeout_s)
    except RanksMissing as error:
        return report_error(rank, error)
    if code:
        leave(code)  # without MPI_Finalize, which would wait for the other ranks
    bootstrap.close()
    return 0


def serve(bootstrap: Bootstrap, options: argparse.Namespace, config: Config, file: Path) -> int:
    """Rank 0: run the front, with the trainer as its child. Exit code."""
    try:
        door = made_folder(f"{FOLDERS}serve-")
        front = prepare(config, file, resume=options.resume, port=options.port)
    except (ConfigError, OSError) as error:
        exchange(bootstrap, {"error": str(error)})
        raise ConfigError(str(error)) from error
    try:
        exchange(bootstrap, asdict(Start(str(front.run), front.model, str(door))))
        return supervise(front.command(bootstrap.size - 1, door=str(door)), {KEY: front.key})
    finally:
        shutil.rmtree(door, ignore_errors=True)


def exchange(bootstrap: Bootstrap, word: dict[str, str]) -> Start:
    """Rank 0's start, once all ranks are there. Raises ConfigError, on every rank."""
    parts = [json.loads(part) for part in bootstrap.allgather(json.dumps({"on": machine(), "word": word}).encode())]
    bootstrap.finish_exchanges()
    given = parts[0]["word"]
    if "error" in given:
        raise ConfigError(given["error"])
    if len({part["on"] for part in parts}) > 1:
        raise ConfigError("ranks on several hosts: the processes of a server share sockets; start --serve on one host")
    return Start(**given)


def sample(start: Start, index: int, variables: Mapping[str, str], *, patience_s: float) -> int:
    """Run the sampler, again each time that it ends, until rank 0 removes the door. Exit code: 1 when rank 0 does not
    answer for `patience_s` (a signal has killed it, and no mpirun ends the others). Stops of this process do not count.
    """
    door, code, is_ending = Path(start.door), 0, False
    left_s = patience_s
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*ENDING, signal.SIGCHLD})
    while door.is_dir() and not is_ending:
        link = socket.socket(socket.AF_UNIX)
        try:
            link.connect(str(door / DOOR))
            link.sendall(HELLO.pack(index, code))
        except OSError:  # the front has not begun, or begins again
            link.close()
            if left_s <= 0:
                print(f"rank {index}: {UNANSWERED.format(patience_s, start.run)}", file=sys.stderr, flush=True)
                return 1
            left_s -= RETRY_S
            is_ending = signal.sigtimedwait(ENDING, RETRY_S) is not None
            continue
        left_s = patience_s
        before = partial(become_child, os.getpid(), mask)
        process = start_worker(["sampler", start.run, start.model], link, variables, before)
        is_ending = wait(process)
        code = process.returncode
    return 0


def wait(process: subprocess.Popen[bytes]) -> bool:
    """Wait for its end. Whether a signal came, which leaves it GRACE_S."""
    deadline: float | None = None
    while process.poll() is None:
        left_s = 1.0 if deadline is None else max(0.0, deadline - time.monotonic())
        found = signal.sigtimedwait({*ENDING, signal.SIGCHLD}, left_s)
        if found is None and deadline is not None:
            process.kill()
            process.wait()
        elif found is not None and found.si_signo in ENDING and deadline is None:
            deadline = time.monotonic() + GRACE_S
    return deadline is not None
