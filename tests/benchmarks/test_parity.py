"""Bench `parity`: rows of both sides, verdicts, curves, and the resume of its runs."""

import json
from dataclasses import asdict, replace
from operator import itemgetter
from pathlib import Path

import pytest

from benchmarks.parity import bench, curves, ours
from benchmarks.parity.bench import RunLine
from benchmarks.parity.setting import SUMS, read
from tools.report.facts.seeds import Difference


def line(side: str, seed: int, rewards: list[float], after: float) -> RunLine:
    updates = [{"reward": reward, "s": 2.0 * (i + 1), "length": 2.0} for i, reward in enumerate(rewards)]
    return {"side": side, "seed": seed, "updates": updates, "before": 0.1 if seed == 1 else None, "after": after}


@pytest.mark.parametrize(
    ("low", "high", "says"),
    [
        (-0.05, 0.08, "equal"),
        (-0.05, 0.11, "not decided: the interval is wider than the margin"),
        (0.01, 0.05, "higher"),
        (-0.05, -0.01, "lower"),
        (None, None, "one seed only"),
    ],
)
def test_areas_are_equal_when_the_interval_has_0_and_is_within_the_margin(
    low: float | None, high: float | None, says: str
) -> None:
    assert bench.verdict(Difference(0.02, low, high, 5)) == says


def test_differences_are_paired_by_seed() -> None:
    lines = [line("trl", seed, [0.1 * seed, 0.2 * seed], 0.5) for seed in (1, 2, 3)]
    lines += [line("ours-0", seed, [0.1 * seed + 0.02, 0.2 * seed + 0.02], 0.5 + 0.01 * seed) for seed in (1, 2, 3)]
    lines += [line("ours-1", seed, [0.0, 0.0], 0.5) for seed in (1, 2, 3)]
    found = bench.summary(lines)
    assert found["ours-0 minus trl"]["area"] == [0.02, 0.02, 0.02]
    assert found["ours-0 minus trl"]["verdict"] == "higher"
    assert found["ours-0 minus trl"]["held_out"][0] == 0.02
    assert found["trl"]["area"][0] == pytest.approx(0.3)
    assert found["trl"]["held_out_before"] == 0.1


def test_rows_of_all_seeds_are_the_same_problems_in_other_orders(tmp_path: Path) -> None:
    ours.write_rows(SUMS, tmp_path, range(1, 3))
    first, second = (read(str(tmp_path / f"train-{seed}.jsonl")) for seed in (1, 2))
    held_out = {row["text"] for row in read(str(tmp_path / "held-out.jsonl"))}
    assert first != second
    assert {row["text"] for row in first} == {row["text"] for row in second}
    assert not held_out & {row["text"] for row in first}
    assert len(first) >= SUMS.groups * SUMS.updates, "no row is seen twice"


def test_a_run_that_is_in_the_file_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [line("trl", 1, [0.9], 0.9) | {"setting": asdict(replace(SUMS, lr=1.0))}]
    known = [line(side, seed, [0.1], 0.2) | {"setting": asdict(SUMS)} for seed in (1, 2) for side in bench.SIDES]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(one) + "\n" for one in known + others), encoding="utf-8")
    monkeypatch.setattr(ours, "train", lambda *_, **__: pytest.fail("repeated"))
    found = list(bench.all_runs(SUMS, tmp_path, tmp_path, range(1, 3), quiet=True))
    key = itemgetter("side", "seed")
    assert sorted(found, key=key) == sorted(known, key=key)


def test_the_curve_over_seconds_spans_the_time_that_all_runs_have() -> None:
    slow = line("trl", 1, [0.0, 0.3, 0.6], 0.5)
    for update in slow["updates"]:
        update["s"] *= 2
    points = curves.over_seconds([slow, line("trl", 2, [0.0, 0.3, 0.6], 0.5)])
    assert (points[0][0], points[-1][0]) == (4.0, 6.0)
    assert points[-1][1] == pytest.approx((0.0 + 0.3) / 2), "the slow run has its first update, the other all three"
