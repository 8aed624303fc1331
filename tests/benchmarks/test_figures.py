"""The work of both sides of a comparison, our half on small inputs, and the figures. Nothing is timed."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

from areal_bus.errors import ConfigError
from benchmarks.generate.requests import LONGEST, N_GIVEN, N_NEW, SHAPE, WAVES, requests
from benchmarks.harness.interleave import Rounds
from benchmarks.loss import bench as loss
from benchmarks.loss import ours as our_loss
from benchmarks.observability import bench as observability
from benchmarks.pack import bench as pack
from benchmarks.pack import ours as our_pack
from benchmarks.push import bench as push
from benchmarks.push.bench import ALONE, MEMCPY, WITH, WITHOUT, PushObservations
from benchmarks.reward import bench as reward
from benchmarks.reward import ours as our_reward
from benchmarks.smollm2 import bench as smollm2
from benchmarks.smollm2 import inputs as work
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


def test_both_sides_of_generate_are_asked_the_same_and_each_round_something_else() -> None:
    assert requests(8, mixed=True, seed=1) == requests(8, mixed=True, seed=1)
    assert requests(8, mixed=True, seed=1) != requests(8, mixed=True, seed=2)
    equal, mixed = (requests(128, mixed=is_mixed, seed=1) for is_mixed in (False, True))
    assert len(equal) == len(mixed) == 128 * WAVES
    assert {(len(one.ids), one.n_new) for one in equal} == {(N_GIVEN, N_NEW)}
    assert N_NEW * 0.85 < mean(one.n_new for one in mixed) < N_NEW * 1.15
    assert max(one.n_new for one in mixed) <= LONGEST
    assert max(max(one.ids) for one in mixed) < SHAPE["vocab_size"]


def test_lengths_of_smollm2_have_their_mean_and_every_round_its_own() -> None:
    many = [one.n_new for seed in range(40) for one in work.requests(seed, work.BATCH)]
    assert work.N_NEW * 0.9 < mean(many) < work.N_NEW * 1.1
    assert max(many) <= work.LONGEST
    assert work.requests(1, 5) == work.requests(1, 5) != work.requests(2, 5)
    assert {len(one.ids) for one in work.requests(1, 9)} == {work.N_GIVEN}


def test_no_group_of_smollm2_is_without_advantage() -> None:
    gains = work.advantages(work.batch(0))
    assert len(gains) == work.GROUPS * work.SAMPLES
    assert sum(gains) == pytest.approx(0, abs=1e-9)
    assert all(gain != 0 for gain in gains)


@pytest.mark.parametrize(("name", "why"), [("norm", "the same update: norm"), ("tokens", "as many tokens")])
def test_sides_that_do_other_work_are_not_compared(name: str, why: str) -> None:
    same = {"tokens": 100.0, "loss": 2.0, "norm": 1.0}
    smollm2.check("update", same, same | {"norm": 1.0005})
    with pytest.raises(ConfigError, match=why):
        smollm2.check("update", same, same | {name: same[name] * 1.01})


def test_shares_of_a_push_are_of_a_step_without_a_push() -> None:
    longer = (1.03, 1.01, 1.02, 1.025, 1.4, 1.03, 0.5, 1.02, 1.04)
    steps = Rounds(tuple({WITH: 4.0 * more, WITHOUT: 4.0} for more in longer), 1, 1e-3, 1.0)
    apart = Rounds(({ALONE: 0.5, MEMCPY: 0.05},), 0, 1e-3, 1.0)
    seen = PushObservations()
    step = {"seconds": 4.0, "cpu_s": 4.0, "push_s": 0.0}
    decoding = {"tokens_per_s": 100.0, "step_s": 0.25, "swap_s": 0.0, "after_s": 0.0}
    for i, more in enumerate(longer):
        without = 4.0 if i % 3 else 2.0
        seen.note(WITHOUT, step | {"cpu_s": without}, decoding)
        swap = decoding | {"swap_s": 0.002, "after_s": 0.5}
        seen.note(WITH, step | {"seconds": 4.1, "cpu_s": without * (2 * more - 1), "push_s": 1.0}, swap)
    seen.note(ALONE, {"cpu_s": 0.1, "snapshot_s": 0.06, "bytes": 269e6}, {"swap_s": 0.002})
    found = push.figures(steps, apart, seen)
    assert found["step_increase_share"] == pytest.approx(0.025)
    assert (found["step_increase_share_sure_low"], found["step_increase_share_sure_high"]) == (0.01, 0.04)
    assert found["step_increase_cpu_share"] == pytest.approx(0.05)  # of each round's two steps
    assert (found["step_increase_cpu_share_sure_low"], found["step_increase_cpu_share_sure_high"]) == (0.02, 0.08)
    assert (found["rounds"], found["refused"]) == (9, 1)
    assert found["push_cpu_share"] == pytest.approx(0.025)
    assert (found["stall_ms"], found["stall_share"]) == (2.0, 0.0005)
    assert found["recompute_ms"] == pytest.approx(250)
    assert found["share_of_memcpy"] == pytest.approx(0.1)
    assert found["bytes_per_s"] == 538_000_000
    assert found["overlaps"] is True
