"""launch.start = "fork": who starts so, exit codes and signals of forked processes, and what a rank imports."""

import ast
import ctypes
import errno
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from areal_bus.config.loader import load
from areal_bus.errors import ConfigError
from launch.fork import attendant
from launch.fork.attendant import VARIABLE, is_wanted
from launch.memory.shape import ATTENDANT
from launch.run.job_id import LAUNCHERS, TORCHRUN

ROOT = Path(__file__).parents[2]
SIMULATED = str(ROOT / "configs" / "sim512.toml")
PLAIN = str(ROOT / "configs" / "simulated.toml")
STARTUP = ast.literal_eval(  # what .pth files of the environment import
    subprocess.run(
        [sys.executable, "-c", "import sys; print(sorted({name.partition('.')[0] for name in sys.modules}))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
)
FORK = ["--set", "launch.start=fork", "--set", "launch.bootstrap=env"]


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


def test_new_objects_of_a_fork_lie_side_by_side() -> None:
    """In free slots between older objects each of them would copy a page."""
    code = """
import json
from launch.fork.fork_server import fill_holes, fill_slots
SIZES = 48, 128, 400, 800
def pages():
    return [len({id(one) >> 12 for one in [bytes(size) for _ in range(200)]}) for size in SIZES]
older = {size: [bytes(size) for _ in range(4000)] for size in SIZES}
for size in SIZES:
    del older[size][::2]
before, held, _ = pages(), fill_slots(), fill_holes()
print(json.dumps([SIZES, before, pages()]))
"""
    for size, before, after in zip(*json.loads(run_python(code).stdout), strict=True):
        least = 200 * (size + 33) / 4096
        is_filled = size < 512 or hasattr(ctypes.CDLL(None), "mallinfo2")
        assert not is_filled or (after <= 1.25 * least + 2 and before > 1.75 * least), size


@pytest.mark.parametrize(
    ("arguments", "environ"),
    [
        ([SIMULATED], {}),
        (["sim512"], {}),
        ([SIMULATED, "--set", "launch.start=spawn"], {}),
        ([SIMULATED, '--set=launch.start = "spawn"'], {}),
        ([SIMULATED], {VARIABLE: "spawn"}),
        ([PLAIN], {}),
        ([PLAIN, *FORK], {}),
        ([*FORK, PLAIN], {VARIABLE: "spawn"}),
        ([PLAIN, "--set", "launch.start='fork'", "--set", "launch.bootstrap=env"], {}),
        ([PLAIN, "--set", "launch.bootstrap=env"], {VARIABLE: "fork"}),
    ],
)
def test_a_rank_knows_how_it_starts_as_the_loader_does(arguments: list[str], environ: dict[str, str]) -> None:
    words = [word.removeprefix("--set=") for word in arguments if word != "--set"]
    file = next(word for word in words if "=" not in word)
    path = file if file.endswith(".toml") else str(ROOT / "configs" / f"{file}.toml")
    loaded = load(path, [word for word in words if "=" in word], environ)
    assert is_wanted(arguments, environ) == (loaded.launch.start == "fork")


def test_a_rank_finds_its_start_in_the_base_of_a_config_and_in_a_run(tmp_path: Path) -> None:
    (tmp_path / "lowest.toml").write_text('[launch]\nstart = "fork"\n')
    (tmp_path / "base.toml").write_text('extends = ["lowest.toml"]\n')
    (tmp_path / "own.toml").write_text('extends = "base.toml"\n[run]\nname = "own"\n')
    (tmp_path / "config.json").write_text(json.dumps({"launch": {"start": "fork"}}))
    assert is_wanted([str(tmp_path / "own.toml")], {})
    assert is_wanted(["--resume", str(tmp_path)], {})
    assert not is_wanted(["--resume", str(tmp_path), "--set", "launch.start=spawn"], {})


@pytest.mark.parametrize(
    "arguments",
    [[], ["missing.toml"], ["--help"], [SIMULATED, "--dry-run"], ["--resume", "missing"], ["--join", "runs/x"]],
)
def test_commands_without_a_ring_or_with_faulty_arguments_are_not_forked(arguments: list[str]) -> None:
    assert not is_wanted(arguments, {})


@pytest.mark.parametrize(
    ("setting", "fault"),
    [("launch.bootstrap=mpi", 'set launch.bootstrap = "env"'), ("topology.gpus_per_host=8", "is for ranks on CPU")],
)
def test_forks_need_a_start_without_mpi_and_gpus(setting: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        load(SIMULATED, [setting, "topology.ranks_per_host=8"])


def test_processes_started_by_the_launcher_import_the_standard_library_only() -> None:
    code = (
        "import sys, areal_bus.launch, launch.fork.attendant\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)))"
    )
    done = run_python(code)
    assert set(ast.literal_eval(done.stdout)) <= {"__main__", "__mp_main__", "areal_bus", "launch", *STARTUP}, (
        done.stderr
    )


def test_the_process_that_waits_for_a_rank_stays_small() -> None:
    code = (
        "import sys; sys.path.insert(0, 'launch/fork'); import rank_waiter\n"
        "rows = open('/proc/self/smaps_rollup').read().splitlines()\n"
        "print(sum(int(row.split()[1]) for row in rows if row.startswith('Private')))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert int(done.stdout) << 10 < ATTENDANT, done.stderr


CHILD = """
import os, signal, subprocess, sys, time
from launch.run.forked import ForkedProcess
read, write = os.pipe()
def started(run):
    return ForkedProcess(run, name="child", stdin=read, environment=os.environ, keep=[])
"""


def test_a_forked_process_has_the_exit_codes_of_a_child() -> None:
    code = (
        CHILD
        + """
ended, crashed, called_exit = started(lambda: 7), started(lambda: 1 / 0), started(lambda: sys.exit(9))
waits = started(lambda: time.sleep(60) or 0)
print(ended.wait(30), crashed.wait(30), called_exit.wait(30), waits.poll())
try:
    waits.wait(0.01)
except subprocess.TimeoutExpired:
    waits.send_signal(signal.SIGTERM)
print(waits.wait(30), waits.poll())
waits.send_signal(signal.SIGTERM)
"""
    )
    done = run_python(code)
    assert done.stdout.splitlines() == ["7 1 1 None", "-15 -15"], done.stderr
    assert "ZeroDivisionError" in done.stderr


def test_a_forked_process_keeps_no_descriptor_name_or_handler_of_its_parent() -> None:
    code = (
        CHILD
        + """
signal.signal(signal.SIGTERM, lambda *_: None)
def look():
    print(sorted(int(n) for n in os.listdir("/proc/self/fd"))[:3], len(os.listdir("/proc/self/fd")))
    has_default = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    print(open("/proc/self/comm").read().strip(), has_default, os.getsid(0) == os.getpid())
    return 0
print(started(look).wait(30))
"""
    )
    done = run_python(code)
    assert done.stdout.splitlines() == ["[0, 1, 2] 4", "child True True", "0"], (
        done.stderr
    )  # the fourth lists the folder


def test_forked_processes_draw_random_numbers_of_their_own() -> None:
    code = (
        CHILD
        + """
import random, numpy
def draw():
    print(random.random(), numpy.random.rand())
    return 0
print(started(draw).wait(30), started(draw).wait(30))
"""
    )
    first, second, ended = run_python(code).stdout.splitlines()
    assert ended == "0 0"
    assert all(a != b for a, b in zip(first.split(), second.split(), strict=True))


ATTENDED = """
import os, socket, sys, time
from areal_bus.process import parent_death
ours, starters = socket.socketpair()
parent_death.die_with_connection(ours, os.getppid(), launcher=0)
"""


def attended(code: str, *words: str, **environ: str) -> "subprocess.Popen[str]":
    """A rank whose starter is a shell, which this process has started."""
    outer = {name: value for name, value in os.environ.items() if name not in (*LAUNCHERS, *TORCHRUN)} | environ
    line = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", ATTENDED + code, *words]
    return subprocess.Popen(line, cwd=ROOT, env=outer, stdout=subprocess.PIPE, text=True)


def test_ranks_of_one_script_meet_though_a_fork_server_is_their_parent() -> None:
    """Without mpirun, Slurm or torchrun the script names the job."""
    code = """
from areal_bus.config.sections import LaunchConfig
from launch.run.bootstrap import open_bootstrap
met = open_bootstrap(LaunchConfig(bootstrap="env", timeout_s=20))
print(met.allgather(b"x"))
met.close()
"""
    ranks = [attended(code, RANK=rank, WORLD_SIZE="2") for rank in "01"]
    assert [rank.communicate(timeout=60)[0] for rank in ranks] == ["[b'x', b'x']\n"] * 2


def test_a_rank_detects_the_end_of_its_starters_parent() -> None:
    """torchrun or a script: the kernel does not end what they have started."""
    code = """
launcher = parent_death.pid()
assert launcher == int(sys.argv[1])
with parent_death.end_is_noticed():
    print(parent_death.is_gone(launcher), parent_death.is_gone(launcher + 1), flush=True)
starters.close()  # its starter ends
time.sleep(20)
"""
    rank = attended(code, str(os.getpid()))
    assert rank.communicate(timeout=60)[0] == "False True\n"
    assert rank.returncode == 128 + signal.SIGKILL


def test_an_error_before_the_rank_runs_is_printed(tmp_path: Path) -> None:
    """In a fork of the server."""
    code = (
        "import socket; from launch.fork.fork_server import rank_code, run_rank\n"
        f"request = {{'folder': '{tmp_path / 'gone'}'}}\n"
        "print(rank_code(lambda: run_rank(socket.socketpair()[0], [], request)))"
    )
    done = run_python(code)
    assert done.stdout == "1\n"
    assert "FileNotFoundError" in done.stderr


def test_a_rank_runs_on_the_cores_and_in_the_folder_of_its_starter() -> None:
    """Not on those of the fork server, which are the cores of the first rank."""
    code = (
        "import os, socket; from launch.fork import attendant, fork_server\n"
        "one, all_ = min(os.sched_getaffinity(0)), os.sched_getaffinity(0)\n"
        "ours, starters = socket.socketpair(); os.sched_setaffinity(0, [one]); attendant.send_request(starters)\n"
        "os.sched_setaffinity(0, all_); os.chdir('/')\n"
        "head, streams, _, _ = socket.recv_fds(ours, 4, 3)\n"
        "request = fork_server.json.loads(attendant.receive(ours, *attendant.LENGTH.unpack(head)))\n"
        "fork_server.become_rank(ours, streams, request)\n"
        "print(os.sched_getaffinity(0) == {one}, os.getcwd(), flush=True)"
    )
    done = run_python(code)
    assert done.stdout == f"True {ROOT}\n", done.stderr


def test_a_process_with_threads_does_not_fork() -> None:
    code = CHILD + "import threading; threading.Thread(target=time.sleep, args=[5], daemon=True).start(); started(int)"
    done = run_python(code)
    assert done.returncode
    assert "a process must have one, and has 2" in done.stderr


def test_a_rank_without_a_fork_server_reports_it() -> None:
    """Its server ends before it answers."""
    code = (
        "import launch.fork.attendant as a, socket\n"
        "name = a.address(); listener = socket.socket(socket.AF_UNIX); listener.bind(name); listener.listen()\n"
        "a.send_request = lambda server: listener.accept()[0].close()\n"
        "raise SystemExit(a.main())"
    )
    done = run_python(code)
    assert done.returncode == 1
    assert "the fork server of this host is lost" in done.stderr


def test_ranks_whose_descriptors_wait_in_large_number_send_theirs_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel refuses them before the server, which still imports, has taken those of some hundred other ranks."""
    send, full = socket.send_fds, [OSError(errno.ETOOMANYREFS, "")] * 2

    def send_fds(*arguments: Any) -> int:
        if full:
            raise full.pop()
        return send(*arguments)

    monkeypatch.setattr(socket, "send_fds", send_fds)
    monkeypatch.setattr(attendant, "FULL_S", 0.0)
    ours, server = socket.socketpair()
    with ours, server:
        attendant.send_request(ours)
        head, streams, _, _ = socket.recv_fds(server, attendant.LENGTH.size, 3)
        for stream in streams:
            os.close(stream)
        request = json.loads(attendant.receive(server, *attendant.LENGTH.unpack(head)))
    assert (request["folder"], len(streams), full) == (os.getcwd(), 3, [])


def test_a_fork_server_whose_starter_ended_before_it_could_serve_ends() -> None:
    code = (
        "import socket; from launch.fork.fork_server import ForkServer\n"
        "listener = socket.socket(socket.AF_UNIX); listener.bind(''); listener.listen()\n"
        "ForkServer(listener, starter=1 << 22).serve(); print('ended')"
    )
    assert run_python(code).stdout == "ended\n"


def test_a_fork_server_raises_its_file_limit_and_reports_when_it_is_reached() -> None:
    code = (
        "import resource, socket\n"
        "from areal_bus.process.isolation import raise_file_limit\n"
        "from launch.fork.fork_server import ForkServer\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (20, 60))\n"
        "assert raise_file_limit(40) == resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 40\n"
        "assert raise_file_limit(1000) == resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 60\n"
        "listener = socket.socket(socket.AF_UNIX); listener.bind(''); listener.listen()\n"
        "server = ForkServer(listener, starter=1)\n"
        "ranks = [open('/dev/null') for _ in range(40)]\n"
        "rank = socket.socket(socket.AF_UNIX); rank.connect(listener.getsockname())\n"
        "server._accept()"
    )
    done = run_python(code)
    assert "needs a descriptor for each rank of a host" in done.stderr
    assert "the limit of open files is 60; raise the hard limit (ulimit -Hn)" in done.stderr
