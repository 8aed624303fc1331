"""Interleaved rounds, their control, and the worker processes that measure."""

import itertools
import sys
from collections.abc import Callable
from math import comb
from pathlib import Path
from types import SimpleNamespace

import pytest

from areal_bus.errors import ConfigError
from benchmarks import __main__ as bench
from benchmarks.harness import pace, worker_main, worker_process
from benchmarks.harness.interleave import Ratio, interleave, sure
from benchmarks.harness.worker_process import Side

MEASURES = """
from benchmarks.harness.worker_main import seconds, serve

def fail():
    raise ValueError("no such thing")

def shout(text):
    print(text)
    return text.upper()

serve({"fail": fail, "shout": shout, "leave": lambda: exit("gone"), "time": lambda: seconds(lambda: sum(range(1000)))},
      name="toy")
"""


def replay(values: list[float]) -> Callable[[], float]:
    return itertools.cycle(values).__next__


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Side:
    """A side that is a script of this test's."""
    (tmp_path / "toy.py").write_text(MEASURES)
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "{tmp_path}/toy.py"\n')
    (tmp_path / "python").chmod(0o755)
    return Side(tmp_path / "python", "toy")


def test_a_ratio_is_the_median_over_rounds_with_its_extremes() -> None:
    found = interleave({"ours": replay([1.0, 2.0, 4.0]), "peer": replay([3.0, 4.0, 20.0])}, lambda: 1.0, rounds=3)
    assert found.ratio("peer") == Ratio(3.0, 2.0, 5.0)
    assert found.cost("ours") == 2.0
    assert found.against("peer") == {"ratio": 3.0, "ratio_low": 2.0, "ratio_high": 5.0}
    assert found.figures()["rounds"] == 3


@pytest.mark.parametrize("n", [6, 9, 15, 21, 40, 61])
def test_the_median_is_missed_in_a_fortieth_of_samples_each_way(n: int) -> None:
    """Exactly: how many of n lie below the median of all is binomial."""
    low, high = sure([float(i) for i in range(n)])
    missed = [sum(comb(n, j) for j in range(int(low) + more)) / 2**n for more in (1, 2)]  # by this value, and the next
    assert missed[0] <= 0.025 < missed[1]
    assert low + high == n - 1


def test_sides_take_turns_and_the_control_is_before_between_and_after() -> None:
    seen: list[str] = []

    def noting(name: str) -> Callable[[], float]:
        return lambda: seen.append(name) or 1.0

    interleave({"a": noting("a"), "ours": noting("b")}, noting("."), rounds=2)
    assert "".join(seen) == ".a.b..b.a."


def test_a_round_whose_control_swings_does_not_count() -> None:
    control = replay([1.0, 1.0, 1.6, 1.0, 1.4, 1.0])
    found = interleave({"ours": replay([1.0]), "peer": replay([9.0, 2.0])}, control, rounds=2)
    assert (found.refused, len(found.costs), found.ratio("peer").median) == (2, 2, 2.0)
    assert found.unsteady == 1.4


def test_a_machine_that_never_holds_still_gives_no_figure() -> None:
    with pytest.raises(ConfigError, match="0 of 25 were: run the bench on a quieter machine"):
        interleave({"ours": lambda: 1.0}, replay([1.0, 2.0]))


def test_a_worker_answers_and_its_printed_output_is_not_an_answer(toy: Side) -> None:
    with toy:
        assert toy.about == {"name": "toy"}
        assert toy.ask("shout", text="hello") == "HELLO"
        assert 0 < toy.ask("time") < 1


def test_a_side_that_fails_or_ends_is_an_error_with_its_words(toy: Side) -> None:
    with toy:
        with pytest.raises(ConfigError, match="ValueError: no such thing"):
            toy.ask("fail")
        with pytest.raises(ConfigError, match=r"it ended with 1 \(gone\)"):
            toy.ask("leave")


@pytest.mark.slow
def test_a_comparison_without_the_peers_ends_with_code_2_and_the_command_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker_process, "PEERS", tmp_path / "python")
    monkeypatch.setattr(sys, "argv", ["bench", "loss"])
    with pytest.raises(SystemExit) as ended:
        bench.terminal.end(bench.main)
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert "run `make bench-peers`" in said.err
    assert said.out == ""


def test_the_cost_of_a_call_is_no_moment_in_which_the_clock_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host takes the core now and then, and the CPU clock makes up for it: some runs cost nothing."""
    wall, cpu, calls = 0.0, 0.0, itertools.count()

    def work() -> None:
        nonlocal wall, cpu
        wall += 1e-4
        cpu += 0.0 if next(calls) % 160 < 32 else 1e-4

    monkeypatch.setattr(worker_main, "time", SimpleNamespace(monotonic=lambda: wall, process_time=lambda: cpu))
    assert worker_main.seconds(work) == pytest.approx(1e-4)


def test_quick_makes_three_rounds_and_two_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    pace.begin(quick=True)  # conftest.py ends it
    sides = {"ours": lambda: 1.0, "peer": lambda: 2.0}
    assert len(interleave(sides, lambda: 1.0, rounds=61).costs) == 3
    assert "round 3 of 3" in capsys.readouterr().err
    assert len(interleave(sides, lambda: 1.0, rounds=61, quick=7).costs) == 7
    monkeypatch.setattr(pace, "is_late", lambda: True)
    assert len(interleave(sides, lambda: 1.0, rounds=61).costs) == 2
    assert len(interleave(sides, lambda: 1.0, rounds=61, quick=7).costs) == 7  # an interval needs them
    assert pace.of("full", "quick") == "quick"
