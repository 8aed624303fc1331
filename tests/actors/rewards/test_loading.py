"""Rewards by name and by module: how they are found, bound to their arguments, weighted and refused."""

import itertools
import json
import re
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.data.fields import SOURCE
from actors.rewards.binding.values import read_value
from actors.rewards.loading import (
    BUILT_IN,
    RewardBySource,
    TermFailed,
    WeightedReward,
    WeightedTerm,
    load_group,
    load_reward,
    reward_options,
)
from actors.rewards.pool import Verdict, WorkerOrder, WorkerPool
from actors.rewards.protocol import NotApplicable, Score, zero_sum
from areal_bus.config.rewards import RewardConfig
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError
from areal_bus.messages import VerdictStatus
from launch.checks.trial import TrialScore, check_reward

ELSEWHERE = {"judge", "url", "model", "reasoning_gym"}  # test_judge.py, functions/test_model.py, test_tasks.py


NUMBERS = itertools.count()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def own(folder: Path, source: str) -> str:
    """The name of a new module of this source."""
    name = f"own_{next(NUMBERS)}"
    (folder / f"{name}.py").write_text(source, encoding="utf-8")
    return name


@pytest.mark.parametrize("name", sorted(BUILT_IN.keys() - ELSEWHERE))
def test_every_built_in_reward_loads_and_scores(name, folder):
    row = {"answer": "2", "agent": {"reward": 1.0}, "tests": [{"input": "", "output": "2"}]}
    given = {"code": "print(2)", "code_share": "print(2)", "format": "<think>1+1</think><answer>2</answer>"}
    completion = given.get(name, "2")
    assert load_reward(name, folder)("1+1", completion, row).reward == 1.0


@pytest.mark.parametrize(
    ("source", "name", "parts"),
    [
        ("", "own_missing:score", ["own_missing", "ModuleNotFoundError"]),
        ("import nothing_such", "OWN:score", ["OWN", "nothing_such"]),
        ("def f(:", "OWN:f", ["OWN", "SyntaxError"]),
        ("raise SystemExit(3)", "OWN:f", ["OWN", "SystemExit"]),
        ("def other(p, c, r): ...", "OWN:score", ["OWN", "no such name"]),
        ("score = 3", "OWN:score", ["OWN", "int"]),
        ("def score(text, row): ...", "OWN:score", ["score(text, row)", "'text'", "completion", "solution_str"]),
        ("", "perfect", ["perfect", '"exact"', "module:function"]),
        ("", "OWN:", ["module:function"]),
        ("", "formt", ["'formt'"]),
    ],
)
def test_a_reward_that_does_not_load_is_refused_with_module_attribute_and_cause(folder, source, name, parts):
    module = own(folder, source)
    with pytest.raises(ConfigError) as caught:
        load_reward(name.replace("OWN", module), folder)
    assert all(part.replace("OWN", module) in str(caught.value) for part in parts), caught.value


def test_the_check_before_a_run_tries_the_function_in_another_process(folder):
    ok, exits = own(folder, "def score(prompt, completion, row): return 1"), own(folder, "import os; os._exit(7)")
    check_reward(Config.model_validate({"reward": {"function": f"{ok}:score"}}), folder)
    assert ok not in sys.modules
    for function, why in ((f"{exits}:score", "exit code 7"), (f"{ok}:nothing", "no such name")):
        with pytest.raises(ConfigError, match=why):
            check_reward(Config.model_validate({"reward": {"function": function}}), folder)


VERL_ROW = {
    "data_source": "gsm8k",
    "prompt": [{"role": "user", "content": "1+1"}],
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 7},
    "question": "1+1",
    "answer": "two",
}
PLAIN_ROW = {"question": "1+1", "answer": "2"}
TOKENS = {"token_ids": {"prompt": [1, 2], "completion": [3]}}
OWN_ROW = {"question": "1+1", "answer": "2", "replaced": {"answer": 2}, **TOKENS}  # the file has a number
CHAT = [{"role": "user", "content": "1+1"}]
SAID = [{"role": "assistant", "content": "said"}]


