"""The metrics of an evaluation against what they are defined as, counted by brute force."""

import math
import statistics
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_bus.core.evaluation import evaluation_metrics as metrics

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
