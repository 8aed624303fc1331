import sys

import pytest

from actors.rewards.loading import BUILT_IN, check_reward, load_reward
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.mark.parametrize("name", sorted(BUILT_IN.keys() - {"judge"}))  # that one: test_judge.py
def test_every_built_in_reward_loads_and_scores(name, folder):
    row = {"answer": "2", "agent": {"reward": 1.0}, "tests": [{"input": "", "output": "2"}]}
    given = {"code": "print(2)", "code_share": "print(2)", "format": "<think>1+1</think><answer>2</answer>"}
    completion = given.get(name, "2")
    assert load_reward(name, folder)("1+1", completion, row).reward == 1.0


def test_a_function_of_the_users_own_is_found_in_the_configs_folder(folder):
    (folder / "own_found.py").write_text("def score(prompt, completion, row): return len(completion)")
    assert load_reward("own_found:score", folder)("", "four", {}) == 4


@pytest.mark.parametrize(
    ("module", "source", "name", "parts"),
    [
        ("own_a", "", "own_missing:score", ["own_missing", "ModuleNotFoundError"]),
        ("own_b", "import nothing_such", "own_b:score", ["own_b", "nothing_such"]),
        ("own_c", "def f(:", "own_c:f", ["own_c", "SyntaxError"]),
        ("own_d", "raise SystemExit(3)", "own_d:f", ["own_d", "SystemExit"]),
        ("own_e", "def other(p, c, r): ...", "own_e:score", ["own_e", "no such name"]),
        ("own_f", "score = 3", "own_f:score", ["own_f", "int"]),
        (
            "own_g",
            "def score(text, row): ...",
            "own_g:score",
            ["score(text, row)", "'text'", "completion", "solution_str"],
        ),
        ("own_h", "", "perfect", ["perfect", '"exact"', "module:function"]),
        ("own_i", "", "own_i:", ["module:function"]),
    ],
)
def test_a_reward_that_does_not_load_is_refused_with_module_attribute_and_cause(folder, module, source, name, parts):
    (folder / f"{module}.py").write_text(source)
    with pytest.raises(ConfigError) as caught:
        load_reward(name, folder)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_the_check_before_a_run_tries_the_function_in_another_process(folder):
    (folder / "own_ok.py").write_text("def score(prompt, completion, row): return 1")
    (folder / "own_exits.py").write_text("import os; os._exit(7)")
    check_reward(Config.model_validate({"reward": {"function": "own_ok:score"}}), folder)
    assert "own_ok" not in sys.modules
    with pytest.raises(ConfigError, match="exit code 7"):
        check_reward(Config.model_validate({"reward": {"function": "own_exits:score"}}), folder)
    with pytest.raises(ConfigError, match="no such name"):
        check_reward(Config.model_validate({"reward": {"function": "own_ok:nothing"}}), folder)


VERL_ROW = {
    "data_source": "gsm8k",
    "prompt": [{"role": "user", "content": "1+1"}],
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 7},
    "question": "1+1",
    "answer": "two",
}
PLAIN_ROW = {"question": "1+1", "answer": "2"}


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
    ],
)
def test_item_10_a_reward_gets_its_arguments_by_the_names_of_its_parameters(folder, parameters, row, expected):
    names = [word.partition("=")[0].strip("* ") for word in parameters.split(",")]
    named = [name for name in names if name not in ("", "/", "more")]
    (folder / "own_bound.py").write_text(f"def score({parameters}): return [{', '.join(named)}]")
    sys.modules.pop("own_bound", None)
    assert load_reward("own_bound:score", folder)("asked", "said", row) == expected


def test_item_10_what_cannot_be_bound_is_refused_with_the_parameter_and_the_names(folder):
    (folder / "own_unbound.py").write_text(
        "def other(question, response, row): ...\ndef nothing(strict=True): ...\n"
        "def verl(data_source, solution_str, ground_truth, extra_info=None): ..."
    )
    for name, parts in [
        ("other", ["'question'", "prompt, completion, row, data_source, solution_str, ground_truth, extra_info"]),
        ("nothing", ["at least one of prompt"]),
        ("verl", ["'data_source'", "not every row has this field"]),
    ]:
        config = Config.model_validate({"reward": {"function": f"own_unbound:{name}"}})
        with pytest.raises(ConfigError) as caught:
            check_reward(config, folder, {"question", "answer"})
        assert all(part in str(caught.value) for part in parts), caught.value
    verl = Config.model_validate({"reward": {"function": "own_unbound:verl"}})
    check_reward(verl, folder, {"question", "answer", "data_source"})