@pytest.mark.parametrize(
    ("parameters", "row", "expected"),
    [
        ("data_source, solution_str, ground_truth, extra_info=None", VERL_ROW, ["gsm8k", "said", "2", {"index": 7}]),
        ("data_source, solution_str, ground_truth, extra_info, **more", VERL_ROW, ["gsm8k", "said", "2", {"index": 7}]),
        ("solution_str, ground_truth, extra_info", PLAIN_ROW, ["said", "2", {}]),
        ("ground_truth, solution_str, data_source='none'", PLAIN_ROW, ["2", "said", "none"]),
        ("ground_truth, data_source='none'", VERL_ROW, ["2", "gsm8k"]),
        ("row, completion, prompt", PLAIN_ROW, [PLAIN_ROW, "said", "asked"]),
        ("completion, /, *, strict=True, row", PLAIN_ROW, ["said", True, PLAIN_ROW]),
        ("x=0, prompt='', /", PLAIN_ROW, [0, "asked"]),
        (
            "data_source='none', prompt='', strict=True, completion='', /, *, row",
            PLAIN_ROW,
            ["none", "asked", True, "said", PLAIN_ROW],
        ),
        ("data_source='none', prompt='', /", VERL_ROW, ["gsm8k", "asked"]),
        ("*all", PLAIN_ROW, [("asked", "said", PLAIN_ROW)]),
        ("prompt, completions, prompt_ids, completion_ids, answer", OWN_ROW, ["asked", "said", [1, 2], [3], 2]),
        (
            "_p, c, prompt_ids, _ci, *, data_source, k=3",
            {**OWN_ROW, **VERL_ROW},
            ["asked", "said", [1, 2], [3], "gsm8k", 3],
        ),
    ],
)
def test_a_reward_gets_its_arguments_by_the_names_of_its_parameters(folder, parameters, row, expected):
    names = [word.partition("=")[0].strip("* ") for word in parameters.split(",")]
    named = [name for name in names if name not in ("", "/", "more")]
    module = own(folder, f"def score({parameters}): return [{', '.join(named)}]")
    assert load_reward(f"{module}:score", folder)("asked", "said", row) == expected


def test_a_parameter_that_cannot_be_bound_is_refused_with_the_known_names(folder):
    module = own(
        folder,
        "def other(question, response, row): ...\ndef nothing(strict=True): ...\n"
        "def verl(data_source, solution_str, ground_truth, extra_info=None): ...",
    )
    for name, parts in [
        ("other", ["'question'", "prompt, completion, row, data_source, solution_str, ground_truth, extra_info"]),
        ("nothing", ["at least one of prompt"]),
        ("verl", ["'data_source'", "in some rows"]),
    ]:
        with pytest.raises(ConfigError) as caught:
            load_reward(f"{module}:{name}", folder, {"question", "answer"})
        assert all(part in str(caught.value) for part in parts), caught.value
    load_reward(f"{module}:verl", folder, {"question", "answer", "data_source"})


@pytest.mark.parametrize(
    ("parameters", "signature", "row", "expected"),
    [
        ("prompts, completions, ground_truth", "auto", {**PLAIN_ROW, "ground_truth": 7}, [["asked"], ["said"], [7]]),
        ("completions, answer, **columns", "auto", OWN_ROW, [["said"], [2]]),
        ("prompts, completions, data_source", "auto", VERL_ROW, [[CHAT], [SAID], ["gsm8k"]]),
        ("completions, prompts", "auto", {**PLAIN_ROW, "question_messages": CHAT}, [[SAID], [CHAT]]),
        ("completion_ids, completions", "auto", OWN_ROW, [[[3]], ["said"]]),
        ("prompts, completions", "trl_chat", PLAIN_ROW, [[[{"role": "user", "content": "asked"}]], [SAID]]),
        ("prompts, completions", "trl_text", VERL_ROW, [["asked"], ["said"]]),
        ("**every", "trl", PLAIN_ROW, []),
        ("data_sources, solution_strs, ground_truths, extra_infos=None", "auto", VERL_ROW,
         [["gsm8k"], ["said"], ["2"], [{"index": 7}]]),
    ],
)  # fmt: skip
def test_functions_with_lists_are_called_as_trl_and_verl_call_them(folder, parameters, signature, row, expected):
    names = [word.partition("=")[0].strip(" ") for word in parameters.split(",")]
    named = ", ".join(name for name in names if not name.startswith("*"))
    module = own(folder, f"seen = []\ndef score({parameters}):\n    seen[:] = [{named}]\n    return [0.5]")
    function = load_reward(f"{module}:score", folder, set(row), options={"signature": signature})
    assert function("asked", "said", row) == 0.5
    assert sys.modules[module].seen == expected


