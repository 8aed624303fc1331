"""The bench `gpu`: its bounds, budgets and resumption, and its parts at tiny sizes on a CPU."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.gpu import bench, parts
from benchmarks.gpu.parts import Size
from benchmarks.gpu.shapes import SHAPES, Card, card_of, config_json, decode_bound, training_flops
from benchmarks.harness import pace
from launch.memory.shape import read_shape


def test_bounds_are_those_of_the_formulas() -> None:
    shape = SHAPES["1.5b"]
    assert shape.n_parameters == pytest.approx(1.543e9, rel=0.001)
    attention = 6 * 28 * 1536 * 1000
    assert training_flops(shape, 1000) == pytest.approx(6 * 1.543e9 + attention, rel=0.001)
    card = Card("one", 1.0, 1e12, "measured")
    weights, kept = 2 * shape.n_parameters, 2 * 100 * 2 * 28 * 2 * 128
    assert decode_bound(shape, card, 1, 100, 2) == pytest.approx(1e12 / (weights + kept))
    assert decode_bound(shape, card, 64, 100, 2) == pytest.approx(64e12 / (weights + 64 * kept))


def test_a_card_of_the_table_has_its_data_sheet_another_what_was_measured() -> None:
    assert card_of("NVIDIA H200", (1.0, 2.0)) == Card("NVIDIA H200", 989e12, 4.8e12, "data sheet")
    assert card_of("CPU core", (1.0, 2.0)) == Card("CPU core", 1.0, 2.0, "measured")


@pytest.mark.parametrize("name", list(SHAPES))
def test_the_model_of_a_shape_has_it(name: str) -> None:
    found, shape = read_shape(config_json(SHAPES[name], 128)), SHAPES[name]
    assert found is not None
    assert (found.n_parameters, found.kv_per_token) == (shape.n_parameters, shape.kv_per_token)


PARTS_PROGRAM = """#!/bin/sh
echo '{"pause_ms": 1.5}'
case "$3" in
    swap) ;;
    decoder) exec sleep 60 ;;
esac
"""


@pytest.mark.slow
def test_a_part_ends_whole_or_by_its_budget_and_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text(PARTS_PROGRAM)
    program.chmod(0o755)
    monkeypatch.setattr(bench.sys, "executable", str(program))
    for name, budget_s, end in (("swap", 60.0, "whole"), ("decoder", 3.0, "time")):
        found = bench.run_part(name, "cpu", budget_s, is_quick=True)
        assert (found["end"], found["rows"]) == (end, [{"pause_ms": 1.5}])


def test_another_start_measures_only_the_parts_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "count_gpus", lambda: (0, ""))
    asked: list[str] = []

    def run_part(name: str, device: str, budget_s: float, *, is_quick: bool) -> dict[str, object]:
        asked.append(name)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return {"seconds": 1.0, "end": "time" if name == "train" else "whole", "rows": []}

    monkeypatch.setattr(bench, "run_part", run_part)
    pace.begin(quick=True)
    with pytest.raises(KeyboardInterrupt):
        bench.GpuBench().measure(quiet=True)
    assert asked == list(parts.PARTS)[:3]
    kept = json.loads(Path("runs/benchmarks/gpu-quick-cpu.json").read_text(encoding="utf-8"))
    assert list(kept) == ["train", "generate"]
    asked += ["-"]
    figures = bench.GpuBench().measure(quiet=True)
    assert asked[4:] == [name for name in parts.PARTS if name != "generate"]
    assert figures["generate"] == kept["generate"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows", "figure"),
    [
        ("memory", 2, "plan_gib"),
        ("train", 2, "mfu"),
        ("generate", 2, "of_bound"),
        ("kernels", 26, "ms"),
        ("swap", 1, "pause_ms"),
    ],
)
def test_a_part_measures_a_tiny_model_on_a_cpu(name: str, rows: int, figure: str) -> None:
    found: Iterator[dict[str, object]] = parts.PARTS[name][0](Size("cpu", is_quick=True))
    figures = list(found)
    assert len(figures) == rows
    assert all(isinstance(one[figure], float) and one[figure] >= 0 for one in figures)


@pytest.mark.slow
def test_engine_and_learner_agree_on_each_token_at_the_same_weights() -> None:
    figures = list(parts.mismatch(Size("cpu", is_quick=True)))
    assert [one["positions"] for one in figures] == ["0-3", "4-7", "8-11", "12-15"]
    assert max(one["max"] for one in figures) < 1e-4
