"""The cost of tools.audit on a journal of a million lines, and on one twice as long."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from tests.tools.audit.forged_run import GENERATORS, HEAD, LEARNER, REWARD, Forge, Line, both

pytestmark = pytest.mark.soak

ROOT = Path(__file__).parents[3]
MILLION = 1_000_000
CPU_S = 15.0
MEMORY = 500 << 20


class Stream(Forge):
    """A forge whose lines go to disk as they are written, so that it is as long as one likes."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        (folder / "journal").mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        self._files: dict[str, BinaryIO] = {
            name: (folder / "journal" / f"{name}.jsonl").open("wb") for name in self.lines
        }
        self._seq = dict.fromkeys(self.lines, 0)
        self._began: dict[str, float] = {}
        self.n_lines = 0

    def write(self, name: str, event: str, /, **fields: Any) -> Line:
        line = super().write(name, event, **fields)
        self.lines[name].clear()
        self._began.setdefault(name, line["t"])
        if event == "end":
            line["wall_s"] = line["t"] - self._began[name]
            self._put(name, line | {"event": "spans", "s_work": line["wall_s"]})
        self._put(name, line)
        return line

    def is_alive(self, name: str) -> bool:
        return True

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _put(self, name: str, line: Line) -> None:
        role, _, place = name.partition("-")
        who = {"role": role, "rank": int(place.partition(".")[0]), "inc": 0, "seq": self._seq[name]}
        self._files[name].write(json.dumps(line | who, separators=(",", ":")).encode() + b"\n")
        self._seq[name] += 1
        self.n_lines += 1


def forge(folder: Path, n_lines: int) -> int:
    """A correct run of at least this many lines. Returns the number of lines."""
    run = Stream(folder)
    run.assemble()
    waiting = [run.admit(GENERATORS[i % 2]) for i in range(4)]
    while run.n_lines < n_lines:
        batch, waiting = waiting[:2], waiting[2:]
        for uid in batch:
            both(run, uid)
        run.train(*batch)
        waiting += [run.admit(generator) for generator in GENERATORS]
    for uid in waiting:
        run.refund(uid, "end_of_run")
    run.t += 10
    for name in (HEAD, REWARD, LEARNER, *GENERATORS):
        run.write(name, "end", code=0, reason="done")
    run.close()
    return run.n_lines


def audited(folder: Path) -> tuple[dict[str, Any], float, int]:
    """The audit's verdict, its CPU seconds and its peak memory in bytes."""
    words = [sys.executable, "-m", "tools.audit", str(folder), "--json"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return json.loads(said), used.ru_utime + used.ru_stime, used.ru_maxrss << 10


def test_a_million_lines_are_audited_within_15_s_of_cpu_and_500_mib_and_twice_as_many_in_twice_that(
    tmp_path: Path,
) -> None:
    costs = []
    for times in (1, 2):
        folder = tmp_path / str(times)
        n_lines = forge(folder, times * MILLION)
        told, cpu_s, memory = audited(folder)
        print(f"{n_lines} lines: {cpu_s:.1f} s of CPU time, {memory >> 20} MiB")
        assert told["clean"], told["verdicts"]
        assert told["about"]["lines"] == n_lines
        costs.append((cpu_s, memory))
        shutil.rmtree(folder)  # hundreds of MB
    assert costs[0][0] < CPU_S
    assert costs[0][1] < MEMORY
    assert costs[1][0] < 2.5 * costs[0][0]
