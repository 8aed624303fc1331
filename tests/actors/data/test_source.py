"""[[data.source]]: rows, prompts, rewards and evaluations of each source."""

import json
from pathlib import Path

import pytest

from actors.data.loading import load_rows, load_sets
from actors.data.source import make_source
from actors.rewards.loading import load_reward, reward_name, reward_options
from actors.workflows.prompts import prompt_of
from areal_bus.config.data import OwnGeneration
from areal_bus.config.loader import load
from areal_bus.config.sections import Config
from areal_bus.config.stages import StageConfig, sampling_of
from areal_bus.config.validation import check
from areal_bus.errors import ConfigError

SETTINGS = """
[model]
path = "m"
[data]
prompt = "Q: {question}"
[reward]
function = "exact"
[evaluate]
after = true
[[data.source]]
task = "sums"
weight = 3
prompt = "{a} plus {b}"
reward = "sums"
largest = 3
held_out = 4
[[data.source]]
name = "capitals"
path = "capitals.jsonl"
weight = 1
evaluate_path = "capitals.jsonl"
"""


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "c.toml").write_text(SETTINGS)
    rows = [{"question": f"capital {i}", "answer": str(i)} for i in range(3)]
    (tmp_path / "capitals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load(tmp_path / "c.toml", (), {})


def test_rows_are_mixed_by_weight_and_each_has_the_prompt_and_the_reward_of_its_source(
    config: Config, tmp_path: Path
) -> None:
    source = make_source(config, tmp_path)
    drawn = [row for _ in range(8) if (row := source.draw()) is not None]
    assert [row.source for row in drawn].count("sums") == 6
    rows = {row.source: json.loads(row.text) for row in drawn}
    sums, capital = rows["sums"], rows["capitals"]
    assert prompt_of(sums, config.data).text == f"{sums['a']} plus {sums['b']}"
    assert prompt_of(capital, config.data).text == f"Q: {capital['question']}"
    score = load_reward(reward_name(config), tmp_path, options=reward_options(config.reward, data=config.data))
    right = score("", capital["answer"], capital)
    assert right.parts == {"capitals": 1.0, "capitals/accuracy": 1.0}  # type: ignore[union-attr]
    assert score("", sums["answer"], sums).parts["sums"] == score("", sums["answer"], sums).reward  # type: ignore[union-attr]
    assert score("", "x", {"question": "?", "answer": "x"}).parts == {}  # type: ignore[union-attr]


def test_each_source_with_problems_is_a_set_of_the_evaluation(config: Config, tmp_path: Path) -> None:
    sets = load_sets(config, tmp_path)
    assert {name: len(rows) for name, rows in sets.items()} == {"sums": 4, "capitals": 3}
    assert not {row["question"] for row in sets["sums"]} & {row["question"] for row in load_rows(config, tmp_path)}
    assert {row["source_name"] for row in sets["sums"]} == {"sums"}


def test_a_row_that_brings_the_field_of_the_source_is_refused(config: Config, tmp_path: Path) -> None:
    (tmp_path / "capitals.jsonl").write_text('{"question": "q", "answer": "a", "source_name": "mine"}\n')
    with pytest.raises(ConfigError, match=r"may not have the field source_name.*capitals.jsonl:1"):
        load_rows(config, tmp_path)


def test_a_named_task_fills_in_its_source_and_the_keys_that_all_share(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(
        '[model]\npath = "m"\n[[data.source]]\ntask = "gsm8k"\npath = "g.jsonl"\nweight = 1\n'
        '[[data.source]]\ntask = "humaneval"\nweight = 1\nprompt = "{question}!"\n'
    )
    config = load(tmp_path / "c.toml", (), {})
    gsm8k, humaneval = config.data.source
    assert (gsm8k.path, gsm8k.reward) == ("g.jsonl", "math")
    assert (humaneval.path, humaneval.split, humaneval.reward) == ("openai/openai_humaneval", "test", "code")
    assert humaneval.prompt == config.data.of("humaneval").prompt == "{question}!"
    assert config.reward.timeout_s == 30.0
    assert [sampling_of(config, one.label).max_new_tokens for one in (gsm8k, humaneval)] == [512, 1024]
    bounded = load(tmp_path / "c.toml", ["gconfig.max_new_tokens=64"], {})
    assert {sampling_of(bounded, one).max_new_tokens for one in ("gsm8k", "humaneval")} == {64}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"gconfig": {"temperature": 0}},
            r"greedy samples of one prompt.*\(source 'capitals' of \[\[data.source\]\]\)",
        ),
        ({"gconfig": {"n_samples": 1}}, "a group baseline needs at least 2 samples: gconfig.n_samples is 1"),
        ({"gconfig": {"n_samples": 99}}, "max_concurrent_rollouts .* must hold one group: gconfig.n_samples is 99"),
        ({"evaluate": {"stop": [""]}}, "a text of gconfig.stop has at least one character"),
    ],
)
def test_settings_of_a_source_pass_the_rules_of_those_of_the_run(
    config: Config, change: dict[str, dict[str, object]], said: str
) -> None:
    sums, capitals = (one.model_dump() for one in config.data.source)
    tree = config.model_dump() | {"data": config.data.model_dump() | {"source": (sums, capitals | change)}}
    with pytest.raises(ConfigError, match=said):
        check(Config.model_validate(tree))


def test_a_stage_without_effect_is_refused(config: Config) -> None:
    own = [one.model_copy(update={"gconfig": OwnGeneration(n_samples=2)}) for one in config.data.source]
    stage = StageConfig.model_validate({"from_step": 2, "gconfig": {"n_samples": 4}})
    data, run = (
        config.data.model_copy(update={"source": tuple(own)}),
        config.run.model_copy(update={"stage": (stage,)}),
    )
    with pytest.raises(ConfigError, match=r"no effect of .*gconfig\.n_samples"):
        check(config.model_copy(update={"data": data, "run": run}))
