import sys

import pytest

from actors.rewards.loading import BUILT_IN, check_reward, load_reward
from areal_bus.config import Config
from areal_bus.errors import ConfigError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_reward_loads_and_scores(name, folder):
    assert load_reward(name, folder)("1+1", "2", {"answer": "2", "agent": {"reward": 1.0}}).reward == 1.0


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
        ("own_g", "def score(completion): ...", "own_g:score", ["(prompt, completion, row)", "score(completion)"]),
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
