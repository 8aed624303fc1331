"""Bench `reward`: the reward "math" beside math-verify alone, on GSM8K's answers, right and wrong.

`plain` is the form of the rows ("#### 72"), `sentence` ends in the number, in words or in a box. Only math-verify can
judge `prose`, so it shows the cost of trying our fast path first.
"""

import json
import random
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from benchmarks.harness import worker_process
from benchmarks.harness.interleave import OURS, Rounds, interleave
from benchmarks.harness.protocol import Figures

GSM8K = worker_process.ROOT.parent / "shared" / "data" / "gsm8k" / "test.jsonl"
ROWS = 100
PEER = "math_verify"
FORMS = {
    "plain": ("{worked}#### {n}",),
    "sentence": ("{worked}So there are {n} of them left.", r"{worked}Thus it is $\boxed{{{n}}}$."),
    "prose": ("{worked}The answer is {n}.", "{worked}Therefore **{n}**", r"{worked}$\frac{{{n}}}{{1}}$"),
}


class RewardBench:
    about = "answers a second on GSM8K's answers, right and wrong, beside math-verify alone, and whether they agree"

    def measure(self, *, quiet: bool) -> Figures:
        """Raises ConfigError without the peers."""
        answers, data = worked_answers(ROWS)
        with ExitStack() as stack:
            sides = {
                PEER: stack.enter_context(worker_process.peer("reward.math_verify")),
                OURS: stack.enter_context(worker_process.ours("reward.ours")),
            }
            control = stack.enter_context(worker_process.ours("harness.sgemm"))
            found = {}
            for form, patterns in FORMS.items():
                texts, rows = completions(answers, patterns)
                verdicts: dict[str, Sequence[bool]] = {}

                def measure(
                    name: str,
                    texts: list[str] = texts,
                    rows: list[str] = rows,
                    verdicts: dict[str, Sequence[bool]] = verdicts,
                ) -> float:
                    answer = sides[name].ask("judge", completions=texts, answers=rows)
                    verdicts[name] = answer["verdicts"]
                    return float(answer["seconds"]) / len(texts)

                rounds = interleave(
                    {name: partial(measure, name) for name in sides}, lambda: float(control.ask("sgemm"))
                )
                found[form] = Form(rounds, verdicts)
        return figures(found) | {"data": data}


class Form:
    """Results for one form of answers."""

    def __init__(self, rounds: Rounds, verdicts: dict[str, Sequence[bool]]) -> None:
        self.rounds = rounds
        self.n = len(verdicts[OURS])
        self.n_right = sum(verdicts[OURS])
        self.n_agreed = sum(one == other for one, other in zip(verdicts[OURS], verdicts[PEER], strict=True))


def worked_answers(n: int) -> tuple[list[str], str]:
    """GSM8K's test rows where they are beside the checkout, else made up in their form; and which."""
    if GSM8K.is_file():
        with GSM8K.open(encoding="utf-8") as lines:
            return [json.loads(line)["answer"] for line, _ in zip(lines, range(n), strict=False)], "gsm8k"
    dice = random.Random(1)
    pairs = [(dice.randint(1, 99), dice.randint(1, 99)) for _ in range(n)]
    return [
        f"She buys {a} eggs and then {b} more.\nThat makes {a + b} eggs.\n#### {a + b}" for a, b in pairs
    ], "made up"


def completions(answers: Sequence[str], patterns: Sequence[str]) -> tuple[list[str], list[str]]:
    """Each answer in one of these forms, once right and once wrong; and the rows that they are judged by."""
    texts, rows = [], []
    for index, answer in enumerate(answers):
        worked, _, gold = answer.rpartition("####")
        number = int(gold.strip().replace(",", ""))
        wrong = (number + 1, number * 10 + 3, -number - 1)[index % 3]
        for n in (number, wrong):
            texts.append(patterns[index % len(patterns)].format(worked=worked, n=n))
            rows.append(answer)
    return texts, rows


def figures(forms: dict[str, Form]) -> Figures:
    """`ratio` is that of plain numbers; `agreement` that of all forms together."""
    n = sum(form.n for form in forms.values())
    found: Figures = {
        "bench": "reward",
        **forms["plain"].rounds.against(PEER),
        "agreement": sum(form.n_agreed for form in forms.values()) / n,
        "answers": n,
        "right": sum(form.n_right for form in forms.values()),
    }
    for name, form in forms.items():
        found |= form.rounds.against(PEER, f"ratio_{name}") if name != "plain" else {}
        found[f"answers_per_s_{name}"] = round(1 / form.rounds.cost(OURS))
        found[f"math_verify_per_s_{name}"] = round(1 / form.rounds.cost(PEER))
    return found | forms["plain"].rounds.figures()
