"""Our half of each comparison on small inputs, and the figures computed from both sides. Nothing is timed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from areal_bus.errors import ConfigError
from benchmarks.harness.interleave import Rounds
from benchmarks.harness.protocol import Figures
from benchmarks.loss import bench as loss
from benchmarks.loss import ours as our_loss
from benchmarks.observability import bench as observability
from benchmarks.pack import bench as pack
from benchmarks.pack import ours as our_pack
from benchmarks.reward import bench as reward
from benchmarks.reward import ours as our_reward
from benchmarks.wire import bench as wire
from benchmarks.wire import ours as our_wire
from tests.support.polling import wait_until


def test_our_half_of_pack_makes_partitions() -> None:
    assert our_pack.micro_batches([6, 5, 4, 3], 10)["parts"] == [[0, 2], [1, 3]]
    assert our_pack.shares([5, 3, 2], 2)["parts"] == [[0], [1, 2]]


def test_parts_are_judged_by_their_tokens() -> None:
    assert pack.totals([[0, 2], [1]], [3, 4, 5]) == [8, 4]
    assert pack.spread([8, 4]) == pytest.approx(4 / 6)
    assert pack.excess([pack.CAPACITY, 1, 1]) == 1
    with pytest.raises(ConfigError, match="exactly one part"):
        pack.totals([[0], [0, 1]], [1, 2])


def test_our_half_of_loss_holds_itself_against_float64() -> None:
    assert 0 < our_loss.loss(3000, seed=1)["max_error"] < 1e-6


def test_losses_are_compared_only_where_both_sides_compute_the_same() -> None:
    costs = {"ours": 1.0, "ours_alone": 0.5, "areal": 6.0, "areal_alone": 3.0, "verl": 5.0}
    same = {name: [0.5] for name in costs}
    rounds = Rounds((costs,), refused=0, control=1.0, unsteady=1.0)
    found = loss.figures(rounds, [1e-7, 3e-7], same)
    assert (found["ratio"], found["ratio_alone"], found["ratio_both_alone"]) == (6.0, 3.0, 6.0)
    assert (found["ms"], found["max_error"]) == (1000.0, 3e-7)
    with pytest.raises(ConfigError, match=r"verl's loss differs from ours by 0\.1"):
        loss.figures(rounds, [0.0], same | {"verl": [0.6]})


def test_our_half_of_wire_brings_a_trajectory_back() -> None:
    assert our_wire.roundtrip(3, 100, seed=1)["bytes"] < 8 * 103 + 250


@pytest.mark.slow
def test_a_ring_of_three_processes_takes_every_trajectory_through_the_ledger() -> None:
    runs: list[Figures] = []
    assert wire.ring(runs, n=640) > 0
    assert runs[0]["n"] == 140  # from the warm ones on
    assert runs[0]["batches"] == 10


def test_every_form_of_an_answer_is_right_once_and_wrong_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward, "GSM8K", tmp_path / "absent")
    answers, data = reward.worked_answers(6)
    assert data == "made up"
    for patterns in reward.FORMS.values():
        verdicts = our_reward.judge(*reward.completions(answers, patterns))["verdicts"]
        assert verdicts == [True, False] * 6


def test_agreement_counts_the_verdicts_of_all_forms() -> None:
    rounds = Rounds(({"ours": 1.0, "math_verify": 20.0},), refused=0, control=1.0, unsteady=1.0)
    same = reward.Form(rounds, {"ours": [True, False], "math_verify": [True, False]})
    other = reward.Form(rounds, {"ours": [True, True], "math_verify": [True, False]})
    found = reward.figures({"plain": same, "prose": other})
    assert (found["agreement"], found["ratio"], found["ratio_prose"], found["right"]) == (0.75, 20.0, 20.0, 3)


def test_the_overhead_is_that_of_journal_tracker_and_page_over_a_step_without_them() -> None:
    parts = ({"actors": 1.0, "tracker": 0.5, "watch": 0.0}, {"actors": 21.0, "tracker": 0.6, "watch": 0.05})
    first, last = (observability.Moment(10.0 * i, 4 * i, cpu_s) for i, cpu_s in enumerate(parts))
    found = observability.figures(first, last, 0.05, 40)
    assert found["overhead_share"] == pytest.approx(0.2 / 19.95, abs=1e-5)
    assert (found["journal_cpu_ms"], found["tracker_cpu_ms"], found["watch_cpu_ms"]) == (12.5, 25.0, 12.5)
    assert (found["step_cpu_ms"], found["lines_a_step"], found["seconds_a_step"]) == (4987.5, 10.0, 2.5)


def test_cpu_of_a_session_counts_the_children_of_its_leader() -> None:
    burn = "while True: pass"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {burn!r}]); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as leader:
        try:
            wait_until(lambda: observability.cpu_s({leader.pid}) >= 0.5, "the child burns half a second")
            assert observability.cpu_s({-1}) == 0
        finally:
            os.killpg(leader.pid, signal.SIGKILL)