def test_results_of_reward_functions_of_other_systems_are_converted(folder):
    module = own(
        folder,
        "import numpy as np\n"
        "async def later(completions, **kwargs): return [0.25]\n"
        "def metric(completions, log_metric=None, log_extra=None, **kwargs):\n"
        "    log_extra('seen', completions)\n"
        "    log_metric('length', len(completions[0]))\n"
        "    return [True]\n"
        "def number(completions, **kwargs): return 0.5\n"
        "def two(completions, **kwargs): return [0.5, 0.5]\n"
        "def absent(completions, **kwargs): return [None]\n"
        "def verl(solution_str): return {'score': -1, 'acc': False, 'pred': '7', 'n': 3}\n"
        "def odd(solution_str): return {'reward': 1}\n"
        "def arrays(prompts, completions, log_metric, **kwargs):\n"
        "    log_metric('n', 1)\n"
        "    return np.array([c == 'said' for c in completions])\n",
    )

    def value_of(name):
        return read_value(load_reward(f"{module}:{name}", folder)("asked", "said", PLAIN_ROW))

    assert value_of("later") == {"reward": 0.25, "correct": None}
    assert value_of("metric") == {"reward": 1.0, "correct": True, "parts": {"length": 4.0}}
    assert value_of("arrays") == {"reward": 1.0, "correct": True, "parts": {"n": 1.0}}
    assert value_of("verl") == {"reward": -1.0, "correct": False, "parts": {"acc": 0.0, "n": 3.0}}
    for name, error, text in [
        ("number", TypeError, "a float, not a list of one reward"),
        ("two", TypeError, "it returned 2 for 1"),
        ("absent", NotApplicable, "does not apply"),
        ("odd", TypeError, 'missing key "score"'),
    ]:
        with pytest.raises(error, match=text):
            value_of(name)


def test_a_term_that_does_not_apply_is_left_out_of_a_sum(folder):
    module = own(
        folder,
        "def maths(completions, task, **kwargs): return [1.0 if one == 'math' else None for one in task]\n"
        "def half(completion): return 0.5\n",
    )
    terms = [{"function": f"{module}:maths", "weight": 2.0}, {"function": f"{module}:half"}]
    options = reward_options(Config.model_validate({"reward": {"function": "weighted", "terms": terms}}).reward)
    score = load_reward("weighted", folder, options=options)
    assert score("", "", {"task": "math"}) == Score(2.5, None, {"maths": 1.0, "half": 0.5})
    assert score("", "", {"task": "code"}) == Score(0.5, None, {"half": 0.5})
    score.terms = score.terms[:1]
    with pytest.raises(NotApplicable, match="none applies"):
        score("", "", {"task": "code"})


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


def verdicts_of(folder: Path, reward: RewardConfig, completions: list[str], **options: bool) -> list[Verdict]:
    """Of worker processes, as in a run."""
    found: dict[int, Verdict] = {}
    order = WorkerOrder(reward.function, folder, options=reward_options(reward, folder), **options)
    with WorkerPool(order, n_workers=1, timeout_s=20.0) as pool:
        for key, completion in enumerate(completions):
            pool.submit(key, prompt="", completion=completion, row=json.dumps({"answer": "2"}))
        while len(found) < len(completions):
            found |= {verdict.key: verdict for verdict in pool.poll(1.0)}
    return [found[key] for key in range(len(completions))]


@pytest.mark.parametrize("fresh_process", [False, True])
def test_weighted_terms_are_added_and_reported_by_name(tmp_path: Path, fresh_process: bool) -> None:
    (tmp_path / "own_terms.py").write_text(OWN)
    reward = RewardConfig.model_validate({"function": "weighted", "terms": TERMS, "format": {"template": "boxed"}})
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


