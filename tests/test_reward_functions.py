import json
import random
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest

from actors.rewards import exact, mathematics, reverse, sums
from actors.rewards.plain_numbers import last_number, read_number
from actors.rewards.protocol import Score

GSM8K = Path(__file__).parents[2] / "shared" / "data" / "gsm8k"
MATH500 = Path(__file__).parents[2] / "shared" / "data" / "math500"


@pytest.mark.parametrize(
    ("completion", "reward", "correct"),
    [
        ("7", 1.0, True),
        (" 7\n", 1.0, True),
        ("7.", 0.5, True),
        ("The answer is 7", 0.5, True),
        ("3+4=7", 0.5, True),
        ("7 = 3+4", 0.0, False),
        ("8", 0.0, False),
        ("17", 0.0, False),
        ("-7", 0.0, False),
        ("3 + 4 = -7", 0.0, False),
        ("7.5", 0.0, False),
        ("7.0", 0.5, True),
        ("07", 0.5, True),
        ("seven", 0.0, False),
        ("", 0.0, False),
    ],
)
def test_a_sum_earns_half_for_the_last_number_and_half_for_nothing_else(completion, reward, correct):
    assert sums.score("3+4", completion, {"answer": "7"}) == Score(reward, correct)


def test_a_sum_with_an_answer_that_is_no_number_is_an_error_not_a_zero():
    with pytest.raises(ValueError, match="seven"):
        sums.score("3+4", "7", {"answer": "seven"})


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("cba", 1.0),
        (" cba ", 1.0),
        ("cbx", 0.5 * 2 / 3),
        ("cb", 0.5 * 2 / 3),
        ("cbacba", 0.25),
        ("xyz", 0.0),
        ("", 0.0),
    ],
)
def test_a_reversed_word_earns_its_share_of_places_and_half_for_the_whole(completion, reward):
    assert reverse.score("abc", completion, {"answer": "cba"}) == Score(pytest.approx(reward), reward == 1.0)


def test_exact_pays_for_the_answer_and_nothing_else():
    assert exact.score("", " Paris\n", {"answer": "Paris"}) == Score(1.0, True)
    assert exact.score("", "paris", {"answer": "Paris"}) == Score(0.0, False)


@pytest.mark.parametrize(
    ("text", "number"),
    [("1,234", "1234"), ("-3.50", "-3.5"), ("1,23", None), ("7 ", "7"), ("7 apples", None), ("٧", None), ("1e5", None)],
)
def test_only_a_plain_number_is_read_as_one(text, number):
    assert read_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("from 10-7", 7),
        ("it is (-7)", -7),
        ("1,000 of 2,500.", 2500),
        ("1,2345", 2345),
        ("v 1.2.3", "1.2"),
        ("no", None),
    ],
)
def test_the_last_number_of_a_text_has_a_sign_only_where_it_is_no_subtraction(text, number):
    assert last_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("completion", "gold", "right"),
    [
        ("72", "48+24 = <<48+24=72>>72\n#### 72", True),
        ("So she sold $1,072.00 in total.", "#### 1,072", True),
        ("She sold 72 clips.", "#### 73", False),
        ("The answer is 5.\n#### 72", "72", True),
        (r"Hence \boxed{72}.", "72", True),
        (r"$\boxed{\frac{1}{2}}$", "0.5", True),
        (r"\boxed{0.333}", r"\frac{1}{3}", False),
        (r"so $x = \boxed{2\sqrt{2}}$", r"We get \boxed{\sqrt{8}}.", True),
        (r"the set $\{1, 2\}$", r"\{2, 1\}", True),
        (r"\boxed{(0, 3)}", r"(3, 0)", False),
        (r"Thus \boxed{x^2 + 2x + 1}", "(x+1)^2", True),
        ("I do not know.", "72", False),
        ("", "72", False),
        ("((((((", "72", False),
    ],
)
def test_mathematics_compares_final_answers_as_mathematics(completion, gold, right):
    assert mathematics.score("", completion, {"answer": gold}) == Score(float(right), right)


def test_an_answer_that_is_no_mathematics_is_an_error_not_a_zero():
    with pytest.raises(ValueError, match="readable as mathematics"):
        mathematics.score("", "72", {"answer": "#### "})


FORMS = [
    *("{n}", "${n}", "{n}.", "So the result is {n}.", "She makes ${n} every day.", "x = {n}", "3 * 4 = {n} dollars."),
    *(r"\boxed{{{n}}}", r"Thus $\boxed{{{n}}}$.", r"The final answer is $\boxed{{{n}}}$.", "Answer: {n}", "#### {n}"),
    *("cost $9 * 2 = ${n}.", "we get {n} - 3 = 5", "is {n}%", "{n} percent", "of 2 {n}", "5 + {n}", "**{n}**", "({n})"),
    *("the answer is 5. Then {n} things", r"final answer is 7 I hope. \boxed{{{n}}}", r"$y = 3$ so $\boxed{{{n}}}$"),
    *(
        "I have {n}th",
        "{n}/2",
        "1/{n}",
        "a, {n}",
        "1, 2, and {n}",
        "$5$, and {n}",
        "of $10. {n} left",
        r"\frac12 or {n}",
    ),
]


def gsm8k_answers(n_rows: int) -> list[str]:
    if not GSM8K.is_dir():
        pytest.skip("GSM8K is not beside this checkout")
    with (GSM8K / "train.jsonl").open() as lines:
        return [json.loads(line)["answer"] for line, _ in zip(lines, range(n_rows), strict=False)]


def test_the_short_cut_agrees_with_math_verify_on_gsm8k_right_and_wrong():
    draw = random.Random(1)
    n_short = 0
    for answer in gsm8k_answers(200):
        worked, _, _ = answer.rpartition("####")
        gold = mathematics.gold_part(answer)
        number = read_number(gold)
        values = [number, number, number + 1, -number, number * 10, number + Decimal("0.5"), number * 1000]
        written = draw.choice(["{}", "{:,}"]).format(draw.choice(values))
        for text in (answer, worked, *(before + draw.choice(FORMS).format(n=written) for before in ("", worked) * 4)):
            n_short += mathematics.short_cut(text) is not None
            assert mathematics.is_right(text, gold) == mathematics.library_says_right(text, gold), (text, gold)
    assert n_short > 500  # of 2,000: it is not agreement by abstention


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so there are 72 " + "of them " * 30, "72"),
        ("It is" + " " * 90 + "72", None),  # too far from what it follows
        ("My anSWer was wrong: it is 72.", None),
        ("An an\u017fwer like this: it is 72.", None),
        ("Of 7 PerCent it is 72.", None),
        (r"$x$ is \frac{1}{2}, it is 72.", None),
        ("none at all", None),
    ],
)
def test_the_short_cut_reads_a_number_after_a_word_and_abstains_from_the_rest(text, number):
    assert mathematics.short_cut(text) == (None if number is None else Decimal(number))


def test_every_answer_of_math500_is_right_against_itself_and_its_solution():
    if not MATH500.is_dir():
        pytest.skip("MATH-500 is not beside this checkout")
    with (MATH500 / "test.jsonl").open() as lines:
        rows = [json.loads(line) for line in lines][:150]
    wrong = [
        row["answer"]
        for row in rows
        if not mathematics.score("", f"So it is $\\boxed{{{row['answer']}}}$.", row).correct
        or not mathematics.score("", row["solution"], row).correct
    ]
    assert wrong == []


def test_reward_functions_and_their_actor_need_no_torch():
    code = "import sys, actors.reward, actors.rewards.mathematics; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0
