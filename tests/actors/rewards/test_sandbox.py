"""Attacks of docs/sandbox.md: each row is a test here. Those of the level bubblewrap skip where it does not run."""

import os
import platform
import socket
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from actors.rewards import sandbox, syscall_filter
from actors.rewards.sandbox import Outcome, SandboxLimits, find_level, run

SMALL = SandboxLimits(wall_s=8.0, cpu_s=2)
needs_bubblewrap = pytest.mark.skipif(
    find_level() != "bubblewrap", reason="bubblewrap is not installed, or namespaces are not allowed here"
)


both_levels = pytest.mark.parametrize("level", [pytest.param("bubblewrap", marks=needs_bubblewrap), "rlimits"])


def attack(program: str, stdin: bytes = b"", limits: SandboxLimits = SMALL) -> Outcome:
    return run(program, stdin, limits, level="bubblewrap")


@both_levels
def test_a_program_reads_stdin_and_its_output_and_exit_code_come_back(level: str) -> None:
    outcome = run("import sys; print(input() + '!'); print(2, file=sys.stderr); exit(3)", b"yes\n", level=level)  # type: ignore[arg-type]
    assert (outcome.end, outcome.exit_code, outcome.stdout, outcome.stderr) == ("exit", 3, b"yes!\n", b"2\n")


