"""The process that the launcher starts for a rank with launch.start = "fork": it waits for the rank and ends with it.

A fork server of the host (launch/fork/fork_server.py) makes the rank's supervisor. This process sends it its arguments,
environment and standard streams. Then it becomes launch/fork/rank_waiter.py, which passes signals on to the supervisor
and ends with its exit code. It imports the standard library only.
The first one of a host starts the server. Its address is an abstract socket, which one process can bind.
`job_attendant.py` does the same for a job of a sweep, whose server the sweep has started.
"""

import contextlib
import errno
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from areal_bus.config.extends import files_of, read_table
from areal_bus.config.names.packaged import find_config
from areal_bus.errors import ConfigError
from areal_bus.process.isolation import CHILD
from launch.fork.rank_waiter import FORWARDED
from launch.plan.environment import actor_environment
from launch.run.job_id import job_id

WAITER = str(Path(__file__).with_name("rank_waiter.py"))
NUMBER = struct.Struct("<i")  # the supervisor's process id, and at its end its exit code
LENGTH = struct.Struct("<I")
CREDENTIALS = struct.Struct("3i")  # Linux: pid, uid and gid of a peer
BACKLOG = 4096  # ranks of a host that connect at once
CONNECT_S = 10.0
RETRY_S = 0.01
FULL_S = 0.1  # Linux: a user's descriptors on their way to other processes are limited as its open files are
# they start no ring
OTHER_MODES = {"--dry-run", "--all", "--slurm", "--join", "--key", "--explain", "--serve", "--help", "-h"}
SETTING, VARIABLE = "launch.start", "AREAL_BUS_LAUNCH__START"


def is_wanted(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> bool:
    """Whether launch.start = "fork", found as the loader does. False for a fault, which the loader reports."""
    words, given = list(arguments), {"--set": "", "--resume": ""}
    files, value = [], environ.get(VARIABLE, "")
    while words:
        option, equals, text = words.pop(0).partition("=")
        if option in OTHER_MODES:
            return False
        if option not in given:
            files.append(option + equals + text)
            continue
        given[option] = text if equals or not words else words.pop(0)
        key, _, raw = given["--set"].partition("=")
        value = raw if key.strip() == SETTING else value
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError):
        return (value.strip(" \"'") or _in_files(files, given["--resume"])) == "fork"
    return False


def _in_files(files: Sequence[str], run: str) -> str:
    """launch.start of the last file that sets it; without a file, of the settings of the run."""
    if not files:
        return str(json.loads((Path(run) / "config.json").read_text(encoding="utf-8"))["launch"]["start"])
    tables = map(read_table, files_of([find_config(name) for name in files]))
    found = [table["launch"]["start"] for table in tables if "start" in table.get("launch", {})]
    return str(found[-1]) if found else ""


def address(environ: Mapping[str, str] = os.environ) -> str:
    """Abstract address of the fork server: one for each job, user and host."""
    alone = f"process-{os.getpid()}" if "WORLD_SIZE" not in environ else f"parent-{os.getppid()}"
    return f"\0areal-bus-{os.getuid()}-{job_id(environ, alone=alone)}"


def main() -> int:
    """Exit code when the rank does not start; else this process becomes another one."""
    return attend(lambda: connect(address()))


def attend(connected: Callable[[], socket.socket]) -> int:
    """Have this server run the arguments of this process in a fork, and wait for it. Returns as `main` does."""
    try:
        server = connected()
        if pid_and_user(server)[1] != os.getuid():
            raise PermissionError("another user has its address")
        send_request(server)
        wait_for_rank(server)
    except (OSError, EOFError) as error:
        why = str(error) or "its connection ended"
        print(f"error: the fork server of this host is lost: {why}", file=sys.stderr, flush=True)
        return 1


def connect(name: str) -> socket.socket:
    """A connection to the fork server, which is started if there is none. Raises OSError."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    deadline = time.monotonic() + CONNECT_S
    while True:
        try:
            server.connect(name)
            break
        except ConnectionRefusedError:  # no server listens on this address yet, or its server has ended
            if time.monotonic() > deadline:
                raise
            if not start_server(name):
                time.sleep(RETRY_S)
    return server


def start_server(name: str) -> bool:
    """Start the fork server. False if another process has its address. The server gets the socket that listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(name)
        except OSError:
            return False
        listener.listen(BACKLOG)
        optimized = ["-O"] if not __debug__ else []
        subprocess.Popen(
            [*CHILD[:1], *optimized, *CHILD[1:], "launch.fork.fork_server", str(listener.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            env={"MALLOC_ARENA_MAX": "2", **actor_environment(os.environ, gpus=(), cpu=True)},
            start_new_session=True,
        )
    return True


def pid_and_user(peer: socket.socket) -> tuple[int, int]:
    """Process id and user id of the process at the other end."""
    pid, user, _ = CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return pid, user


def send_request(server: socket.socket) -> None:
    """Ask for a supervisor with this process's arguments, environment, folder, cores and standard streams."""
    umask = os.umask(0)
    os.umask(umask)
    request = {
        "arguments": sys.argv,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "umask": umask,
        "cores": sorted(os.sched_getaffinity(0)),
        "launcher": os.getppid(),
    }
    data = json.dumps(request).encode()
    while True:
        try:
            socket.send_fds(server, [LENGTH.pack(len(data))], [0, 1, 2])
            break
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
            time.sleep(FULL_S)
    server.sendall(data)


def receive(peer: socket.socket, n_bytes: int) -> bytes:
    """Read exactly n bytes. Raises EOFError when the connection ends before."""
    data = b""
    while len(data) < n_bytes:
        part = peer.recv(n_bytes - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def wait_for_rank(server: socket.socket) -> NoReturn:
    """Once its supervisor has started, become the process that waits for it. Raises EOFError without an answer."""
    (pid,) = NUMBER.unpack(receive(server, NUMBER.size))
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:  # it has ended already
        process = server.fileno()  # without a server there is no process to signal
    for descriptor in (server.fileno(), process):
        os.set_inheritable(descriptor, True)
    words = [WAITER, str(server.fileno()), str(process), *sys.argv]
    os.execv(sys.executable, [sys.executable, "-I", "-S", *words])
