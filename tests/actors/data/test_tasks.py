import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.data.tasks import make_problems
from areal_bus.config.data import DataConfig
from areal_bus.errors import ConfigError


def sums(seed: int = 1, **settings: int) -> tuple[list[dict], list[dict]]:
    problems = make_problems(DataConfig(task="sums", **settings), seed=seed)
    return problems.train, problems.held_out


def test_one_digit_sums_are_a_hundred_pairs_of_which_twenty_are_held_out():
    train, held_out = sums()
    assert (len(train), len(held_out)) == (80, 20)
    rows = {(row["a"], row["b"]): row for row in train + held_out}
    assert sorted(rows) == [(a, b) for a in range(10) for b in range(10)]
    assert rows[7, 5] == {"question": "7+5", "answer": "12", "demonstration": "12", "a": 7, "b": 5}


@given(seed=st.integers(0, 10**6), largest=st.integers(1, 15), share=st.floats(0, 0.999))
def test_a_sum_is_never_held_out_in_one_order_and_trained_in_the_other(seed, largest, share):
    n_held_out = int(share * (largest + 1) ** 2)
    train, held_out = sums(seed, largest=largest, held_out=n_held_out)
    trained = {frozenset((row["a"], row["b"])) for row in train}
    assert not trained & {frozenset((row["a"], row["b"])) for row in held_out}
    assert len(held_out) == n_held_out
    assert len(train) + len(held_out) == (largest + 1) ** 2


def test_the_same_seed_gives_the_same_rows_and_another_seed_others():
    for task, settings in (("sums", {}), ("reverse", {"largest": 8})):
        config = DataConfig(task=task, **settings)
        assert make_problems(config, seed=3) == make_problems(config, seed=3)
        assert make_problems(config, seed=3).held_out != make_problems(config, seed=4).held_out


def test_words_to_reverse_never_repeat_and_none_is_in_both_parts():
    problems = make_problems(DataConfig(task="reverse", largest=8, held_out=50), seed=1)
    words = [row["question"] for row in problems.train + problems.held_out]
    assert (len(problems.train), len(problems.held_out)) == (20_000, 50)
    assert len(set(words)) == len(words)
    assert {len(word) for word in words} == {3, 4, 5, 6, 7, 8}
    short = make_problems(DataConfig(task="reverse", largest=3, held_out=10), seed=1)
    assert len(short.train) + len(short.held_out) == 26**3 // 2, "few possible words give fewer rows"
    assert all(row["answer"] == row["demonstration"] == row["question"][::-1] for row in problems.train)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"task": "sums", "largest": 3, "held_out": 16}, "16 pairs up to 3"),
        ({"task": "reverse", "largest": 2}, "data.largest is 2"),
        ({"task": "reverse", "largest": 3, "held_out": 10_000}, "held_out"),
    ],
)
def test_a_task_that_cannot_be_made_is_refused_with_its_figures(settings, part):
    with pytest.raises(ConfigError, match=part):
        make_problems(DataConfig(**settings), seed=1)
