"""The fork server of a host (launch.start = "fork"): a process with all modules imported, from which ranks are forked.

Its children are the supervisors of the host's ranks; a supervisor forks its actors. So all of them share the pages of
the imports, and none imports again. A process forks only while it has a single thread, and before it has a ZeroMQ
context. `attendant.py` is the other side: the process that the launcher started for the rank.

A fork shares a page until one of the two processes writes to it. Python also writes to objects that it only reads: it
counts references, and during the first calls of a function it fills caches in the function's code. A new object takes
the first free slot, often in a page of older objects. So code that every fork runs is run once before, and the free
slots are filled.

When this process ends, the kernel ends its supervisors, and they end their actors.
`job_server.py` forks the jobs of a sweep in the same way.
"""

import contextlib
import ctypes
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
from functools import partial
from typing import Any

from actors.runtime.process import CRASHED, DONE, leave
from areal_bus.config.loader import resolve
from areal_bus.errors import ConfigError
from areal_bus.process import parent_death, standard_streams
from areal_bus.process.isolation import raise_file_limit
from launch.fork.attendant import LENGTH, NUMBER, pid_and_user, receive
from launch.run.bootstrap import rank_and_size
from launch.run.forked import KEEPS_PLACE, name_process, reset_signals
from launch.run.process import note_terminal

LARGEST_SLOT = 512  # bytes of an object in one of Python's pools; malloc has the larger ones
SLOT_STEP = 16  # bytes between the sizes of slots
POOL_BYTES = (1 << 14) - 64  # of the slots of a pool
MOST_BYTES = 1 << 21  # of the objects of one size
LARGEST_HOLE = 1 << 16  # bytes
SMALLEST_HOLE = 32
BYTES_HEADER = sys.getsizeof(b"")
MALLOC_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
                 "keepcost")  # fmt: skip
EXAMPLE: dict[str, Any] = {
    "data": {"task": "sums", "chat_template": False},
    "model": {"scratch": {}},
    "launch": {"start": "fork", "bootstrap": "env"},
}


class MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc, in bytes and chunks."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in MALLOC_FIELDS)


def share_pages() -> list[object]:
    """Call it after the imports. Keep the result: its objects are in the slots."""
    run_once()
    gc.collect()
    held = fill_slots()
    fill_holes()
    gc.freeze()  # a collection in a child would write to every shared page
    return held


def run_once() -> None:
    """What each supervisor and each actor does: read settings."""
    config = resolve(EXAMPLE, "the example of a fork server", ["run.seed=1"], {})
    type(config).model_validate_json(config.model_dump_json())


def fill_slots() -> list[object]:
    """Objects in all free slots of Python's pools."""
    makers: dict[int, Callable[[], object]] = {sys.getsizeof(make()): make for make in (object, lambda: complex(1.0))}
    for size in range(3 * SLOT_STEP, LARGEST_SLOT + 1, SLOT_STEP):
        makers[size] = partial(bytes, size - BYTES_HEADER)
    return [_fill(make, size) for size, make in makers.items()]


def _fill(make: Callable[[], object], size: int) -> list[object]:
    """Objects of one size until a whole pool has them side by side (or MOST_BYTES): older pools are full."""
    held: list[object] = []
    n_adjacent = last = 0
    while n_adjacent < POOL_BYTES // size - 1 and len(held) * size < MOST_BYTES:
        held.append(make())
        address = id(held[-1])
        n_adjacent = n_adjacent + 1 if address == last + size else 0
        last = address
    return held


def fill_holes() -> int:
    """Allocate the holes between the chunks of malloc, for ever. Returns their number; 0 without glibc 2.33."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return 0
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]
    libc.mallinfo2.restype = MallocInfo
    info = libc.mallinfo2()
    top = libc.sbrk(0) - info.keepcost  # memory above was never allocated
    n_holes, size = 0, LARGEST_HOLE
    while size >= SMALLEST_HOLE:
        chunk = libc.malloc(size)
        if chunk and top - info.arena <= chunk < top:
            n_holes += 1
            continue
        libc.free(chunk)
        size = size * 3 // 4 if size > LARGEST_SLOT else size - SLOT_STEP
    return n_holes


MODULES = (
    "launch.commands.main",
    "actors.head.shell",
    "actors.rewards.actor",
    "actors.generator.actor",
    "areal_lab.ring.connect",
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
        """`starter`: the process that started this one. `run`: work of a child. `ends_when_idle`: end with the last."""
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
            n = len(self._attendants) + len(self._waiting)
            rule, remedy = "needs a descriptor for each rank of a host", 'or set launch.start = "spawn"'
            fault = f"after {n} ranks, the limit of open files is {limit}; raise the hard limit (ulimit -Hn)"
            raise ConfigError(f'launch.start = "fork" {rule}: {fault}, {remedy}')
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
