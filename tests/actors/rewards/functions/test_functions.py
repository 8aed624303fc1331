import json
import re
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest

from actors.rewards.functions import builtin, mathematics, verified
from actors.rewards.protocol import Score
from areal_math.plain_numbers import last_number, read_number
from areal_math.verdict import gold_part
from benchmarks.reward import bench

GSM8K = Path(__file__).parents[5] / "shared" / "data" / "gsm8k"
MATH500 = Path(__file__).parents[5] / "shared" / "data" / "math500"


SUMS = {
    1.0: ["7", " 7\n"],
    0.5: ["7.", "The answer is 7", "3+4=7", "7.0", "07"],
    0.0: ["7 = 3+4", "8", "17", "-7", "3 + 4 = -7", "7.5", "seven", ""],
}
REVERSED = {1.0: ["cba", " cba "], 1 / 3: ["cbx", "cb"], 0.25: ["cbacba"], 0.0: ["xyz", ""]}


@pytest.mark.parametrize(("reward", "completion"), [(reward, one) for reward, texts in SUMS.items() for one in texts])
def test_a_sum_earns_half_for_the_last_number_and_half_for_nothing_else(completion, reward):
    assert builtin.sums_score("3+4", completion, {"answer": "7"}) == Score(reward, reward > 0)


@pytest.mark.parametrize(("reward", "completion"), [(reward, x) for reward, texts in REVERSED.items() for x in texts])
def test_a_reversed_word_earns_its_share_of_places_and_half_for_the_whole(completion, reward):
    assert builtin.reverse_score("abc", completion, {"answer": "cba"}) == Score(pytest.approx(reward), reward == 1.0)


def test_exact_pays_for_the_answer_and_nothing_else():
    assert builtin.exact_score("", " Paris\n", {"answer": "Paris"}) == Score(1.0, True)
    assert builtin.exact_score("", "paris", {"answer": "Paris"}) == Score(0.0, False)


def test_only_a_plain_number_is_read_as_one_and_the_last_of_a_text_has_a_sign_unless_it_is_subtracted():
    plain = {"1,234": "1234", "-3.50": "-3.5", "7 ": "7"} | dict.fromkeys(["1,23", "7 apples", "٧", "1e5"])
    for text, number in plain.items():
        assert read_number(text) == (number and Decimal(number)), text
    last = {"from 10-7": 7, "it is (-7)": -7, "1,000 of 2,500.": 2500, "1,2345": 2345, "v 1.2.3": "1.2", "no": None}
    for text, number in last.items():
        assert last_number(text) == (number and Decimal(number)), text


@pytest.mark.parametrize(
    ("completion", "gold", "right"),
    [
        ("72", "48+24 = <<48+24=72>>72\n#### 72", True),
        ("So she sold $1,072.00 in total.", "#### 1,072", True),
        ("She sold 72 clips.", "#### 73", False),
        ("The answer is 5.\n#### 72", "72", True),
        (r"Hence \boxed{72}.", "72", True),
        (r"\boxed{0.333}", r"\frac{1}{3}", False),
        (r"so $x = \boxed{2\sqrt{2}}$", r"We get \boxed{\sqrt{8}}.", True),
        (r"Thus \boxed{x^2 + 2x + 1}", "(x+1)^2", True),
        ("I do not know.", "72", False),
        ("", "72", False),
    ],
)
def test_mathematics_compares_final_answers_as_mathematics(completion, gold, right):
    assert mathematics.score("", completion, {"answer": gold}) == Score(float(right), right)


def rows_of(folder: Path, file: str) -> list[dict[str, str]]:
    if not folder.is_dir():
        pytest.skip(f"{folder.name} is not beside this checkout")
    return [json.loads(line) for line in (folder / file).read_text(encoding="utf-8").splitlines()]


def judged_right(completion: str, answer: str) -> bool | None:
    return mathematics.score("", completion, {"answer": answer}).correct


