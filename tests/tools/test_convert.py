"""tools.convert: settings of verl, TRL and AReaL become a TOML that our loader accepts."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_bus.config.loader import load, resolve
from areal_bus.errors import ConfigError
from tools.convert.__main__ import SYSTEMS, main, tree_of
from tools.convert.mapping import convert
from tools.convert.reading import leaves, read_foreign
from tools.convert.tables import page, with_table

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
    "reward_model": {"overlong_buffer": {"enable": True, "len": 128, "penalty_factor": 0.5}},
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
        "data.path": str(Path("~/a.parquet").expanduser()),
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
        "reward.function": "r:score",
        "run.name": "a-b",
        "evaluate.every_steps": 5,
        "journal.tracker": ["tensorboard"],
    },
    "trl": {
        "data.path": "trl-lib/DeepMath-103K:default",
        "data.batch_size": 8,
        "actor.ppo_n_minibatches": 2,
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
        "data.train_files",
        "actor_rollout_ref.actor.ppo_epochs",
        "gconfig.top_p",
    ],
    "trl": ["use_dora", "per_device_train_batch_size"],
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


def test_json_references_and_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_pages_have_the_tables_of_the_tool(name: str) -> None:
    text = page(SYSTEMS[name]).read_text(encoding="utf-8")
    assert text == with_table(text, SYSTEMS[name])