@pytest.mark.slow
@both_levels
@pytest.mark.parametrize(
    ("program", "end", "text"),
    [
        ("x = bytearray(10 << 30)", "exit", b"MemoryError"),
        ("while True: print('x' * 1000)", "output", b""),
        ("file = open('full', 'wb', 0)\nfor _ in range(1024): file.write(bytes(1 << 20))", "exit", b"File too large"),
        ("while True: pass", "timeout", b""),
        ("import time; time.sleep(60)", "timeout", b""),
        ("import os; print(dict(os.environ).get('SECRET_OF_TEST'), flush=True); os._exit(0)", "exit", b"None"),
    ],
    ids=["10 GB", "endless output", "1 GB file", "loop", "sleep", "environment"],
)
def test_both_levels_bound(level: str, program: str, end: str, text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_TEST", "s3cret")
    limits = SandboxLimits(wall_s=1.5 if end == "timeout" else 8.0)
    outcome = run(program, b"", limits, level=level)  # type: ignore[arg-type]
    assert outcome.end == end
    assert text in outcome.stdout + outcome.stderr
    assert len(outcome.stdout) <= limits.output_bytes


@pytest.mark.slow
@both_levels
def test_an_endless_loop_ends_by_its_cpu_limit(level: str) -> None:
    outcome = run("while True: pass", b"", SandboxLimits(wall_s=30.0, cpu_s=1), level=level)  # type: ignore[arg-type]
    assert outcome.end == "exit"
    assert outcome.exit_code == 128 + 9


@needs_bubblewrap
def test_a_fork_bomb_stops_at_the_limit_of_processes() -> None:
    outcome = attack(
        "import os, time\nn = 0\ntry:\n    while n < 500:\n        if os.fork() == 0: time.sleep(60)\n"
        "        n += 1\nexcept OSError: pass\nprint(n, flush=True); os._exit(0)"
    )
    assert outcome.end == "exit"
    assert 0 < int(outcome.stdout) <= SMALL.n_processes


@needs_bubblewrap
def test_children_in_their_own_sessions_are_killed_with_the_program() -> None:
    mark = f"areal-bus-left-{os.getpid()}"
    attack(
        "import os, sys, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        f"        os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(60)', '{mark}'])\n"
        "    os._exit(0)\ntime.sleep(0.2)"
    )
    assert not [pid for pid in filter(str.isdecimal, os.listdir("/proc")) if mark in command_line(pid)]


def command_line(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


@needs_bubblewrap
def test_the_network_and_files_of_the_host_are_not_reachable(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        outcome = attack(f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)")
    assert b"ConnectionRefusedError" in outcome.stderr or b"unreachable" in outcome.stderr
    secret = tmp_path / "tests.json"
    secret.write_text("s3cret")
    outcome = attack(f"import os; os.symlink({str(secret)!r}, '/tmp/x'); print(open('/tmp/x').read())")
    assert b"FileNotFoundError" in outcome.stderr
    assert b"s3cret" not in outcome.stdout


EACH = "for path in {!r}:\n    try: {}\n    except OSError as error: print(type(error).__name__)\n"
HIDDEN = ["/etc/passwd", "/home", "/root/.ssh", __file__, "/sys", "/run", "/var"]
CLOSED = ["/usr/x", "/x", "/dev/x", "/dev/shm/x", "/main.py", "/proc/sys/kernel/hostname", sys.base_prefix + "/x"]


@needs_bubblewrap
def test_files_of_the_host_are_not_visible_and_only_tmp_can_be_written() -> None:
    outcome = attack("import os\n" + EACH.format(HIDDEN, "os.stat(path); print(path)"))
    assert outcome.stdout.split() == [b"FileNotFoundError"] * len(HIDDEN)
    outcome = attack(EACH.format([*CLOSED, "/tmp/x"], "open(path, 'w').write('x'); print(path)"))
    *refused, written = outcome.stdout.split()
    assert all(word.endswith(b"Error") for word in refused), outcome.stdout
    assert (len(refused), written) == (len(CLOSED), b"/tmp/x")


@needs_bubblewrap
def test_only_its_own_processes_are_in_proc_and_killing_the_parent_kills_no_other() -> None:
    outcome = attack("import os; print(sorted(int(p) for p in os.listdir('/proc') if p.isdecimal()), os.getppid())")
    assert max(map(int, outcome.stdout.split(b"]")[0].strip(b"[").split(b","))) < 10
    for target in ("os.getppid()", "1", "-1"):
        outcome = attack(f"import os\ntry: os.kill({target}, 9)\nexcept OSError: pass")
        assert outcome.end == "exit"
    assert attack("print(1)").stdout == b"1\n"


@needs_bubblewrap
def test_the_disk_is_bounded_over_many_files() -> None:
    outcome = attack(
        "n = 0\ntry:\n    while n < 100:\n        open(f'/tmp/{n}', 'wb').write(bytes(1 << 20))\n        n += 1\n"
        "except OSError: pass\nprint(n)"
    )
    assert int(outcome.stdout) <= SMALL.disk_bytes >> 20


@needs_bubblewrap
def test_the_program_has_no_rights_and_is_not_root() -> None:
    outcome = attack(
        "import os\nlines = open('/proc/self/status').read().splitlines()\n"
        "print([x.split()[1] for x in lines if x.startswith(('CapEff', 'CapPrm', 'NoNewPrivs'))])\n"
        "print(os.getuid() == 0)\nos.setuid(0)"
    )
    assert outcome.stdout == b"['0000000000000000', '0000000000000000', '1']\nFalse\n"
    assert b"PermissionError" in outcome.stderr


LIBC = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"


CALLS = [
    *("libc.unshare(0x10000000)", "libc.unshare(0x20000)", "libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)"),
    *("libc.shmget(0, 1 << 20, 0o1600)", "libc.mount(b't', b'/tmp', b'tmpfs', 0, b'size=10g')", "libc.ptrace(0)"),
    *("libc.syscall(250, 0, -3, 1, 0, 0)", "libc.socket(40, 1, 0)", "libc.socket(16, 3, 0)"),
    *("libc.syscall(425, 4, 0)", "libc.memfd_create(b'', 0)"),
]


@needs_bubblewrap
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers are those of x86-64")
def test_system_calls_around_the_limits_fail() -> None:
    outcome = attack(LIBC + "\n".join(f"print({call}, ctypes.get_errno())" for call in CALLS))
    found = dict(zip(CALLS, outcome.stdout.splitlines(), strict=True))
    assert set(found.values()) <= {b"-1 1", b"-1 97"}, found  # EPERM, EAFNOSUPPORT


@needs_bubblewrap
def test_the_filter_of_system_calls_leaves_threads_processes_and_sockets() -> None:
    outcome = attack(
        "import socket, subprocess, sys, threading\nthread = threading.Thread(target=print, args=('thread',))\n"
        "thread.start(); thread.join()\nsys.stdout.flush()\n"
        "subprocess.run([sys.executable, '-S', '-c', 'print(1)'], check=True)\na, b = socket.socketpair()\n"
        "a.send(b'pair'); print(b.recv(9)); socket.socket()"
    )
    assert (outcome.exit_code, outcome.stdout) == (0, b"thread\n1\nb'pair'\n")


def verdict_of(program: bytes, architecture: int, number: int, argument: int = 0) -> int:
    """What a filter returns: an interpreter of its five instructions."""
    steps = list(struct.iter_unpack("=HBBI", program))
    data = {0: number, 4: architecture, 16: argument}
    at = loaded = 0
    while True:
        code, if_true, if_false, operand = steps[at]
        at += 1
        if code == 0x06:
            return int(operand)
        if code == 0x20:
            loaded = data[operand]
        else:
            is_true = {0x15: loaded == operand, 0x35: loaded >= operand, 0x45: bool(loaded & operand)}[code]
            at += if_true if is_true else if_false


@pytest.mark.parametrize("machine", syscall_filter.NUMBERS)
def test_the_seccomp_filter_denies_only_the_calls_that_it_names(machine: str) -> None:
    program, numbers = syscall_filter.program(machine), syscall_filter.NUMBERS[machine]
    assert program is not None
    denied = {*numbers.denied, *syscall_filter.SINCE_5_1}
    for number in range(600):
        found = verdict_of(program, numbers.architecture, number, 2)
        expected = 0x50001 if number in denied else 0x50026 if number == syscall_filter.CLONE3 else 0x7FFF0000
        assert found == expected, number
    assert verdict_of(program, numbers.architecture, numbers.clone, 0x10000011) == 0x50001
    assert verdict_of(program, numbers.architecture, numbers.socket, 40) == 0x50061
    assert verdict_of(program, 0x40000003, 20) == 0x50001  # 32-bit calls have other numbers
    assert verdict_of(program, numbers.architecture, 0x40000000 | 272) == 0x50001
    assert syscall_filter.program("riscv64") is None


@both_levels
def test_the_memory_of_all_processes_together_is_bounded(level: str) -> None:
    limits = SandboxLimits(wall_s=20.0, all_memory_bytes=200 << 20)
    outcome = run(
        "import os, time\nfor _ in range(5):\n    if os.fork() == 0: break\nx = bytearray(os.urandom(1) * (60 << 20))\n"
        "time.sleep(15)",
        limits=limits,
        level=level,  # type: ignore[arg-type]
    )
    assert outcome.end == "memory"


def test_processes_may_be_deeper_than_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of processes at the level rlimits, where their number is not limited."""
    deep = 3000
    monkeypatch.setattr(sandbox.os, "listdir", lambda path: [path.split("/")[2]])
    monkeypatch.setattr(
        sandbox.Path,
        "read_text",
        lambda path, **_: "" if int(path.parts[2]) == deep else f"{int(path.parts[2]) + 1} ",
    )
    assert list(sandbox.descendants(1)) == list(range(1, deep + 1))


@needs_bubblewrap
def test_programs_at_the_same_time_do_not_share_their_number_of_processes() -> None:
    program = (
        "import os, time\nfor _ in range(30):\n    if os.fork() == 0:\n        time.sleep(1.5)\n        os._exit(0)\n"
        "print(1, flush=True)\ntime.sleep(1)"
    )
    with ThreadPoolExecutor(3) as threads:
        outcomes = list(threads.map(attack, [program] * 3))
    assert [(one.exit_code, one.stdout) for one in outcomes] == [(0, b"1\n")] * 3


@needs_bubblewrap
def test_the_files_and_memory_of_other_processes_are_closed() -> None:
    outcome = attack(
        "import os\nfor path in ('/proc/1/root', '/proc/1/cwd', '/proc/1/fd', '/proc/1/environ', '/proc/1/mem'):\n"
        "    try: print(os.listdir(path) if os.path.isdir(path) else open(path, 'rb').read(1))\n"
        "    except OSError: pass\nprint(sorted(os.listdir('/proc/self/root')))\n"
        "os.symlink('/proc/self/root/etc/passwd', '/tmp/link'); print(os.path.exists('/tmp/link'))"
    )
    root, link = outcome.stdout.decode().splitlines()
    assert "etc" not in root
    assert link == "False"


@needs_bubblewrap
def test_a_sandbox_that_cannot_start_is_an_error_and_no_outcome(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    false = tmp_path / "bwrap"
    false.write_text("#!/bin/sh\necho no namespaces >&2\nexit 1\n")
    false.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OSError, match="no namespaces"):
        attack("print(1)")


@pytest.mark.parametrize("number", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_a_program_without_namespaces_that_kills_its_parent_fails(number: str) -> None:
    program = f"import os, signal\nprint(1, flush=True)\nos.kill(os.getppid(), signal.{number})\nwhile True: pass"
    outcome = run(program, b"", SandboxLimits(wall_s=20.0, cpu_s=1), level="rlimits")
    assert outcome.end == "exit"
    assert outcome.exit_code != 0
