"""Which evaluation is due, and when a metric has stopped improving."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_bus.core.evaluation import evaluation_plan as plan
from areal_bus.core.evaluation.evaluation_plan import EvaluationSet

SETS = (EvaluationSet("", 2, ("{}",)), EvaluationSet("aime", 4, ("{}",)))


def done(*names: str) -> dict[str, dict[str, str | int | float | None]]:
    return {name: {"version": int(name.partition(":")[0].removeprefix("step-")), "k": 2} for name in names}


@pytest.mark.parametrize(
    ("version", "known", "expected"),
    [
        (3, (), None),
        (4, (), "step-4"),
        (5, (), "step-4"),
        (5, ("step-4",), "step-4:aime"),
        (7, ("step-4", "step-4:aime"), None),
        (8, ("step-4",), "step-8:aime"),  # it has waited longest
        (9, ("step-4", "step-8:aime"), "step-8"),
    ],
)
def test_the_set_that_waits_longest_is_due_at_the_last_multiple(
    version: int, known: tuple[str, ...], expected: str | None
) -> None:
    found = plan.due(version, every=4, sets=SETS, figures=done(*known))
    assert (None if found is None else plan.name_of(*found)) == expected
    assert plan.due(version, every=0, sets=SETS, figures={}) is None


@given(st.lists(st.sampled_from([0.1, 0.2, 0.3]), max_size=8), st.integers(1, 4))
def test_patience_counts_evaluations_since_the_best(values: list[float], patience: int) -> None:
    numbered = list(enumerate(values))
    found = plan.best(numbered)
    since = 0 if found is None else len(values) - 1 - found[0]
    assert plan.has_stopped_improving(numbered, patience=patience) == (since >= patience)
    assert not plan.has_stopped_improving(numbered, patience=0)
    assert found is None or values.index(max(values)) == found[0]


def test_a_set_has_the_history_of_its_own_evaluations_in_training() -> None:
    figures: dict[str, dict[str, str | int | float | None]] = {
        "before": {"version": 0, "reward": 9.0},
        "step-8": {"version": 9, "reward": 2.0},
        "step-4": {"version": 4, "reward": 1.0},
        "step-12": {"version": 12, "reward": None},
        "step-4:aime": {"version": 5, "reward": 3.0},
    }
    assert plan.history("", "reward", figures) == [(4, 1.0), (9, 2.0)]
    assert plan.history("aime", "reward", figures) == [(5, 3.0)]


def test_the_best_counts_evaluations_before_and_after_training() -> None:
    figures: dict[str, dict[str, str | int | float | None]] = {
        "before": {"version": 0, "reward": 0.2},
        "step-4": {"version": 4, "reward": 0.85},
        "step-8": {"version": 8, "reward": 0.8},
        "after": {"version": 8, "reward": 0.9},
        "after:aime": {"version": 8, "reward": 1.0},
    }
    found = plan.history("", "reward", figures, with_ends=True)
    assert found == [(0, 0.2), (4, 0.85), (8, 0.9)]
    assert plan.best(found) == (8, 0.9)
    assert plan.history("", "reward", figures) == [(4, 0.85), (8, 0.8)]  # patience counts these
