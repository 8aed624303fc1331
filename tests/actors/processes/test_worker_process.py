"""Processes that carry the mark of a worker are killed with it. Pools and callers have tests of their own."""

import os
import signal
import subprocess
import uuid
from collections.abc import Iterator

import pytest

from actors.processes import worker_process
from actors.processes.worker_process import MARK, kill_marked
from tests.support.polling import wait_until


@pytest.fixture
def mark() -> Iterator[str]:
    mark = uuid.uuid4().hex
    yield mark
    kill_marked(mark)


def started(environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "1000"], start_new_session=True, env=environment)


def test_kill_marked_kills_processes_of_other_sessions_and_none_without_the_mark(mark: str) -> None:
    marked, other = started(os.environ | {MARK: mark}), started(os.environ | {MARK: "another"})
    kill_marked(mark)
    assert marked.wait(60) == -signal.SIGKILL
    assert other.poll() is None
    other.kill()
    other.wait()


@pytest.mark.parametrize("hidden", ["environ", "environ cmdline"])
def test_kill_marked_waits_for_a_process_in_execve(mark: str, hidden: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Popen returns a few milliseconds before the kernel has given the new program its environment."""
    process = started(os.environ | {MARK: mark})
    n_hidden = dict.fromkeys(hidden.split(), 3 if "cmdline" in hidden else 1)
    read = worker_process.read_proc

    def too_early(pid: int, name: str) -> bytes:
        if pid == process.pid and n_hidden.get(name):
            n_hidden[name] -= 1
            return b""
        return read(pid, name)

    monkeypatch.setattr(worker_process, "read_proc", too_early)
    kill_marked(mark)
    assert process.wait(60) == -signal.SIGKILL


def test_kill_marked_does_not_wait_for_processes_without_an_environment() -> None:
    bare, ended = started({}), subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # a zombie
    wait_until(lambda: worker_process.read_proc(bare.pid, "cmdline"), "it has a command line")
    assert not worker_process.is_in_execve(bare.pid)
    assert not worker_process.is_in_execve(ended.pid)
    assert not worker_process.is_in_execve(2)  # of the kernel, or of another user, or none
    ended.wait()
    bare.kill()
    bare.wait()
