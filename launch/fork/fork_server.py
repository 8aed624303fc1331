"""The fork server of a host (launch.start = "fork"): a process with all modules imported, from which ranks are forked.

Its children are the supervisors of the host's ranks; a supervisor forks its actors. So all of them share the pages of
the imports, and none imports again. A process forks only while it has a single thread, and before it has a ZeroMQ
context. `attendant.py` is the other side: the process that the launcher started for the rank.
When this process ends, the kernel ends its supervisors, and they end their actors.
`job_server.py` forks the jobs of a sweep in the same way.
"""

import contextlib
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterable
from typing import Any

from actors.runtime.process import CRASHED, DONE, leave
from areal_bus.errors import ConfigError
from areal_bus.process import parent_death, standard_streams
from areal_bus.process.file_limit import raise_file_limit
from launch.fork.attendant import LENGTH, NUMBER, pid_and_user, receive
from launch.fork.shared_pages import share_pages
from launch.run.bootstrap import rank_and_size
from launch.run.forked import KEEPS_PLACE, name_process, reset_signals
from launch.run.process import note_terminal

MODULES = (
    "launch.commands.main",
    "actors.head.shell",
    "actors.rewards.actor",
    "actors.generator.actor",
    "actors.engines.simulated.connect",
    "actors.learner.actor",
    "transformers.generation.utils",
    "transformers.models.llama.modeling_llama",
    "transformers.convert_slow_tokenizer",
    "transformers.tokenization_utils_tokenizers",
)
REQUEST_S = 10.0  # for an attendant to send its request
POLL_S = 1.0
MOST_FILES = 1 << 16
N_STREAMS = 3
SPARE = 16  # descriptors for the streams of a rank and for opening files


def main() -> int:
    standard_streams.secure()
    listener, starter = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    raise_file_limit(MOST_FILES)  # a connection for each rank of the host
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
    import_once(MODULES)
    importlib.import_module("areal_bus.weights.process_group").print_numeric_peers()
    _slots = share_pages()  # they stay occupied
    return serve(ForkServer(listener, starter))


def import_once(modules: Iterable[str]) -> None:
    """Import what all children share."""
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a child would write to every shared page


def serve(server: "ForkServer") -> int:
    """Exit code of a fork server."""
    try:
        server.serve()
    except ConfigError as error:  # the kernel ends the ranks that have started
        print(f"fork server: {error}", file=sys.stderr, flush=True)
        return CRASHED
    return 0


Request = dict[str, Any]  # an attendant's arguments, environment, folder, cores: attendant.send_request
Run = Callable[[socket.socket, list[int], Request], int]  # attendant, its standard streams, request -> exit code