MATH_FORMS = [
    *(r"\boxed{{{}}}", r"So it is $\boxed{{{}}}$.", "The answer is {}.", "The answer is ${}$.", "**Answer:** ${}$"),
    *("<think>7</think>\n{}", "<answer>{}</answer>", "It follows.\n\\[\n{}\n\\]", "$\\boxed{{{}}}$\n#### Notes"),
]
GSM8K_FORMS = [
    *("{}", "#### {}", "The answer is {}.", r"\boxed{{{}}}", r"The final answer is $\boxed{{{}}}$.", "**{}**", "`{}`"),
    *("So there are {} of them left.", "She pays ${}.", "Answer: {} dollars", "Therefore, x = {}."),
]


def bare(answer: str) -> str:
    """An answer without what may be left out; MATH-500's answers of one value have one such text."""
    text = re.sub(r"\s|,?\\!|\^\\circ|\\\$|\\mbox\{.*\}\^2|x=|(?<=\d),(?=\d{3}$)", "", answer)
    return ",".join(sorted(text.replace(r"\frac14", r"\frac{1}{4}").split(",")))


def counted(rows: list[dict[str, str]], forms: list[str], question: str) -> dict[str, int]:
    """Verdicts on each row's own answer and another row's in all forms, and on its question repeated."""
    golds = [gold_part(row["answer"]) for row in rows]
    found = {"n": len(rows) * len(forms), "gold_right": 0, "others": 0, "wrong_right": 0, "repeats_right": 0}
    for i, (row, gold) in enumerate(zip(rows, golds, strict=True)):
        found["repeats_right"] += bool(judged_right(row[question], row["answer"]))
        other = golds[(i * 7 + 1) % len(golds)]
        differs = bare(other) != bare(gold)
        for form in forms:
            found["gold_right"] += bool(judged_right(form.format(gold), row["answer"]))
            found["others"] += differs
            found["wrong_right"] += differs and bool(judged_right(form.format(other), row["answer"]))
    return found


def test_math500_gold_is_right_another_answer_is_wrong_and_the_problem_is_no_answer():  # items 3 and 23
    rows = rows_of(MATH500, "test.jsonl")
    found = counted(rows, MATH_FORMS, "problem")
    assert found["gold_right"] == found["n"] == 4500
    assert found["others"] > 4000
    assert found["wrong_right"] == found["repeats_right"] == 0
    assert [row["solution"] for row in rows if not judged_right(row["solution"], row["answer"])] == []


@pytest.mark.slow
def test_gsm8k_gold_is_right_another_answer_is_wrong_and_the_question_is_no_answer():  # items 3 and 23
    rows = (rows_of(GSM8K, "test.jsonl") + rows_of(GSM8K, "train.jsonl"))[::8]
    found = counted(rows, GSM8K_FORMS, "question")
    assert found["gold_right"] == found["n"] == 1099 * len(GSM8K_FORMS)
    assert found["others"] > 10000
    assert found["wrong_right"] == found["repeats_right"] == 0
    assert [row["answer"] for row in rows if not judged_right(row["answer"], row["answer"])] == []


def test_the_reward_agrees_with_math_verify_on_the_forms_of_the_bench():
    peer = pytest.importorskip("benchmarks.reward.math_verify")
    answers, _ = bench.worked_answers(30)
    for forms in bench.FORMS.values():
        pairs = list(zip(*bench.completions(answers, forms), strict=True))
        ours = [judged_right(text, answer) for text, answer in pairs]
        assert ours == [peer.verdict(text, answer) for text, answer in pairs] == [True, False] * 30


def test_reward_functions_and_their_actor_need_no_torch():
    code = "import sys, actors.rewards.actor, actors.rewards.functions.mathematics; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        (r"So it is $\boxed{\frac{1}{2}}$.", "0.5", True),
        ("The answer is 42", "<<6*7=42>> #### 42", True),
        ("The answer is 41", "42", False),
        ("no idea", "42", False),
    ],
)
def test_math_verify_judges_the_final_answer(completion, answer, right):
    assert verified.score("", completion, {"answer": answer}) == Score(float(right), right)


@pytest.mark.parametrize(
    ("score", "answer", "why"),
    [
        (builtin.sums_score, "seven", "seven"),
        (mathematics.score, "#### ", "readable as mathematics"),
        (verified.score, "", "unknown form of answer for math-verify"),
    ],
)
def test_an_answer_that_cannot_be_read_is_an_error_and_no_zero(score, answer, why):
    with pytest.raises(ValueError, match=why):
        score("3+4", "7", {"answer": answer})
