"""areal_convert: settings of verl, TRL and AReaL become a TOML that our loader accepts."""

import json
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

VERL: dict[str, Any] = {
    "algorithm": {
        "adv_estimator": "grpo",
        "use_kl_in_reward": False,
        "filter_groups": {"enable": True, "metric": "acc", "max_num_gen_batches": 3},
        "rollout_correction": {"rollout_is": "token", "rollout_is_threshold": 2.0},
    },
    "data": {
        "train_files": ["~/a.parquet", "~/b.parquet"],
        "val_files": "t.parquet",
        "train_batch_size": 64,
        "max_prompt_length": 256,
        "max_response_length": 1000,
        "apply_chat_template_kwargs": {"enable_thinking": False},
    },
    "actor_rollout_ref": {
        "model": {"path": "Qwen/Qwen2.5-0.5B", "lora_rank": 32},
        "actor": {
            "optim": {"lr": "1e-6", "lr_warmup_steps_ratio": 0.1, "warmup_style": "cosine", "betas": [0.8, 0.9]},
            "ppo_mini_batch_size": 16,
            "use_kl_loss": True,
            "kl_loss_coef": 0.01,
            "kl_loss_type": "low_var_kl",
            "clip_ratio_high": 0.28,
            "loss_agg_mode": "seq-mean-token-sum-norm",
            "ppo_epochs": 2,
            "policy_loss": {"loss_mode": "gspo"},
        },
        "rollout": {"name": "vllm", "n": 5, "temperature": 0.7, "top_p": 0.95, "max_num_seqs": 3},
    },
    "reward_model": {"overlong_buffer": {"enable": True, "len": 128, "penalty_factor": 0.5, "log_it": 1}},
    "custom_reward_function": {"path": "recipes/r.py", "name": "score"},
    "trainer": {
        "total_training_steps": 200,
        "logger": ["console", "tensorboard"],
        "test_freq": 5,
        "experiment_name": "a b",
        "default_local_dir": "checkpoints/${trainer.experiment_name}",
    },
}
TRL: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct",
    "dataset_name": "trl-lib/DeepMath-103K",
    "dataset_config": "default",
    "reward_funcs": ["accuracy_reward", "my_lib.rewards.custom"],
    "reward_weights": [1.0, 0.5],
    "learning_rate": 1e-5,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "steps_per_generation": 8,
    "num_generations": 8,
    "max_completion_length": 1024,
    "beta": 0.04,
    "loss_type": "dr_grpo",
    "use_vllm": True,
    "vllm_importance_sampling_mode": "token_truncate",
    "scale_rewards": False,
    "warmup_ratio": 0.1,
    "max_steps": 100,
    "use_peft": True,
    "use_dora": True,
    "sync_ref_model": True,
    "lora_target_modules": ["q_proj", "v_proj"],
    "report_to": ["wandb"],
    "epsilon_high": 0.28,
    "top_k": 20,
    "logging_steps": 5,
}
AREAL: dict[str, Any] = {
    "experiment_name": "gsm8k-grpo",
    "total_train_epochs": 10,
    "rollout": {"backend": "sglang:d4p1t2", "max_concurrent_rollouts": 256, "max_head_offpolicyness": 2},
    "gconfig": {"n_samples": 4, "max_new_tokens": 1024, "temperature": 1.0, "frequency_penalty": 0.5},
    "actor": {
        "backend": "fsdp:d4p1t1",
        "path": "Qwen/Qwen2.5-1.5B-Instruct",
        "optimizer": {"lr": 1.7e-5, "eps": "1e-8", "warmup_steps_proportion": 0.001},
        "eps_clip": 0.4,
        "use_lora": True,
        "lora_rank": 8,
        "target_modules": ["all-linear"],
        "temperature": "${gconfig.temperature}",
        "reward_bias": -0.5,
        "kl_ctl": 0.0,
        "recompute_logprob": True,
        "use_decoupled_loss": True,
        "rejection_sampling": {"metric": "ratio", "upper": 5.0},
        "reward_norm": {"mean_level": "group", "std_level": "group", "group_size": "${gconfig.n_samples}"},
        "adv_norm": {"mean_level": "batch", "std_level": "batch"},
    },
    "ref": {"path": "${actor.path}"},
    "train_dataset": {"path": "openai/gsm8k", "batch_size": 256},
    "critic": {"path": "${actor.path}"},
}
EXAMPLES = {"verl": VERL, "trl": TRL, "areal": AREAL}
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
        "actor.lora.dropout": 0.05,  # TRL's default
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
        "actor.normalize_batch_over": "all",
        "actor.behav_imp_weight_cap": 5.0,
        "actor.adam_eps": 1e-8,
        "actor.lora.rank": 8,
        "actor.ppo_n_minibatches": 4,  # AReaL's default
    },
}
ABSENT = {
    "verl": [
        "actor_rollout_ref.rollout.top_p",
        "reward_model.overlong_buffer.log_it",
    ],
    "trl": ["use_dora", "sync_ref_model"],
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
        ("epochs: 3", [], "do not tell whose settings"),
        ("epochs: 3", ["--from", "trl"], "no key of .* is one"),
        ("learning_rate: fast", [], "learning_rate is no value that TRL accepts: it is 'fast'"),
        ("gconfig: {n_samples: 1.5}\nrollout: {x: 1}", [], "gconfig.n_samples is no value that AReaL accepts"),
        ("algorithm: {lam: '${algorithm.lam}'}", [], "references must end"),
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


@pytest.mark.parametrize("base", ["custom_reward_function", "reward__custom_reward_function"])
def test_verl_reward_is_the_function_that_is_named(base: str) -> None:
    found = converted("verl", **{f"{base}__path": "recipes/r.py", f"{base}__name": "score"})
    assert found.ours["reward.function"] == "r:score"
    assert set(found.mapped) == {f"{base}.path".replace("__", "."), f"{base}.name".replace("__", ".")}


@pytest.mark.parametrize(
    ("values", "lost"),
    [
        ({"reward__reward_model__enable": True}, "reward.reward_model.enable"),
        ({"reward_model__enable": True}, "reward_model.enable"),
        ({"reward__reward_manager__name": "MyManager"}, "reward.reward_manager.name"),
        ({"reward__reward_manager__module__path": "m.py"}, "reward.reward_manager.module.path"),
    ],
)
def test_verl_reward_is_no_default_where_another_is_named(values: dict[str, Any], lost: str) -> None:
    found = converted("verl", **values)
    assert found.ours["reward.function"] == "SET_THIS:reward"
    assert lost in found.lost
    assert "reward.function" in found.to_set
    named = converted("verl", reward__custom_reward_function__path="r.py", **values)
    assert named.ours["reward.function"] == "r:compute_score"
    assert lost in named.lost


@pytest.mark.parametrize("base", ["reward__sandbox_fusion", "reward_model__sandbox_fusion", "sandbox_fusion"])
def test_verl_sandbox_is_the_reward_of_programs(base: str) -> None:
    found = converted("verl", **{f"{base}__url": "http://sandbox", f"{base}__memory_limit_mb": 2048})
    assert (found.ours["reward.function"], found.ours["reward.code.memory_mib"]) == ("code", 2048)
    named = converted("verl", custom_reward_function__path="r.py", **{f"{base}__url": "http://sandbox"})
    assert named.ours["reward.function"] == "r:compute_score"
    assert list(named.lost) == [f"{base}.url".replace("__", ".")]


@pytest.mark.parametrize(
    ("values", "eta"),
    [
        ({"data__train_batch_size": 8}, 0),
        ({"trainer__v1__trainer_mode": "sync", "trainer__v1__sampler__max_off_policy_threshold": 8}, 0),
        ({"trainer__v1__trainer_mode": "separate_async", "trainer__v1__sampler__max_off_policy_threshold": 4}, 4),
        ({"rollout__nnodes": 1, "rollout__n_gpus_per_node": 2}, 1),
        ({"async_training__staleness_threshold": 0.1}, 1),
        ({"async_training__staleness_threshold": 0}, 0),
    ],
)
def test_verl_eta_is_that_of_its_trainer(values: dict[str, Any], eta: int) -> None:
    assert converted("verl", **values).ours["rollout.max_head_offpolicyness"] == eta


IS, RS = "algorithm__rollout_correction__rollout_is", "algorithm__rollout_correction__rollout_rs"
BYPASS, LOSS = "algorithm__rollout_correction__bypass_mode", "algorithm__rollout_correction__loss_type"
CAP = "actor_rollout_ref__actor__tis_imp_ratio_cap"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {"correction": "none"}),
        ({IS: "token", f"{IS}_threshold": 3.0}, {"correction": "tis", "correction_upper": 3.0}),
        ({IS: "sequence"}, {"correction": "tis_sequence", "correction_upper": 2.0}),
        (
            {IS: "token", f"{IS}_threshold": "0.5_5.0"},
            {"correction": "tis", "correction_lower": 0.5, "correction_upper": 5.0, "correction_action": "mask"},
        ),
        ({BYPASS: True}, {"correction": "none", "recompute_logprobs": False}),
        ({BYPASS: True, IS: "token"}, {"correction": "none", "recompute_logprobs": False}),
        ({BYPASS: True, CAP: 2.0}, {"correction": "none", "recompute_logprobs": False}),
        ({CAP: 2.5}, {"correction": "tis", "correction_upper": 2.5}),
        (
            {BYPASS: True, LOSS: "reinforce", IS: "token"},
            {"correction": "tis", "correction_upper": 2.0, "loss": "reinforce"},
        ),
    ],
)
def test_verl_rollout_correction_is_mapped(values: dict[str, Any], expected: dict[str, Any]) -> None:
    ours = converted("verl", **values).ours
    assert {key: ours.get(f"actor.{key}") for key in expected} == expected
    assert {key for key in ours if key.startswith("actor.correction")} <= {f"actor.{key}" for key in expected}


