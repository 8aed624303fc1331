"""Benches `e2e` and `e2e-core`: the shared setting, how our job is paused and counted, and the figures."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.e2e import bench as e2e
from benchmarks.e2e import job, setting
from benchmarks.e2e.job import Spent
from benchmarks.harness.interleave import Rounds


def test_completions_have_rewards_of_their_own_so_that_no_group_is_without_advantage() -> None:
    texts = {text[i:] + text[:i] for text in setting.questions() for i in (0, 5)}
    assert len({setting.worth(text) for text in texts}) == len(texts)
    early, late = setting.character(1) * 64, setting.character(setting.EOS - 1) * 64
    assert setting.worth(early) > 1 > 1 / 64 > setting.worth(late) > 0


def test_the_time_of_a_job_is_that_of_all_its_processes() -> None:
    inner = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    with subprocess.Popen([sys.executable, "-c", outer], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        found = job.family(process.pid)
        spent = sum(job.cpu_s(pid) for pid in found)
        process.stdin.write(b"\n")
        process.stdin.close()
    assert len(found) == 2
    assert found[0] == process.pid
    assert spent >= 0.25, "0.3 but for ticks: the kernel counts whole ones"
    assert job.cpu_s(process.pid) == 0.0


def test_lines_are_read_as_they_come_whole(tmp_path: Path) -> None:
    path = tmp_path / "learner-0.0.jsonl"
    lines = job.Lines(path)
    lines.look()
    path.write_text('{"event":"start"}\n{"event":"step","version":1}\n{"event":"st')
    lines.look()
    assert [line["version"] for line in lines.of("step")] == [1]
    with path.open("a") as file:
        file.write('ep","version":2}\n')
    lines.look()
    assert [line["version"] for line in lines.of("step")] == [1, 2]


def test_both_clocks_are_of_the_same_rounds_and_the_better_peer_counts() -> None:
    costs = ({"ours": 1.0, "trl-1": 4.0, "trl-2": 3.0}, {"ours": 1.5, "trl-1": 4.5, "trl-2": 4.2})
    wall = Rounds((*costs, {"ours": 2.0, "trl-1": 8.0, "trl-2": 6.5}), 1, 1e-3, 1.1)
    cpu = {"ours": 2.0, "trl-1": 4.0, "trl-2": 7.0}
    taken = {(name, cost): Spent(9.0, 10 * cpu[name], 10, 0.5) for round in wall.costs for name, cost in round.items()}
    core = e2e.by_cpu(wall, taken)
    assert core.costs == (cpu, cpu, cpu)
    assert core.refused == 1
    measured = {"": {"wall": wall, "core": core}, "decoupled": {"wall": wall, "core": core}}
    by_wall, by_core = e2e.figures(measured, "wall"), e2e.figures(measured, "core")
    assert by_wall["peer_threads"] == 2
    assert by_wall["ratio"] == pytest.approx(3.0)
    assert (by_wall["ratio_low"], by_wall["ratio_high"]) == pytest.approx((2.8, 3.25))
    assert by_wall["core_ratio"] == by_core["ratio"] == by_core["ratio_decoupled"] == pytest.approx(2.0)
    assert by_wall["core_peer_threads"] == 1
    assert by_core["wall_ratio"] == by_wall["ratio"] == by_wall["ratio_decoupled"]
    assert by_wall["refused"] == 2
