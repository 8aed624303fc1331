"""areal_convert: settings of verl, TRL and AReaL become a TOML that our loader accepts."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.rewards.functions import formats
from areal_bus.config.data import SourceConfig
from areal_bus.config.loader import load, resolve
from areal_bus.errors import ConfigError
from areal_convert.__main__ import SYSTEMS, main, report, tree_of
from areal_convert.mapping import NO_EFFECT, PLACEMENT, Converted, convert
from areal_convert.reading import leaves, read_foreign

EXAMPLES: dict[str, dict[str, Any]] = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))
    for path in (Path(__file__).parent / "examples").iterdir()
}
EXPECTED = {
    "verl": {
        "data.source": [
            SourceConfig(path=str(Path(f"~/{name}.parquet").expanduser()), name=name, weight=1.0).model_dump(
                mode="json"
            )
            for name in "ab"
        ],
        "data.answer_key": "reward_model.ground_truth",
        "data.max_refill": 128,
        "data.chat_template_kwargs": {"enable_thinking": False},
        "gconfig.n_samples": 5,
        "rollout.engine": "vllm",
        "rollout.max_concurrent_rollouts": 6,  # one evaluation and one group
        "actor.lr": 1e-6,
        "actor.lr_warmup_steps": 20,
        "actor.lr_schedule": "cosine",
        "actor.adam_beta1": 0.8,
        "actor.weight_decay": 0.01,  # verl's default
        "actor.ppo_n_minibatches": 4,
        "actor.kl_ctl": 0.01,
        "actor.kl_estimator": "k3",
        "actor.eps_clip_higher": 0.28,
        "actor.loss": "gspo",
        "actor.aggregation_length": 1000,
        "actor.overlong_tokens": 128,
        "actor.lora.rank": 32,
        "actor.lora.alpha": 16.0,  # verl's default
        "actor.correction": "tis",
        "rollout.max_head_offpolicyness": 0,  # verl's trainer is synchronous
        "data.long_prompts": "refuse",  # verl's default
        "reward.function": "r:score",
        "run.name": "a-b",
        "evaluate.every_steps": 5,
        "journal.tracker": ["tensorboard"],
    },
    "trl": {
        "data.path": "trl-lib/DeepMath-103K:default",
        "data.batch_size": 8,
        "actor.ppo_n_minibatches": 2,
        "run.total_train_steps": 50,  # 100 optimizer steps
        "actor.lr_warmup_steps": 5,  # a tenth
        "rollout.max_head_offpolicyness": 0,  # GRPOTrainer is synchronous
        "actor.advantage": "dr_grpo",
        "actor.aggregation": "seq-mean-token-sum-norm",
        "actor.kl_ctl": 0.04,
        "actor.correction": "tis",
        "actor.lr_schedule": "linear",  # TRL's default
        "reward.terms": [
            {"function": "math", "weight": 1.0, "name": "accuracy_reward"},
            {"function": "my_lib.rewards:custom", "weight": 0.5, "name": "custom"},
        ],
        "gconfig.top_k": 20,
        "actor.lora.variant": ["dora"],
        "actor.lora.target_modules": ["q_proj", "v_proj"],
    },
    "areal": {
        "data.task": "gsm8k",
        "rollout.engine": "sglang",
        "topology.generators": 4,
        "topology.learners": 4,
        "topology.tensor_parallel": 2,
        "rollout.max_concurrent_rollouts": 64,
        "rollout.max_head_offpolicyness": 2,
        "actor.advantage": "gae",
        "critic.path": "Qwen/Qwen2.5-1.5B-Instruct",
        "actor.normalize_batch": "all",
        "actor.behav_imp_weight_cap": 5.0,
        "actor.adam_eps": 1e-8,
        "actor.lora.rank": 8,
        "actor.ppo_n_minibatches": 4,  # AReaL's default
    },
}
ABSENT = {
    "verl": ["actor_rollout_ref.rollout.top_p", "reward_model.overlong_buffer.log_it"],
    "trl": ["sync_ref_model"],
    "areal": ["gconfig.frequency_penalty", "actor.optimizer.warmup_steps_proportion"],
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_file_is_recognised_and_becomes_a_toml_that_a_start_accepts(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, ours = tmp_path / "theirs.yaml", tmp_path / "mine" / "ours.toml"
    theirs.write_text(yaml.safe_dump(EXAMPLES[name]))
    assert main([str(theirs), "--to", str(ours), "--all"]) == 0
    printed = capsys.readouterr().out
    found = dict(leaves(load(ours, environ={}).model_dump(mode="json")))
    expected = dict(leaves(EXPECTED[name]))
    assert {key: found.get(key) for key in expected} == expected
    for key in ABSENT[name]:
        assert f"  {key}: " in printed, printed
        assert f"#   {key}: " in ours.read_text()
    with pytest.raises(ConfigError, match="a new file"):
        main([str(theirs), "--to", str(ours)])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_part_of_a_file_is_converted_to_settings_that_go_together(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(SYSTEMS)))
    system, flat = SYSTEMS[name], dict(leaves(EXAMPLES[name]))
    kept = data.draw(st.sets(st.sampled_from(sorted(flat))))
    found = convert(system, {key: value for key, value in flat.items() if key in kept and "${" not in str(value)})
    resolve(tree_of(found), "converted.toml", environ={})
    assert found.ours["model.path"]


@pytest.mark.parametrize(
    ("text", "options", "why"),
    [
        ("a: [", [], "valid YAML"),
        ("- 1", [], "settings by name"),
        ("", [], "holds nothing"),
        ("epochs: 3", [], "unknown origin"),
        ("epochs: 3", ["--from", "trl"], "no key of .* is one"),
        ("learning_rate: fast", [], "learning_rate is no value that TRL accepts: it is 'fast'"),
        (
            "{loss_type: sapo, sapo_temperature_pos: 1.0, sapo_temperature_neg: hot}",
            [],
            "^sapo_temperature_neg is no .* 'hot'",
        ),
        (
            "{loss_type: sapo, sapo_temperature_pos: hot, sapo_temperature_neg: 1.0}",
            [],
            "^sapo_temperature_pos is no .* 'hot'",
        ),
        (
            "{actor_rollout_ref: {model: {lora_rank: 8, lora_alpha: big}}}",
            [],
            "^actor_rollout_ref.model.lora_alpha is no",
        ),
        (
            "{distillation: {enabled: 1}, algorithm: {}}",
            [],
            "distillation.enabled is no value that verl accepts: it is 1",
        ),
        ("gconfig: {n_samples: 1.5}\nrollout: {x: 1}", [], "gconfig.n_samples is no value that AReaL accepts"),
        ("algorithm: {lam: '${algorithm.lam}'}", [], "endless reference"),
        ("learning_rate: -1.0", [], "do not go together here: actor.lr must be a number, above 0"),
    ],
)
def test_wrong_input_gives_one_sentence(text: str, options: list[str], why: str, tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text(text)
    with pytest.raises(ConfigError, match=why) as caught:
        main([str(tmp_path / "wrong.yaml"), *options])
    assert "\n" not in str(caught.value)


def test_json_configs_are_converted_and_missing_values_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="readable"):
        read_foreign(tmp_path / "none.json")
    file = tmp_path / "grpo.json"
    file.write_text(json.dumps({"num_generations": 4, "learning_rate": "1e-6", "lr_scheduler_type": "polynomial"}))
    assert main([str(file)]) == 0
    printed = capsys.readouterr()
    assert 'path = "MODEL"' in printed.out
    assert "set data.path yourself" in printed.err
    assert "'polynomial' is not there" in printed.err
    (tmp_path / "r.yaml").write_text("a: {b: 2, c: '${.b}', d: '${oc.select:x.y,5}', e: 'n-${a.b}', f: '???'}")
    assert read_foreign(tmp_path / "r.yaml") == {"a.b": 2, "a.c": 2, "a.d": 5, "a.e": "n-2", "a.f": None}
    (tmp_path / "c.yaml").write_text("a: '${oc.env:LR,1e-6}'\nc: null\nd: '${c}'\ne: ['${oc.env:DIR,x}/y']\n")
    assert read_foreign(tmp_path / "c.yaml") == {"a": 1e-6, "c": None, "d": None, "e": ["x/y"]}


PUBLISHED = sorted((Path(__file__).parent / "published").glob("*.yaml"))


def converted(name: str, rows: int | None = None, **values: Any) -> Converted:
    """Of settings whose dots are written as two underscores."""
    found = convert(SYSTEMS[name], {key.replace("__", "."): value for key, value in values.items()}, rows)
    resolve(tree_of(found), "converted.toml", environ={})
    return found


def assert_each_key_is_in_one_list(found: Converted, keys: set[str]) -> None:
    lists = [set(found.mapped), set(found.lost), set(found.left_out)]
    assert set().union(*lists) == keys
    assert sum(map(len, lists)) == len(keys)


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_each_published_setting_is_mapped_or_lost_or_left_out(path: Path) -> None:
    values = read_foreign(path)
    found = convert(SYSTEMS[path.stem.partition("_")[0]], values)
    resolve(tree_of(found), "converted.toml", environ={})
    assert_each_key_is_in_one_list(found, set(values))
    assert not [key for key, why in found.lost.items() if why.startswith(("not known", "unknown"))]
    assert all(why for why in found.lost.values())


VALUES = st.one_of(st.none(), st.booleans(), st.integers(-3, 9), st.sampled_from(["x", "", "none"]), st.just([1]))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.sampled_from(PUBLISHED), st.data())
def test_an_invented_setting_is_in_one_list(path: Path, data: st.DataObject) -> None:
    flat = read_foreign(path)
    sections = sorted({key.rpartition(".")[0] for key in flat})
    section = data.draw(st.sampled_from(sections))
    key = f"{section}.zz_invented".lstrip(".") + data.draw(st.sampled_from(["", ".deeper.yet"]))
    found = convert(SYSTEMS[path.stem.partition("_")[0]], flat | {key: data.draw(VALUES)})
    assert_each_key_is_in_one_list(found, {*flat, key})


@pytest.mark.parametrize(
    ("name", "sections"),
    [
        ("verl", "data actor_rollout_ref actor_rollout_ref.actor actor_rollout_ref.rollout actor_rollout_ref.model"),
        ("verl", "actor_rollout_ref.actor.optim actor_rollout_ref.rollout.val_kwargs algorithm trainer reward"),
        ("verl", "algorithm.rollout_correction algorithm.filter_groups reward.sandbox_fusion async_training critic"),
        ("trl", ""),
        ("areal", "actor actor.optimizer actor.rejection_sampling actor.reward_norm gconfig eval_gconfig rollout"),
        ("areal", "train_dataset valid_dataset evaluator saver recover ref critic cluster sglang vllm"),
    ],
)
def test_an_unknown_setting_is_printed_by_name(name: str, sections: str) -> None:
    keys = [f"{section}.zz_invented".lstrip(".") for section in sections.split() or [""]]
    found = convert(SYSTEMS[name], dict.fromkeys(keys, 3))
    assert {key: found.lost.get(key) for key in keys} == dict.fromkeys(keys, "not known to this tool")
    printed = report(found, SYSTEMS[name], None, with_all=False)
    assert all(f"  {key}: not known to this tool" in printed for key in keys)


def test_convert_all_lists_unset_and_placement_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "verl.yaml"
    file.write_text(
        "algorithm: {use_pf_ppo: false, pf_ppo: {weight_pow: 2.0}}\ntrainer: {device: cuda, test_freq: 3}\n"
    )
    assert main([str(file), "--all"]) == 0
    printed = capsys.readouterr().err
    assert "left out (off, unset, or the same here): 2 keys\n  algorithm.pf_ppo.weight_pow\n" in printed
    assert f"left out ({PLACEMENT}): 1 keys\n  trainer.device\n" in printed
    assert "  trainer.test_freq: set evaluate.path: the file names no problems" in printed


def test_overrides_are_read_as_settings_and_references_to_sections_as_theirs(tmp_path: Path) -> None:
    (tmp_path / "overrides.yaml").write_text(
        "- data.train_batch_size=32\n- +algorithm.lam=0.9\n- trainer.logger=[a,b]\n"
    )
    assert read_foreign(tmp_path / "overrides.yaml") == {
        "data.train_batch_size": 32,
        "algorithm.lam": 0.9,
        "trainer.logger": ["a", "b"],
    }
    (tmp_path / "without.yaml").write_text("- ~trainer.logger\n- data.train_batch_size=32\n")
    assert read_foreign(tmp_path / "without.yaml") == {"trainer.logger": None, "data.train_batch_size": 32}
    (tmp_path / "sections.yaml").write_text("a: {b: {lr: 1, x: {}}}\nc: {b: '${a.b}'}\n")
    assert read_foreign(tmp_path / "sections.yaml") == {"a.b.lr": 1, "a.b.x": {}, "c.b.lr": 1, "c.b.x": {}}


def mapped() -> Iterator[Any]:
    """The rows of mapped.txt: system, its settings, ours, what is lost."""
    text = (Path(__file__).parent / "mapped.txt").read_text(encoding="utf-8")
    short = re.findall(r"^# ([A-Z]+) = (\S+)$", text, re.M)
    for line in text.splitlines():
        if line and not line.startswith("#"):
            for name, key in short:
                line = re.sub(rf"\b{name}(?=\b|_)", key, line)
            system, values, ours, lost = (cell.strip() for cell in line.split("|"))
            theirs = yaml.safe_load(f"{{{values}}}")
            yield pytest.param(
                system, theirs, yaml.safe_load(f"{{{ours}}}"), set(lost.split()), id=f"{system} {' '.join(theirs)}"[:60]
            )


@pytest.mark.parametrize(("name", "values", "ours", "lost"), list(mapped()))
def test_settings_become_ours_or_are_lost_by_name(
    name: str, values: dict[str, Any], ours: dict[str, Any], lost: set[str]
) -> None:
    found = convert(SYSTEMS[name], values)
    resolve(tree_of(found), "converted.toml", environ={})
    assert {key: found.ours.get(key) for key in ours} == ours
    assert {
        key for key in found.ours if key.startswith("actor.correction_")
    } <= ours.keys() or "algorithm.rollout_correction.rollout_is" in values
    assert set(found.lost) == lost
    assert_each_key_is_in_one_list(found, set(values))


def test_a_falling_rate_ends_with_the_run_that_counts_passes() -> None:
    falling = {"num_train_epochs": 2, "lr_scheduler_type": "cosine", "warmup_ratio": 0.1}
    batch = {"per_device_train_batch_size": 8, "num_generations": 4, "gradient_accumulation_steps": 4}
    found = converted("trl", 4000, **falling, **batch)
    assert (found.ours["run.total_train_steps"], found.ours["actor.lr_warmup_steps"]) == (1000, 100)
    unknown = converted("trl", **falling, **batch)
    assert unknown.ours["run.total_train_steps"] == 1
    assert "--rows" in unknown.to_set["run.total_train_steps"]
    assert "warmup_ratio" in unknown.lost
    constant = converted("trl", **falling | {"lr_scheduler_type": "constant", "warmup_ratio": 0.0}, **batch)
    assert constant.ours["run.total_train_steps"] == 1_000_000
    assert constant.ours["data.total_train_epochs"] == 2


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>\nfirst this\n</think>\nthe answer is 4", 1.0),
        ("<think>first</think>4", 1.0),
        ("<think>\nfirst this\nthe answer is 4", 0.0),
        ("first</think>4", 0.0),
        ("<think>a<think>b</think>4", 0.0),
        ("so: <think>a</think>4", 0.0),
    ],
)
def test_trl_think_format_scores_as_in_trl(completion: str, reward: float) -> None:
    found = converted("trl", reward_funcs="think_format_reward")
    assert found.ours["reward.function"] == "format"
    formats.configure(formats.FormatOptions(pattern=found.ours["reward.format.pattern"]))
    try:
        assert formats.score("", completion, {}).reward == reward
    finally:
        formats.configure(formats.FormatOptions())


def test_intervals_in_passes_become_updates_where_the_number_of_rows_is_given() -> None:
    given: dict[str, Any] = {"train_dataset.batch_size": 50, "saver.freq_epochs": 1, "evaluator.freq_epochs": 2}
    given["valid_dataset.path"] = "t.jsonl"
    found = convert(SYSTEMS["areal"], given, 1000)
    assert (found.ours["checkpoint.every_steps"], found.ours["evaluate.every_steps"]) == (20, 40)
    assert {"saver.freq_epochs", "evaluator.freq_epochs"} <= found.mapped.keys()
    assert convert(SYSTEMS["areal"], given | {"recover.freq_steps": 7}, 1000).ours["checkpoint.every_steps"] == 7
    both = {"saver.freq_epochs": 3, "recover.freq_epochs": 1}
    assert convert(SYSTEMS["areal"], given | both, 1000).ours["checkpoint.every_steps"] == 20
    unknown = convert(SYSTEMS["areal"], given)
    assert unknown.lost["evaluator.freq_epochs"] == "set evaluate.every_steps, or convert with --rows N"
    assert "checkpoint.every_steps" not in unknown.ours


def test_several_training_files_of_verl_are_sources_of_names_of_their_own() -> None:
    files = ["/gsm8k/train.parquet", "/math/train.parquet", "/x/math/train.parquet", "/code.parquet"]
    found = convert(SYSTEMS["verl"], {"data.train_files": files, "data.train_max_samples": 100})
    assert [source["path"] for source in found.ours["data.source"]] == files
    names = [source["name"] for source in found.ours["data.source"]]
    assert names == ["gsm8k-train", "math-train-1", "math-train-2", "code"]
    assert "data.path" not in found.ours
    assert "set each weight to the file's number of rows" in found.notes["data.source"]
    assert found.notes["data.limit"].startswith("of each file")
    assert found.mapped["data.train_files"] == ["data.source"]


def test_several_validation_files_of_verl_are_sets_of_the_evaluation() -> None:
    files = ["math.parquet", "a/gsm8k test.parquet", "b/gsm8k test.parquet"]
    found = converted("verl", data__val_files=files, trainer__test_freq=5)
    assert found.ours["evaluate.path"] == "math.parquet"
    assert found.ours["evaluate.sets"] == [
        {"path": "a/gsm8k test.parquet", "name": "a-gsm8k-test"},
        {"path": "b/gsm8k test.parquet", "name": "b-gsm8k-test"},
    ]
    assert resolve(tree_of(found), "converted.toml", environ={}).evaluate.sets[1].name == "b-gsm8k-test"
    assert found.lost == {}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("${mul:10,3}", "${mul:10,3}"),
        ("${oc.env:STEPS}", "${oc.env:STEPS}"),
        ("${trainer.other}", "${trainer.other}"),
        ("1${now:%Y}", "1${now:%Y}"),
    ],
)
def test_a_value_that_the_file_does_not_resolve_is_lost_by_name(value: str, shown: str, tmp_path: Path) -> None:
    file = tmp_path / "verl.yaml"
    file.write_text(json.dumps({"trainer": {"total_training_steps": value, "default_local_dir": value}}))
    found = convert(SYSTEMS["verl"], read_foreign(file))
    assert found.lost == {"trainer.total_training_steps": f"the file does not say what {shown} is: set it yourself"}
    assert found.left_out == {"trainer.default_local_dir": PLACEMENT}


def test_an_empty_section_is_left_out_and_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('\ufeff{"actor_rollout_ref": {}, "data": {"train_batch_size": 8}}')
    found = convert(SYSTEMS["verl"], read_foreign(tmp_path / "c.json"))
    assert (found.left_out, found.lost) == ({"actor_rollout_ref": NO_EFFECT}, {})