def test_terms_without_rewards_of_roles_count_for_each_role() -> None:
    game, form = Score(0.5, role_rewards={"a": 1.0, "b": -1.0}), 1.0
    terms = [WeightedTerm("game", 2.0, lambda *_: game), WeightedTerm("form", 0.5, lambda *_: form)]
    score = WeightedReward(terms)("", "", {})
    assert (score.reward, score.parts["role/a"], score.parts["role/b"]) == (1.5, 2.5, -1.5)
    by_source = RewardBySource({"chess": lambda *_: score}, lambda *_: 0.0)("", "", {SOURCE: "chess"})
    assert (by_source.parts["role/a"], by_source.parts["chess/form"]) == (2.5, 1.0)


@pytest.mark.parametrize("rewards", [[1.0, -1.0], [0.1, 0.2, -0.3], []])
def test_rewards_of_a_zero_sum_game_add_up_to_0(rewards: list[float]) -> None:
    by_role = {f"role{i}": reward for i, reward in enumerate(rewards)}
    assert zero_sum(by_role) == by_role
    with pytest.raises(ValueError, match="mismatch in a zero-sum game: its rewards add up to 1, not 0"):
        zero_sum(by_role | {"one": 1.0})


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


def test_a_terms_change_of_its_row_is_not_seen_by_the_next_term() -> None:
    def changes(prompt: str, completion: str, row: Any) -> float:
        row["hints"].append("used")
        return float(len(row["hints"]))

    terms = [WeightedTerm(name, 1.0, changes) for name in ("a", "b")]
    row = {"hints": []}
    assert WeightedReward(terms)("", "", row).reward == 2.0
    assert row == {"hints": []}


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        (
            "prompt, completions",
            "two systems, prompt \\(ours or AReaL's\\) and completions \\(TRL's\\): set reward.sig",
        ),
        ("completions: str, answer: str", "completions: str"),
        ("prompt_ids, solution_str", "ours or verl's"),
        ("prompt, prompt_ids", "by position: it takes 2"),
        (
            "completions, solution",
            "missing field 'solution': .* column of TRL's rows, and every row has only .*answer, que",
        ),
        ("completions, trainer_state", "unknown parameter 'trainer_state'"),
        ("environments, **kwargs", "unknown parameter 'environments'"),
        ("completions, /", "positional only"),
        ("p, completions, prompt_ids, ids, solution", "'solution', a field of AReaL's rows"),
    ],
)
def test_a_signature_that_fits_no_system_or_two_is_refused_in_one_sentence(folder, parameters, text):
    module = own(folder, f"def score({parameters}): ...")
    with pytest.raises(ConfigError, match=text) as caught:
        load_reward(f"{module}:score", folder, {"question", "answer"})
    assert "\n" not in str(caught.value)


def test_token_ids_reach_a_worker_only_where_the_function_takes_them(folder):
    (folder / "own_ids.py").write_text(
        "def areal(prompt, completions, prompt_ids, completion_ids, **data):\n"
        "    return sum(prompt_ids) + 1000 * sum(completion_ids) + ('token_ids' in data)\n"
        "def plain(row): return float('token_ids' in row)\n"
    )
    ids = struct.pack("<5i", 1, 2, 3, 40, 50)
    for name, expected in [("areal", 90006), ("plain", 0)]:
        with WorkerPool(WorkerOrder(f"own_ids:{name}", folder), n_workers=1, timeout_s=20.0) as pool:
            pool.submit(0, prompt="", completion="", row="{}", ids=ids, n_prompt=3)
            while not (verdicts := pool.poll(1.0)):
                pass
        assert (verdicts[0].reward, verdicts[0].error) == (expected, "")


def test_a_module_that_another_one_hides_is_refused_with_both_files(folder):
    (folder / "tools").mkdir()
    for file in ("code.py", "tools/__init__.py", "tools/own.py", "json.py"):
        (folder / file).write_text("def score(completion): return 1")
    for name, hidden in (("code:score", "code.py"), ("tools.own:score", "tools/__init__.py")):
        with pytest.raises(ConfigError, match=rf"Python finds /\S+ before {folder}/{hidden}"):
            load_reward(name, folder)
    assert load_reward("sums", folder)("1+1", "2", {"answer": "2"}).reward == 1.0
    assert sys.path[-1] == str(folder)