def test_verl_rejection_without_weight_is_lost_by_name() -> None:
    found = converted("verl", **{RS: "seq_mean_k3", f"{RS}_threshold": 0.01})
    assert set(found.lost) == {RS.replace("__", "."), f"{RS}_threshold".replace("__", ".")}


def test_verl_sampling_of_training_and_evaluation_is_not_hidden() -> None:
    rollout, val = "actor_rollout_ref__rollout__", "actor_rollout_ref__rollout__val_kwargs__"
    found = converted("verl", **{f"{rollout}do_sample": False, f"{rollout}repetition_penalty": 1.1})
    assert (found.ours["gconfig.temperature"], found.ours["gconfig.repetition_penalty"]) == (0.0, 1.1)
    found = converted(
        "verl", **{f"{val}top_p": 0.7, f"{val}top_k": -1, f"{val}do_sample": True, f"{val}temperature": 1}
    )
    assert list(found.lost) == ["actor_rollout_ref.rollout.val_kwargs.top_p"]
    assert converted("verl", **{f"{rollout}top_p": 0.7, f"{val}top_p": 0.7}).lost == {}


@pytest.mark.parametrize(("given", "ours"), [(True, "drop"), (False, "refuse")])
def test_verl_long_prompts_are_dropped_or_refused(given: bool, ours: str) -> None:
    assert converted("verl", data__filter_overlong_prompts=given).ours["data.long_prompts"] == ours
    assert "data.truncation" in converted("verl", data__truncation="left").lost
    assert converted("areal", train_dataset__max_length=512).ours["data.long_prompts"] == "drop"


