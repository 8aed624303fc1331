"""The fork server of a sweep: a process with the loops of areal_lab/loops imported, from which its jobs are forked.

python -P -m areal_lab.sweep.job_fork_server LISTENER STARTER MODULE ...

LISTENER: descriptor of a socket that listens. STARTER: process id of the sweep, with which this process ends. MODULE:
what the jobs of this sweep import besides; one that is not installed is left to the error of the job. A job is
a process of its own, as one that Python starts: same environment, folder, arguments and standard streams, random
numbers of its own, default signals. Only the imports are shared, so its result is the same bit for bit.
CUDA does not survive a fork: jobs on GPUs are not started from here, and this process and its forks see no GPU.
"""

import contextlib
import importlib
import os
import signal
import socket
import sys

from actors.models.scratch import FAMILIES
from actors.runtime.process import CRASHED, leave
from areal_bus.process import standard_streams
from launch.fork.fork_server import ForkServer, Request, become_rank, import_once, serve
from launch.plan.environment import VISIBLE_DEVICES
from launch.run.forked import n_threads, name_process, reseed

MODULES = (
    "areal_lab.loops.exact_lag",
    "areal_lab.loops.virtual_time",
    "actors.rewards.functions.builtin",
    "transformers.generation.utils",
    "transformers.convert_slow_tokenizer",
    "tokenizers.trainers",
    *(f"transformers.models.{family}.modeling_{family}" for family in FAMILIES),
)


def main() -> int:
    standard_streams.secure()
    listener, starter = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    os.environ[VISIBLE_DEVICES] = ""
    for module in sys.argv[3:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    import_once(MODULES)
    if why := why_unsafe():
        print(f"job server: {why}", file=sys.stderr, flush=True)
        return CRASHED
    return serve(ForkServer(listener, starter, run=run_job, ends_when_idle=False))


def why_unsafe() -> str:
    """Why this process must not fork; "" if it may."""
    if (n := n_threads()) != 1:
        return f"a process forks while it has one thread: after the imports it has {n}"
    has_cuda = importlib.import_module("torch").cuda.is_initialized()
    return "a process must not fork after CUDA has started" if has_cuda else ""


def run_job(attendant: socket.socket, streams: list[int], request: Request) -> int:
    """In a child: the job of an attendant. Exit code."""
    become_rank(attendant, streams, request)
    os.environ[VISIBLE_DEVICES] = ""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    reseed()
    module = sys.argv[0]
    name_process(module.rpartition(".")[2])
    code: int = importlib.import_module(module).main()
    return code


if __name__ == "__main__":
    leave(main())
