"""A server's process: it ends with whoever started it, however that ended, and says why it ended by itself."""

import os
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest

from actors.engines.servers.server_process import ServerProcess, installed, interpreter
from actors.engines.servers.watch_parent import processes
from actors.engines.servers.weight_transfer import MEMORY
from areal_bus.errors import ConfigError, EngineLost
from tests.support.polling import is_alive, wait_until

ROOT = Path(__file__).resolve().parents[4]
SERVER = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""
HOLDS = """
import mmap, multiprocessing, os, socket, subprocess, sys, time
memory, path = sys.argv[1:3]
with open(memory, "wb+") as file:
    file.truncate(1 << 20)
    mapped = mmap.mmap(file.fileno(), 1 << 20)
semaphore = multiprocessing.get_context("spawn").Semaphore()
os.link("/dev/shm/sem." + semaphore._semlock.name[1:], sys.argv[3])  # so that the test knows a name of it
bound = socket.socket(socket.AF_UNIX)
bound.bind(path)
child = os.fork()  # which has all that mapped and open, too
if child:
    print(os.getpid(), child, flush=True)
time.sleep(600)
"""
OWNER = """
import sys, time
from pathlib import Path
from actors.engines.servers.server_process import ServerProcess
server = ServerProcess([sys.executable, "-c", *sys.argv[2:]], Path(sys.argv[1]), {})
print(server.pid, flush=True)
sys.stdin.read()
server.close()
"""


def pids(log: Path) -> list[int]:
    """Of the server and its child, once it has said them."""
    wait_until(lambda: log.exists() and log.read_text(encoding="utf-8").count("\n") > 0)
    return [int(word) for word in log.read_text(encoding="utf-8").split()]


def test_a_server_ends_when_its_watcher_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "server.txt"
    line = [sys.executable, "-c", OWNER, str(log), SERVER]
    with subprocess.Popen(line, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        watcher = int(owner.stdout.readline())
        server, child = pids(log)
        os.kill(watcher, signal.SIGKILL)
        wait_until(lambda: not is_alive(server))
        os.kill(child, signal.SIGKILL)  # a server's own processes look after themselves
        owner.kill()


@pytest.mark.parametrize("how", ["close", "owner killed", "server killed"])
def test_shared_memory_and_sockets_of_a_killed_server_are_removed_by_name(tmp_path: Path, how: str) -> None:
    log, other = tmp_path / "server.txt", MEMORY / f"other-{uuid.uuid4().hex}"
    memory, semaphore = (MEMORY / f"{kind}{uuid.uuid4().hex}" for kind in ("psm_", "sem.other-"))
    bound = Path(tempfile.mkdtemp(prefix="bound-")) / "socket"
    other.touch()
    line = [sys.executable, "-c", OWNER, str(log), HOLDS, str(memory), str(bound), str(semaphore)]
    try:
        with subprocess.Popen(line, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
            assert owner.stdout is not None
            watcher = int(owner.stdout.readline())
            server, child = pids(log)
            assert memory.exists()
            assert semaphore.exists()
            assert bound.is_socket()
            if how == "close":
                assert owner.stdin is not None
                owner.stdin.close()  # the owner's loop ends
            else:
                os.kill(owner.pid if how == "owner killed" else server, signal.SIGKILL)
            wait_until(lambda: not any(map(is_alive, (server, child, watcher))))
            owner.kill()
        assert not memory.exists()
        assert not semaphore.exists()
        assert not bound.exists()
        assert other.exists()
    finally:
        other.unlink()
        bound.parent.rmdir()


def test_a_server_is_asked_to_end_before_it_is_killed(tmp_path: Path) -> None:
    code = """
import signal, sys, time
def end(*_):
    print("ends in order", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
time.sleep(600)
"""
    log = tmp_path / "server.txt"
    server = ServerProcess([sys.executable, "-c", code], log, {})
    wait_until(lambda: log.exists() and "ready" in log.read_text())
    server.close()
    assert "ends in order" in log.read_text()


@pytest.mark.slow
def test_a_server_that_is_deaf_to_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import os, signal, time; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep(600)"
    log = tmp_path / "server.txt"
    server = ServerProcess([sys.executable, "-c", code], log, {})
    (pid,) = pids(log)
    server.close()
    assert not is_alive(pid)


@pytest.mark.parametrize(("number", "how"), [(9, "was killed by SIGKILL"), (40, "was killed by signal 40")])
def test_a_killed_server_is_lost_without_the_errors_of_its_start(tmp_path: Path, number: int, how: str) -> None:
    log = tmp_path / "server.txt"
    code = "import time; print('ImportError: no triton, which is harmless', flush=True); time.sleep(600)"
    server = ServerProcess([sys.executable, "-c", code], log, {})
    wait_until(lambda: log.exists() and log.read_text().count("\n") > 0)
    server.is_ready()
    (pid,) = processes(server.pid)
    os.kill(pid, number)
    os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(EngineLost, match=f"the server {how}: it has said nothing since it was ready"):
        server.check()
    server.close()


def test_a_server_that_has_ended_is_lost_with_its_last_error(tmp_path: Path) -> None:
    code = "print('loads'); raise MemoryError('no room for 3 tokens')"
    server = ServerProcess([sys.executable, "-c", code], tmp_path / "server.txt", {})
    os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(EngineLost, match=r"code 1: MemoryError: no room for 3 tokens \(all of it: .*server\.txt\)"):
        server.check()
    server.close()


def test_a_server_sees_its_own_environment_and_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    code = "import os; print(os.environ.get('PYTHONPATH'), os.environ['OMP_NUM_THREADS'], os.environ['MORE'])"
    log = tmp_path / "server.txt"
    server = ServerProcess([sys.executable, "-c", code], log, {"MORE": "yes"})
    wait_until(lambda: log.read_text().split() == ["None", "1", "yes"])
    server.close()


def test_an_interpreter_without_the_server_package_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs no-such-package, which is not there: make its environment"):
        installed(sys.executable, "no-such-package")
    with pytest.raises(ConfigError, match=r"engine\.python must be an interpreter"):
        installed(str(tmp_path / "python"), "sglang")
    assert installed(sys.executable, "pytest") == pytest.__version__
    assert installed(sys.executable, "no-such-package", "pytest") == pytest.__version__


def test_an_interpreter_is_found_from_the_working_directory_then_from_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config" / "bin").mkdir(parents=True)
    (tmp_path / "config" / "bin" / "python").touch()
    assert interpreter("", tmp_path) == sys.executable
    assert interpreter("/opt/python", tmp_path) == "/opt/python"
    assert interpreter("bin/python", tmp_path / "config") == str(tmp_path / "config" / "bin" / "python")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    assert interpreter("bin/python", tmp_path / "config") == str(tmp_path / "bin" / "python")