def test_verl_streamed_minibatches_are_one_batch() -> None:
    found = converted(
        "verl",
        async_training__trigger_parameter_sync_step=4,
        async_training__require_batches=2,
        actor_rollout_ref__actor__ppo_mini_batch_size=32,
        rollout__total_rollout_steps=51200,
        data__train_batch_size=0,
    )
    keys = ("data.batch_size", "actor.ppo_n_minibatches", "run.total_train_steps")
    assert [found.ours[key] for key in keys] == [256, 8, 200]


def test_trl_optimizer_steps_are_updates() -> None:
    steps = {"max_steps": 1000, "warmup_steps": 40, "save_steps": 100, "ref_model_sync_steps": 64, "beta": 0.1}
    generation = {"gradient_accumulation_steps": 2, "steps_per_generation": 8, "sync_ref_model": True}
    found = converted("trl", **steps, **generation)
    keys = ("run.total_train_steps", "actor.lr_warmup_steps", "checkpoint.every_steps", "reference.update_every")
    assert [found.ours[key] for key in keys] == [250, 10, 25, 16]
    by_size = converted("trl", max_steps=1000, generation_batch_size=64, per_device_train_batch_size=8)
    assert [by_size.ours[key] for key in ("run.total_train_steps", "data.batch_size")] == [125, 8]
    twice = converted("trl", max_steps=1000, num_iterations=2)
    assert [twice.ours[key] for key in ("run.total_train_steps", "actor.ppo_epochs")] == [500, 2]


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