class ForkServer:
    """Forks a process for each request, and reports the end of each to its attendant."""

    def __init__(
        self, listener: socket.socket, starter: int, *, run: Run | None = None, ends_when_idle: bool = True
    ) -> None:
        """`starter`: the process that started this one. It may have ended by now. `run`: the work of a child; by
        default it becomes the supervisor of a rank. `ends_when_idle`: end with the last child, not with the starter.
        """
        self._listener = listener
        self._starter = starter
        self._run = run or run_rank
        self._ends_when_idle = ends_when_idle
        self._pid = os.getpid()
        self._attendants: dict[int, socket.socket] = {}  # by process id of the child
        self._waiting: list[socket.socket] = []  # attendants of ranks without actors
        self._has_served = False
        self._wakeup, self._write = socket.socketpair()
        self._write.setblocking(False)

    def serve(self) -> None:
        """Serve until all children have ended; if none came, until the process that started this one has ended."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        while not self._is_over():
            ready, _, _ = select.select([self._listener, self._wakeup], [], [], POLL_S)
            if self._wakeup in ready:
                self._wakeup.recv(4096)
            if self._listener in ready:
                self._accept()
            self._report_ends()
        for attendant in self._waiting:
            answer(attendant, DONE)

    def _is_over(self) -> bool:
        if self._attendants or select.select([self._listener], [], [], 0)[0]:
            return False
        return (self._has_served and self._ends_when_idle) or os.getppid() != self._starter

    def _accept(self) -> None:
        """Read a request and fork. A request that is not whole is dropped: its sender has ended."""
        attendant, _ = self._listener.accept()
        if attendant.fileno() + SPARE > (limit := resource.getrlimit(resource.RLIMIT_NOFILE)[0]):
            raise ConfigError(
                f'launch.start = "fork" needs a descriptor for each rank of a host: after '
                f"{len(self._attendants) + len(self._waiting)} ranks, the limit of open files is {limit}; "
                'raise the hard limit (ulimit -Hn), or set launch.start = "spawn"'
            )
        streams: list[int] = []
        try:
            if pid_and_user(attendant)[1] != os.getuid():
                raise PermissionError("only processes of this user are served")
            attendant.settimeout(REQUEST_S)
            head, streams, _, _ = socket.recv_fds(attendant, LENGTH.size, N_STREAMS)
            if len(head) != LENGTH.size or len(streams) != N_STREAMS:
                raise EOFError
            request = json.loads(receive(attendant, *LENGTH.unpack(head)))
            attendant.settimeout(None)
            pid = self._fork(attendant, streams, request)
            self._attendants[pid], self._has_served = attendant, True
            attendant.sendall(NUMBER.pack(pid))
        except (OSError, EOFError, ValueError) as error:
            if not isinstance(error, EOFError):
                print(f"fork server: a process was not started: {error}", file=sys.stderr, flush=True)
            if attendant not in self._attendants.values():
                attendant.close()
        finally:
            for stream in streams:
                os.close(stream)

    def _fork(self, attendant: socket.socket, streams: list[int], request: Request) -> int:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        pid = os.fork()
        if pid:
            return pid
        code = CRASHED
        try:
            reset_signals()
            parent_death.die_with_parent(self._pid)
            self._close()
            code = rank_code(lambda: self._run(attendant, streams, request))
        finally:
            leave(code)

    def _close(self) -> None:
        """In a child: close what belongs to the server."""
        for one in (self._listener, self._wakeup, self._write, *self._attendants.values(), *self._waiting):
            one.close()
        self._attendants.clear()
        self._waiting.clear()

    def _report_ends(self) -> None:
        """Send the exit code of each child that has ended to its attendant."""
        while self._attendants:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            attendant, code = self._attendants.pop(pid), os.waitstatus_to_exitcode(status)
            if code == KEEPS_PLACE:
                self._waiting.append(attendant)
            else:
                answer(attendant, code)


def answer(attendant: socket.socket, code: int) -> None:
    """Send the exit code of its rank to an attendant."""
    with contextlib.suppress(OSError), attendant:  # it was killed
        attendant.sendall(NUMBER.pack(code))


def run_rank(attendant: socket.socket, streams: list[int], request: Request) -> int:
    """In a child: the rank of an attendant. Exit code."""
    become_rank(attendant, streams, request)
    with contextlib.suppress(ConfigError):  # the rank prints it
        name_process(f"rank-{rank_and_size()[0]}")
    code: int = importlib.import_module("launch.commands.main").main()
    return code


def become_rank(attendant: socket.socket, streams: list[int], request: Request) -> None:
    """In a child: take what the attendant has sent and its standard streams, and end with it."""
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["folder"])
    os.umask(request["umask"])
    os.sched_setaffinity(0, request["cores"])  # a launcher may bind each rank to cores of its own
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = request["arguments"]
    parent_death.die_with_connection(attendant, pid_and_user(attendant)[0], request["launcher"])
    note_terminal()


def rank_code(run: Callable[[], int]) -> int:
    """Run the rank; prints an unexpected error."""
    try:
        return run()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else CRASHED
    except BaseException:  # noqa: BLE001  nothing may return to the server's loop
        sys.excepthook(*sys.exc_info())
        return CRASHED


if __name__ == "__main__":
    leave(main())
