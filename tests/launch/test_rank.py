"""A rank that cannot start ends all ranks at once, with one sentence, whatever is raised."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from areal_bus.config.loader import load
from launch.run import rank as of_rank
from launch.run.runs import PidFile
from tests.launch.test_launch import ROOT, file

__all__ = ["file"]  # a fixture

PROGRAM = """
import errno, os, sys
from pathlib import Path
from areal_bus.config.loader import load
from areal_bus.errors import ConfigError
from launch.run import rank as ranks

KINDS = {
    "OSError": OSError(errno.EMFILE, "Too many open files"), "RuntimeError": RuntimeError("two\\nlines"),
    "ValueError": ValueError(), "ConfigError": ConfigError("the hosts must agree"),
}
where, file, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
for number, (name, error) in enumerate(KINDS.items()):
    settings = [f"launch.rendezvous='ipc://{out}/{number}.sock'", "launch.bootstrap=env", f"run.folder='{out}/{name}'"]
    config, children = load(file, settings, {}), []
    for rank in range(3):
        child = os.fork()
        if not child:
            os.environ.update(RANK=str(rank), WORLD_SIZE="3")
            os.dup2(os.open(out / f"{name}.{rank}", os.O_WRONLY | os.O_CREAT, 0o600), 2)
            def fail(*_, error=error, **__):
                raise error
            if where != "local_facts" or rank == 2:
                setattr(ranks, where, fail)
            ranks.start_rank(config, file)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(name, *codes, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["local_facts", "plan_ranks", "new_pair"])
def test_whatever_a_rank_raises_before_the_actors_start_all_ranks_end_at_once_with_a_sentence(
    where: str, file: Path, tmp_path: Path
) -> None:
    """At one rank, which the others wait for; at all ranks; and before any rank can be reached."""
    out = tmp_path / "out"
    out.mkdir()
    began = time.monotonic()
    command = [sys.executable, "-c", PROGRAM, where, str(file), str(out)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert ended.returncode == 0, ended.stderr
    codes = {name: numbers for name, *numbers in map(str.split, ended.stdout.splitlines())}
    assert len(codes) == 4
    assert time.monotonic() - began < 4 * 30, "launch.timeout_s is 300"
    for name, numbers in codes.items():
        assert numbers == ["2" if name == "ConfigError" else "1"] * 3, name
        for rank in range(3):
            said = (out / f"{name}.{rank}").read_text()
            assert "Traceback" not in said
            assert said.count("\n") == (1 if rank == 0 else said.count("error: ")), said
        if where == "local_facts":
            assert "error: rank 2: " in (out / f"{name}.0").read_text()


def test_what_a_rank_says_of_its_error_fits_into_the_exchange(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("x" * 10_000_000)

    monkeypatch.setattr(of_rank, "local_facts", fail)
    config = load(file, [f"run.folder='{tmp_path}/runs'"], {})
    report = json.loads(of_rank.own_report(config, 3, of_rank.new_pair()))
    assert report["error"].startswith("rank 3: unexpected error")
    assert len(report["error"]) < 20_000
    assert report["code"] == 1


def test_the_pid_of_an_earlier_start_goes_also_when_the_disk_takes_no_new_one(tmp_path: Path) -> None:
    """A file that stayed behind on a disk that was read-only for a while would name another process."""
    (tmp_path / "pid").write_text("1\n")

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("launch.run.runs.write_atomic", refuse)
        with pytest.raises(OSError, match="No space left"):
            PidFile(tmp_path)
    assert not (tmp_path / "pid").exists()
    pid = PidFile(tmp_path)
    assert (tmp_path / "pid").read_text() == f"{os.getpid()}\n"
    of_rank.remove_all([pid])
    of_rank.remove_all([pid])
    assert list(tmp_path.iterdir()) == []