def test_trl_asynchronous_keys_are_mapped() -> None:
    found = converted(
        "trl",
        max_staleness=3,
        weight_sync_steps=2,
        max_inflight_tasks=64,
        max_steps=100,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=8,
    )
    expected = {
        "rollout.max_head_offpolicyness": 3,
        "rollout.max_concurrent_rollouts": 64,
        "data.batch_size": 8,  # 2 steps of 8 x 4 completions, 8 a prompt
        "actor.ppo_n_minibatches": 2,
        "run.total_train_steps": 50,
        "gconfig.max_new_tokens": 2048,
        "actor.correction": "none",
        "actor.recompute_logprobs": False,
        "rollout.engine": "vllm",
    }
    assert {key: found.ours.get(key) for key in expected} == expected
    assert not found.lost


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


@pytest.mark.parametrize(
    "values", [{"reward_funcs": ["get_soft_overlong_punishment"]}, {"reward_model_name_or_path": "m"}]
)
def test_trl_reward_is_no_default_where_another_is_named(values: dict[str, Any]) -> None:
    found = converted("trl", **values)
    assert found.ours["reward.function"] == "SET_THIS:reward"
    assert set(found.lost) == set(values)


NORM, TOKENS = "actor__reward_norm__", "actor__adv_norm__"


@pytest.mark.parametrize(
    ("values", "advantage", "normalizes"),
    [
        ({}, "none", False),
        ({f"{NORM}mean_level": "group", f"{NORM}std_level": "group"}, "grpo", False),
        ({f"{NORM}mean_level": "group", f"{NORM}std_level": None}, "dr_grpo", False),
        ({f"{NORM}mean_level": "group", f"{NORM}mean_leave1out": True, f"{NORM}std_level": None}, "rloo", False),
        ({f"{NORM}mean_level": "group", f"{NORM}std_level": "batch"}, "dr_grpo", True),
        ({f"{NORM}mean_level": "batch", f"{NORM}std_level": "batch"}, "none", True),
        ({f"{NORM}group_size": 4}, "none", True),  # a norm without levels is one over the batch
        ({f"{NORM}mean_level": "batch", f"{NORM}std_level": None}, "reinforce", False),
        ({f"{TOKENS}mean_level": "batch", f"{TOKENS}std_level": "batch"}, "none", True),
        ({f"{TOKENS}mean_level": "batch", f"{TOKENS}std_level": None}, "reinforce", False),
    ],
)
def test_areal_norms_are_an_estimator(values: dict[str, Any], advantage: str, normalizes: bool) -> None:
    found = converted("areal", gconfig__n_samples=4, **values)
    assert found.ours["actor.advantage"] == advantage
    assert found.ours.get("actor.normalize_batch", False) is normalizes
    assert_each_key_is_in_one_list(found, {key.replace("__", ".") for key in ("gconfig__n_samples", *values)})


