"""The evaluation that is open: what comes too late for it was right when it was sent."""

import math
import statistics
from dataclasses import replace
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_bus.core import evaluation as metrics
from areal_bus.core import evaluation as plan
from areal_bus.core.evaluation import Evaluation, Evaluations, EvaluationSet
from areal_bus.errors import ImpossibleEvent, LateEvent
from tests.areal_bus.core.test_head import scored

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
    figures |= {"after": {"version": 9, "reward": 8.0}, "after:aime": {"version": 9, "reward": 10.0}}
    found = plan.history("", "reward", figures, with_ends=True)
    assert found == [(0, 9.0), (4, 1.0), (9, 8.0)]  # the best counts these, patience those above
    assert plan.best(found) == (0, 9.0)


ROWS = st.lists(st.lists(st.booleans(), max_size=7), max_size=6)
VOTES = st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=6), min_size=1, max_size=5)


@given(ROWS, st.integers(1, 7))
def test_pass_at_k_is_the_share_of_all_choices_of_k_that_hold_a_right_answer(rows: list[list[bool]], k: int) -> None:
    shares = [statistics.mean(any(chosen) for chosen in combinations(row, k)) for row in rows if len(row) >= k]
    expected = statistics.mean(shares) if shares else None
    assert metrics.pass_at(k, rows) == pytest.approx(expected)


@given(ROWS)
def test_pass_at_1_is_avg_at_k_and_its_error_is_that_of_the_rows_means(rows: list[list[bool]]) -> None:
    means = [statistics.mean(row) for row in rows if row]
    assert metrics.average(rows) == pytest.approx(metrics.pass_at(1, rows))
    error = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None
    assert metrics.standard_error(rows) == pytest.approx(error)


@given(VOTES, st.sampled_from("abc"))
def test_maj_at_k_is_the_expectation_over_ties_of_the_most_frequent_answers(rows: list[list[str]], right: str) -> None:
    def winners(row: list[str]) -> list[str]:
        return [answer for answer in set(row) if all(row.count(answer) >= row.count(other) for other in row)]

    outcomes = [[winner == right for winner in choice] for choice in product(*map(winners, rows))]
    expected = statistics.mean(statistics.mean(outcome) for outcome in outcomes)
    voters = [[(answer, answer == right) for answer in row] for row in rows]
    assert metrics.majority(voters) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{1} no, \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"cut off: \boxed{7} and \boxed{\frac{1}", "7"),
        ("steps 3 4\n#### 1,234\n", "1234"),
        ("<answer> Paris. </answer>", "paris"),
        ("There are 12 eggs, so $1,000.50 in all", "1000.50"),
        ("(1,2)", "2"),
        ("olleh", "olleh"),
        ("", ""),
    ],
)
def test_the_final_answer_is_the_last_box_mark_or_number(text: str, answer: str) -> None:
    assert metrics.final_answer(text) == answer


def test_nothing_judged_has_no_metrics_and_pass_at_0_is_refused() -> None:
    assert metrics.average([[]]) is metrics.standard_error([[True]]) is metrics.majority([[]]) is None
    with pytest.raises(ValueError, match="at least 1; got 0"):
        metrics.pass_at(0, [[True]])


def test_news_of_a_closed_evaluation_are_late_and_of_no_evaluation_impossible() -> None:
    evaluations = Evaluations()
    evaluations.open = Evaluation("before", 0, 1, [])
    assert evaluations.named("before").name == "before"
    assert evaluations.close() is not None  # it has no problems
    with pytest.raises(LateEvent, match="'before' is not open"):
        evaluations.named("before")
    with pytest.raises(ImpossibleEvent, match="'after' is not open") as found:
        evaluations.named("after")
    assert not isinstance(found.value, LateEvent)


def test_completed_accuracy_counts_right_answers_that_a_stop_ended() -> None:
    """113 of 128 are right, and the limit cut each of them: such a policy has not learned to stop."""

    def figures(n_right: int, n_ended: int) -> tuple[float | None, float | None]:
        evaluation = Evaluation("before", 0, 1, ["{}"] * 128)
        for uid in range(128):
            evaluation.lease(uid, "generator-0.0", 0.0)
            finish = "stop" if uid < n_ended else "length"
            verdict = scored(uid, 0)
            evaluation.deliver(replace(verdict, correct=uid < n_right, evaluation="before", finish=finish))
        found = evaluation.figures()
        return found["accuracy"], found["completed_accuracy"]  # type: ignore[return-value]

    assert figures(113, 0) == (113 / 128, 0.0)
    assert figures(113, 100) == (113 / 128, 100 / 128)
    assert figures(10, 128) == (10 / 128, 10 / 128)
