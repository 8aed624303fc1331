"""Parts of the whole-job benches: drawn lengths, paused jobs, halves alone. Nothing is timed."""

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from actors.workflows.protocol import Turn
from areal_bus.config import loader as settings
from benchmarks.harness.interleave import Rounds
from benchmarks.harness.protocol import Figures
from benchmarks.jobs import throughput_bound
from benchmarks.jobs import workload as drawn
from benchmarks.jobs.lengths_reward import N_PROMPT, DrawnLengths, rows, score
from benchmarks.jobs.paused_jobs import Lane
from benchmarks.jobs.real_job import KilledJob
from tests.support.polling import wait_until

SMALL = drawn.Workload((32, 1, 2), median=20.0, sigma=0.7, longest=40, batch_size=2, n_samples=3, n_slots=4)


class Tokenizer:
    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


class Asked:
    """What a workflow asked for."""

    tokenizer = Tokenizer()

    def __init__(self) -> None:
        self.lengths: list[int | None] = []

    async def __call__(self, ids: Sequence[int], *, max_new_tokens: int | None = None) -> Turn:
        self.lengths.append(max_new_tokens)
        return Turn([1], "x", "length")


def test_each_sample_of_a_group_has_the_length_of_its_row_on_any_generator(tmp_path: Path) -> None:
    config = written(tmp_path)
    row = {"question": "abc", "lengths": [5, 9, 7]}
    for _ in range(2):
        workflow, asked = DrawnLengths(config), Asked()
        for _ in range(3):
            asyncio.run(workflow.episode(row, asked))
        assert asked.lengths == [5, 9, 7]


@pytest.mark.parametrize("n_flat", [0, 1, 2, 3, 4])
def test_of_four_groups_that_follow_one_another_so_many_have_no_signal(n_flat: int) -> None:
    found = list(rows(50, 2, median=60.0, sigma=1.0, longest=200, n_flat=n_flat))
    assert all(sum(row["flat"] for row in found[i : i + 4]) == n_flat for i in range(47))
    assert [row["lengths"] for row in found] == [
        row["lengths"] for row in rows(50, 2, median=60.0, sigma=1.0, longest=200)
    ]
    assert {score("", text, row) for text in ("ab", "ba") for row in found if row["flat"]} <= {0.0}


def written(folder: Path) -> Any:
    """The small workload's settings, without a model."""
    (folder / "model").mkdir()
    path = folder / "settings.toml"
    values = {"model": folder / "model", "rows": folder / "rows.jsonl", "batch_size": 2, "n_prompt": N_PROMPT}
    more = {"n_slots": 4, "n_samples": 3, "longest": 40, "max_tokens_per_mb": 512}
    path.write_text(drawn.SETTINGS.format(**values, **more))
    return settings.load(path)


class Standing(Lane):
    """A job without processes, whose head's journal the test writes."""

    def __init__(self, run: Path) -> None:
        super().__init__(KilledJob(run, config="none.toml", changes=(), ranks=1, quiet=True))
        (run / "journal").mkdir(parents=True)

    def write(self, *lines: dict[str, Any]) -> None:
        with (self._job.run / "journal" / "head-0.0.jsonl").open("a") as file:
            file.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)


def update(
    version: int, t: float, *, n: int = 100, lag: float = 1.0, masked: int = 0, skipped: int = 0
) -> list[dict[str, Any]]:
    figures = {"n_tokens_trained": n, "n_tokens_masked": masked, "n_tokens_skipped": skipped}
    figures |= {"lag_mean": lag} if n else {}  # of nothing there is no mean
    return [{"event": "update", "version": version, "t": t, **figures}, {"event": "publish", "version": version}]


def test_a_job_clock_stands_while_the_job_does(tmp_path: Path) -> None:
    lane = Standing(tmp_path / "run")
    now = time.monotonic()
    lane.write({"event": "admit"}, *update(1, now - 5.0), *update(2, now - 3.0))
    lane._run_until(2)  # which stops it
    wait_until(lambda: time.monotonic() > now + 0.3)
    lane.write(*update(3, now - 0.5))  # before it was stopped, read later
    lane.write(*update(4, time.monotonic() + 1.0))
    seconds, lines = lane.lap(2)
    stood = time.monotonic() - now
    assert [line["version"] for line in lines] == [3, 4]
    assert seconds == pytest.approx(4.0, abs=0.25 + stood - 0.3)
    assert lane.since(2)[1][0]["clock_s"] == pytest.approx(now - 0.5)


def test_a_setting_reports_seconds_per_trained_token_and_staleness(tmp_path: Path) -> None:
    lane = Standing(tmp_path / "run")
    lane.write(*update(1, 1.0), *update(2, 3.0, n=100, lag=1.0, masked=50), *update(3, 5.0, n=300, lag=2.0))
    lane._run_until(1)
    assert lane.since(1)[0] / drawn.n_trained(lane.since(1)[1]) == pytest.approx(4.0 / 400)
    of_two = drawn.of_updates("eta2", lane.since(1)[1])
    assert of_two == {"eta2_lag_mean": 1.75, "eta2_masked_share": round(50 / 450, 4), "eta2_updates": 2}
    lane.write(*update(4, 6.0, n=0, skipped=100), *update(5, 8.0, lag=0.0, masked=100, skipped=200))
    lane._run_until(5)
    found = lane.since(3)
    assert found[0] / drawn.n_young(found[1]) == pytest.approx(3.0 / 400)
    assert drawn.of_updates("x", found[1]) == {"x_lag_mean": 0.0, "x_masked_share": 0.2, "x_updates": 2}
    assert drawn.of_updates("x", found[1][:1]) == {"x_lag_mean": 0.0, "x_masked_share": 0.0, "x_updates": 1}


def measured(*costs: dict[str, float]) -> Rounds:
    return Rounds(costs, 0, 1e-3, 1.0)


def test_the_bound_is_the_slower_half_of_the_same_round_and_the_lag_that_of_the_smallest_eta_that_reaches_it() -> None:
    three = (
        {"generation": 1.0, "training": 0.9, "eta1": 1.25, "eta2": 1.0, "eta4": 1.0},
        {"generation": 1.0, "training": 2.0, "eta1": 2.5, "eta2": 2.0, "eta4": 2.0},
        {"generation": 1.0, "training": 0.5, "eta1": 2.0, "eta2": 1.25, "eta4": 1.0},
    )
    rounds = measured(*three, *three)
    figures: Figures = {f"eta{eta}_lag_mean": float(eta) for eta in throughput_bound.ETAS}
    figures |= (
        throughput_bound.share(rounds, "eta1")
        | throughput_bound.share(rounds, "eta2")
        | throughput_bound.share(rounds, "eta4")
    )
    assert (figures["share_eta1"], figures["share_eta2"], figures["share_eta2_low"]) == (0.8, 1.0, 0.8)
    assert (figures["share_eta2_sure_low"], figures["share_eta2_sure_high"]) == (0.8, 1.0), "six rounds: the extremes"
    assert throughput_bound.smallest(figures) == {"smallest_eta": 2, "mean_lag": 2.0}
    none: Figures = {f"share_eta{eta}": 0.9 for eta in throughput_bound.ETAS}
    assert throughput_bound.smallest(none) == {"smallest_eta": None, "mean_lag": None}