def test_areal_without_ref_or_rejection_has_no_reference_and_no_weight() -> None:
    decoupled = {"actor__use_decoupled_loss": True, "actor__recompute_logprob": True}
    found = converted("areal", **decoupled)
    assert "actor.kl_ctl" not in found.ours
    assert found.ours["actor.correction"] == "none"
    assert found.ours["actor.recompute_logprobs"] is True
    with_ref = converted("areal", ref__path="M", **decoupled)
    assert (with_ref.ours["actor.kl_ctl"], with_ref.ours["reference.path"]) == (0.1, "M")  # AReaL's default
    assert "actor.kl_ctl" in converted("areal", actor__kl_ctl=0.1, **decoupled).lost
    capped = converted("areal", actor__rejection_sampling__metric="ratio", **decoupled).ours
    assert [capped[f"actor.behav_imp_weight_{key}"] for key in ("cap", "mode")] == [5.0, "mask"]  # AReaL's defaults


def test_areal_truncation_and_overlong_penalty_have_their_order() -> None:
    penalty = {
        "actor__overlong_reward_penalty": True,
        "actor__overlong_tokens": 64,
        "actor__overlong_penalty_factor": 0.5,
    }
    found = converted("areal", actor__reward_scaling=10.0, **penalty)
    assert found.ours["actor.overlong_penalty_factor"] == 5.0  # scaled there, not here
    cut = {"actor__mask_no_eos_with_zero": True}
    assert converted("areal", **cut).ours["actor.truncated_samples"] == "zero"
    for changes in (penalty, {"actor__reward_bias": -0.5}, {f"{NORM}mean_level": "group", "gconfig__n_samples": 2}):
        assert converted("areal", **cut, **changes).ours["actor.truncated_samples"] == "mask"


def test_intervals_in_passes_become_updates_where_the_number_of_rows_is_given() -> None:
    given: dict[str, Any] = {"train_dataset.batch_size": 50, "saver.freq_epochs": 1, "evaluator.freq_epochs": 2}
    given["valid_dataset.path"] = "t.jsonl"
    found = convert(SYSTEMS["areal"], given, 1000)
    assert (found.ours["checkpoint.every_steps"], found.ours["evaluate.every_steps"]) == (20, 40)
    assert {"saver.freq_epochs", "evaluator.freq_epochs"} <= found.mapped.keys()
    assert convert(SYSTEMS["areal"], given | {"recover.freq_steps": 7}, 1000).ours["checkpoint.every_steps"] == 7
    assert (
        convert(SYSTEMS["areal"], given | {"saver.freq_epochs": 3, "recover.freq_epochs": 1}, 1000).ours[
            "checkpoint.every_steps"
        ]
        == 20
    )
    unknown = convert(SYSTEMS["areal"], given)
    assert unknown.lost["evaluator.freq_epochs"] == "set evaluate.every_steps, or convert with --rows N"
    assert "checkpoint.every_steps" not in unknown.ours


def test_several_training_files_of_verl_are_sources_of_names_of_their_own() -> None:
    files = ["/gsm8k/train.parquet", "/math/train.parquet", "/x/math/train.parquet", "/code.parquet"]
    found = convert(SYSTEMS["verl"], {"data.train_files": files, "data.train_max_samples": 100})
    assert [source["path"] for source in found.ours["data.source"]] == files
    assert [source["name"] for source in found.ours["data.source"]] == [
        "gsm8k-train",
        "math-train-1",
        "math-train-2",
        "code",
    ]
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


def test_references_with_a_default_are_resolved(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "a: '${oc.env:LR,1e-6}'\nb: '${oc.select:none.such,3}'\nc: null\nd: '${c}'\ne: ['${oc.env:DIR,x}/y']\n"
    )
    assert read_foreign(tmp_path / "c.yaml") == {"a": 1e-6, "b": 3, "c": None, "d": None, "e": ["x/y"]}


def test_an_empty_section_is_left_out_and_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('\ufeff{"actor_rollout_ref": {}, "data": {"train_batch_size": 8}}')
    found = convert(SYSTEMS["verl"], read_foreign(tmp_path / "c.json"))
    assert (found.left_out, found.lost) == ({"actor_rollout_ref": NO_EFFECT}, {})