@pytest.mark.parametrize(
    ("value", "correct"),
    [
        (np.bool_(True), True),
        (Score(np.float32(1.0), correct=np.bool_(True)), True),
        (Score(np.float64(1.0), correct=np.False_), False),
        ({"score": np.float32(1.0), "acc": np.bool_(False), "length": np.float32(0.5)}, False),
        ({"score": torch.tensor(1.0), "acc": torch.tensor(True)}, True),
        (torch.tensor(True), True),
        (np.float32(1.0), None),
        (torch.tensor(1.0), None),
        (np.array(True), True),
    ],
)
def test_scalars_of_numpy_and_torch_keep_reward_and_correctness(value: Any, correct: bool | None) -> None:
    read = read_value(value)
    assert (read["reward"], read["correct"]) == (1.0, correct)
    assert type(read["correct"]) in (bool, type(None))
    if isinstance(value, dict) and "length" in value:
        assert read["parts"]["length"] == 0.5


SAMPLES = [{"completion": text, "reward": 0.5, "correct": None} for text in ("aa", "", "aaa")]


@pytest.mark.parametrize(
    ("source", "rewards"),
    [
        ("def f(row, rewards, completions, k=2): return [row['a'] + k, *rewards[1:]]", [3.0, 0.5, 0.5]),
        (
            "import numpy\nasync def f(completions): return numpy.array([len(one) for one in completions])",
            [2.0, 0.0, 3.0],
        ),
    ],
)
def test_a_group_reward_is_bound_by_name_and_may_be_a_coroutine(folder, source, rewards):
    assert load_group(f"{own(folder, source)}:f", folder)("asked", SAMPLES, {"a": 1}) == rewards


@pytest.mark.parametrize(
    ("returned", "fault"),
    [
        ("[1, 2]", "one reward for each sample: it returned 2 for 3"),
        ("1.0", "must return a list of rewards: it returned a float"),
        ("[1, 2, float('nan')]", "finite"),
        ("['1', 2, 3]", "a number"),
        ("{1, 2, 3}", "must return a list of rewards: it returned a set"),
    ],
)
def test_a_group_reward_that_returns_anything_else_is_an_error(returned, fault, folder):
    module = own(folder, f"def f(completions): return {returned}")
    with pytest.raises((TypeError, ValueError), match=fault):
        load_group(f"{module}:f", folder)("asked", SAMPLES, {})


def test_an_unknown_parameter_of_a_group_reward_is_refused(folder):
    module = own(folder, "def f(completions, answers): return completions")
    with pytest.raises(ConfigError, match=r"unknown parameter 'answers'.*prompt, completions, row, rewards, correct"):
        load_group(f"{module}:f", folder)


def test_rewards_of_groups_and_checks_are_tried_before_the_start(folder):
    module = own(
        folder,
        "def group(completions): return [row for one in completions]\ndef f(completion): return answer\n"
        "def four(completions):\n    a, b, c, d = completions\n    return [0, 1, 2, 3]",
    )
    trial = TrialScore("row 0", "asked", "1", '{"answer": "1"}', b"", 0)
    for reward, fault in [
        ({"group": f"{module}:group"}, rf"reward.group '{module}:group' failed in a trial.*on row 0: NameError"),
        ({"group": f"{module}:absent"}, rf"reward.group '{module}:absent' must name a function"),
        ({"check": {"function": f"{module}:f"}}, rf"check.function '{module}:f' failed in a trial.*NameError"),
        ({"check": {"function": f"{module}:absent"}}, rf"check.function '{module}:absent' must name a function"),
    ]:
        with pytest.raises(ConfigError, match=fault):
            check_reward(Config.model_validate({"reward": reward}), folder, trials=[trial])
    whole = {"reward": {"group": f"{module}:four"}, "gconfig": {"n_samples": 4}}
    check_reward(Config.model_validate(whole), folder, trials=[trial])
