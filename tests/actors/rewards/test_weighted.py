"""Several rewards as one, and the reward "format"."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.head.console import Console
from actors.rewards.binding.values import read_value
from actors.rewards.functions import formats
from actors.rewards.functions.formats import FormatOptions
from actors.rewards.loading import TermFailed, WeightedReward, WeightedTerm, load_reward, reward_options
from actors.rewards.pool import Verdict, WorkerOrder, WorkerPool
from actors.rewards.protocol import Score
from areal_bus.config.rewards import RewardConfig
from areal_bus.core.events import Event
from areal_bus.core.parts import reward_parts
from areal_bus.errors import ConfigError
from areal_bus.messages import BatchRequest, VerdictStatus
from tests.areal_bus.core.test_head import head_with, records, scored
from tests.areal_bus.core.transitions.test_rollouts import deliver

FINITE = st.floats(-1e3, 1e3)
OWN = """
def brevity(completion):
    if completion == "raises":
        raise KeyError("no such word")
    return -len(completion)
"""
TERMS = [
    {"function": "exact", "name": "answer"},
    {"function": "own_terms:brevity", "weight": 0.5},
    {"function": "format", "weight": 0},
]


def reward_of(**keys: object) -> RewardConfig:
    return RewardConfig.model_validate(keys)


def verdicts_of(folder: Path, reward: RewardConfig, completions: list[str], **options: bool) -> list[Verdict]:
    """Of worker processes, as in a run."""
    found: dict[int, Verdict] = {}
    order = WorkerOrder(reward.function, folder, options=reward_options(reward), **options)
    with WorkerPool(order, n_workers=1, timeout_s=20.0) as pool:
        for key, completion in enumerate(completions):
            pool.submit(key, prompt="", completion=completion, row=json.dumps({"answer": "2"}))
        while len(found) < len(completions):
            found |= {verdict.key: verdict for verdict in pool.poll(1.0)}
    return [found[key] for key in range(len(completions))]


@pytest.mark.parametrize("fresh_process", [False, True])
def test_weighted_terms_are_added_and_reported_by_name(tmp_path: Path, fresh_process: bool) -> None:
    (tmp_path / "own_terms.py").write_text(OWN)
    reward = reward_of(function="weighted", terms=TERMS, format={"template": "boxed"})
    right, boxed, failed = verdicts_of(tmp_path, reward, ["2", "\\boxed{2}", "raises"], fresh_process=fresh_process)
    assert (right.reward, right.correct, right.parts) == (0.5, True, {"answer": 1.0, "brevity": -1.0, "format": 0.0})
    assert (boxed.reward, boxed.correct, boxed.parts) == (-4.5, False, {"answer": 0.0, "brevity": -9.0, "format": 1.0})
    assert (failed.status, failed.parts) == (VerdictStatus.ERROR, {})
    assert re.match(r"TermFailed: reward 'brevity': KeyError: 'no such word' \(.*own_terms.py:4\)", failed.error)
    assert failed.place.endswith("own_terms.py:4")


@given(st.dictionaries(st.text("abc", min_size=1, max_size=3), st.tuples(FINITE, FINITE), min_size=1, max_size=5))
def test_the_sum_is_of_weight_times_reward(terms: dict[str, tuple[float, float]]) -> None:
    made = [WeightedTerm(name, weight, lambda *_, value=value: value) for name, (weight, value) in terms.items()]
    score = WeightedReward(made)("", "", {})
    assert score.reward == pytest.approx(sum(weight * value for weight, value in terms.values()))
    assert score.parts == {name: value for name, (_, value) in terms.items()}


def test_the_first_term_that_judges_decides_whether_the_answer_is_correct_and_its_parts_are_kept() -> None:
    scores = {"style": 0.5, "judge": Score(1.0, False, {"tone": 3}), "exact": True}
    score = WeightedReward(WeightedTerm(name, 1.0, lambda *_, value=value: value) for name, value in scores.items())(
        "", "", {}
    )
    assert (score.reward, score.correct) == (2.5, False)
    assert score.parts == {"style": 0.5, "judge": 1.0, "judge/tone": 3.0, "exact": 1.0}


@pytest.mark.parametrize("value", [Score(1.0, None, {"a": "1"}), Score(1.0, None, {"": 1}), "1", float("nan")])
def test_a_term_without_a_valid_value_has_no_sum(value: object) -> None:
    with pytest.raises(TermFailed, match="reward 'only': "):
        WeightedReward([WeightedTerm("only", 0.0, lambda *_: value)])("", "", {})  # type: ignore[arg-type, return-value]


def test_parts_of_a_function_are_numbers_by_name() -> None:
    assert read_value(Score(1, True, {"a": 1, "b": False})) == {
        "reward": 1.0,
        "correct": True,
        "parts": {"a": 1.0, "b": 0.0},
    }
    with pytest.raises(ValueError, match="at most 32 names"):
        read_value(Score(1.0, None, {str(n): 0.0 for n in range(33)}))


@pytest.mark.parametrize("value", [1e308, -1.1e100, float("inf"), float("nan")])
def test_a_part_whose_sum_could_overflow_is_refused_by_the_reward_and_by_the_head(value: float) -> None:
    """Two of 1e308 ended the head at each batch, and each next head alike."""
    with pytest.raises(ValueError, match="must be a finite number, at most 1e\\+100"):
        read_value(Score(1.0, None, {"a": value}))
    head, _ = head_with(batch_size=1, n_samples=2)
    effects = deliver(head, *(replace(scored(0, i), parts=reward_parts.dumped({"a": value})) for i in range(2)))
    assert not records(effects, Event.SCORED)
    assert len(records(effects, Event.REFUSED)) == 2


def test_the_head_reports_means_by_name_of_batches_and_evaluations(capsys: pytest.CaptureFixture[str]) -> None:
    head, _ = head_with(batch_size=1, n_samples=2)
    head.on("learner-0.0", BatchRequest(0), 0.0)
    parts = [{"answer": 1.0, "form": 0.0}, {"answer": 0.0, "form": 0.5}]
    effects = deliver(head, *(replace(scored(0, i), parts=reward_parts.dumped(parts[i])) for i in range(2)))
    assert [line["reward:answer"] for line in records(effects, Event.SCORED)] == [1.0, 0.0]
    (batch,) = records(effects, Event.BATCH)
    assert (batch["reward:answer"], batch["reward:form"]) == (0.5, 0.25)
    figures = {"name": "after", "version": 1, "accuracy": None, "reward": 1.0, "version_last": 1}
    figures |= {"n": 4, "n_failed": 0}
    Console(total_steps=1, out=sys.stdout).on("evaluation", figures | {"reward:answer": 0.5, "reward:form": 0.25})
    assert "reward 1.000 (answer 0.500, form 0.250) on 4 held-out answers\n" in capsys.readouterr().out
    failed = {"n": 40, "n_failed": 20, "n_asked": 40, "n_missing": 20}
    Console(total_steps=1, out=sys.stdout).on("evaluation", figures | failed)
    said = "reward 1.000 on 20 of 40 held-out answers, 20 failed and are not in the means\n"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("template", "right", "wrong"),
    [
        (
            "think_answer",
            ["<think>a</think><answer>b</answer>", "\n<think>\na\n</think>\n\n<answer>\nb\n</answer>\n"],
            [
                "",
                "b",
                "<think></think><answer>b</answer>",
                "<think>a</think><answer> </answer>",
                "so <think>a</think><answer>b</answer>",
                "<think>a</think>and<answer>b</answer>",
                "<think>a</think><answer>b</answer>.",
                "<answer>b</answer><think>a</think>",
                "<think>a</think><answer>b</answer><answer>c</answer>",
                "<think>a<answer>b</think></answer>",
            ],
        ),
        (
            "think",
            ["<think>a</think>b", "a</think> b"],
            ["a", "a</think>", "</think>b", "a</think>b</think>c", "a<think></think>b"],
        ),
        (
            "boxed",
            [r"so \boxed{2}", r"\boxed{\frac{1}{2}}.", r"\boxed{\{1\}}"],
            ["2", r"\boxed{}", r"\boxed{2", r"\boxed{1} \boxed{", r"\boxed{\}"],
        ),
        (
            "code",
            ["```python\nx = 1\n```", "as here:\n```\nx\n```\nDone."],
            ["x", "```python\nx", "```\n```", "```\na\n```\n```\nb\n```"],
        ),
    ],
)  # fmt: skip
def test_a_format_has_all_of_its_parts_once(template: str, right: list[str], wrong: list[str]) -> None:
    is_right = formats.TEMPLATES[template]
    assert [text for text in right if not is_right(text.strip())] == []
    assert [text for text in wrong if is_right(text.strip())] == []


def test_a_pattern_is_for_the_whole_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_options", FormatOptions(pattern=r"Answer: \d+.*"))
    assert [formats.score("", text, {}).reward for text in (" Answer: 12\nok\n", "The Answer: 12", "Answer: x")] == [
        1,
        0,
        0,
    ]


def test_the_reward_format_takes_its_options_in_a_worker(tmp_path: Path) -> None:
    reward = reward_of(function="format", format={"pattern": "[0-9]+"})
    assert [verdict.reward for verdict in verdicts_of(tmp_path, reward, ["12", "twelve"])] == [1.0, 0.0]
    assert [verdict.parts for verdict in verdicts_of(tmp_path, reward, ["12"])] == [{}]


def test_a_term_that_does_not_load_is_refused(tmp_path: Path) -> None:
    reward = reward_of(function="weighted", terms=[{"function": "formt"}])
    with pytest.raises(ConfigError, match="'formt'"):
        load_reward("weighted", tmp_path, options=reward_options(reward))


def test_a_terms_change_of_its_row_is_not_seen_by_the_next_term() -> None:
    def changes(prompt: str, completion: str, row: Any) -> float:
        row["hints"].append("used")
        return float(len(row["hints"]))

    terms = [WeightedTerm(name, 1.0, changes) for name in ("a", "b")]
    row = {"hints": []}
    assert WeightedReward(terms)("", "", row).reward == 2.0
    assert row == {"hints": []}
