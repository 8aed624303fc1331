"""AReaL's GRPOConfig and PPOConfig as YAML."""

import re
from pathlib import Path
from typing import Any

from tools.convert.fitting import tidy
from tools.convert.mapping import Absent, Foreign, Key, Ours, System
from tools.convert.values import (
    PRECISIONS,
    SCHEDULES,
    adapters,
    as_number,
    as_truth,
    as_whole,
    chosen,
    clip_range,
    number,
    path_of,
    positive,
    run_name,
    truth,
    whole,
)

BACKEND = re.compile(r"(?P<engine>[a-z]+):(?P<sizes>(?:[a-z]\d+)+)")
GSM8K = "openai/gsm8k"


def sizes_of(text: str) -> dict[str, int]:
    """ "d4p1t2" as sizes by letter."""
    return {letter: int(size) for letter, size in re.findall(r"([a-z])(\d+)", text)}


def backend(value: Any, foreign: Foreign) -> Ours:
    found = BACKEND.fullmatch(str(value))
    if found is None or found["engine"] not in ("sglang", "vllm"):
        return foreign.drop("rollout.backend", f"{value!r} is no ENGINE:d4t1 of sglang or vllm")
    sizes = sizes_of(found["sizes"])
    return {
        "rollout.engine": found["engine"],
        "topology.generators": sizes.get("d", 1),
        "topology.tensor_parallel": sizes.get("t", 1),
    }


def learners(value: Any, foreign: Foreign) -> Ours:
    found = BACKEND.fullmatch(str(value))
    if found is None:
        return foreign.drop("actor.backend", f"{value!r} is no BACKEND:d4")
    sizes = sizes_of(found["sizes"])
    others = {letter: size for letter, size in sizes.items() if letter != "d" and size > 1}
    if others:
        foreign.drop("actor.backend", "learners shard by FSDP2 only: other sizes are left out")
    return {"topology.learners": sizes.get("d", 1)}


def both(value: Any, foreign: Foreign) -> Ours:
    """The older allocation_mode: "sglang:d4t1+d4t1"."""
    first, _, second = str(value).partition("+")
    trained = second if ":" in second else f"fsdp:{second}"
    return backend(first, foreign) | (learners(trained, foreign) if second else {})


def advantage(value: Any, foreign: Foreign) -> Ours:
    """By the mean of reward_norm; its standard deviation makes grpo of dr_grpo."""
    has_std = foreign.get("actor.reward_norm.std_level") is not None
    if str(value) == "batch":
        return {"actor.advantage": "reinforce"}
    if truth(foreign.get("actor.reward_norm.mean_leave1out", False)):
        return {"actor.advantage": "rloo"}
    return {"actor.advantage": "grpo" if has_std else "dr_grpo"}


def normalize(value: Any, foreign: Foreign) -> Ours:
    if str(value) != "batch":
        return foreign.drop(
            "actor.adv_norm.std_level", f"{value!r} is not there: advantages are normalised over the batch"
        )
    return {"actor.normalize_batch": True, "actor.normalize_batch_over": "all"}


def rejection(value: Any, foreign: Foreign) -> Ours:
    """Bounds of the weight of the decoupled loss."""
    base = "actor.rejection_sampling."
    metric, level = str(foreign.get(f"{base}metric", "ratio")), str(foreign.get(f"{base}level", "token"))
    action = str(foreign.get(f"{base}action", "mask"))
    if metric == "ratio" and level == "token" and foreign.get(f"{base}lower") is None:
        return {"actor.behav_imp_weight_cap": number(value), "actor.behav_imp_weight_mode": action}
    ours: Ours = {
        "actor.correction": "tis" if level == "token" else "tis_sequence",
        "actor.correction_action": "mask" if metric != "ratio" else action,
        "actor.correction_upper": number(value),
    }
    if metric != "ratio":
        ours["actor.correction_metric"] = metric.removeprefix("kl_")
    if level == "sequence":
        ours["actor.correction_aggregate"] = str(foreign.get(f"{base}agg", "mean"))
    lower = foreign.get(f"{base}lower")
    return ours if lower is None else ours | {"actor.correction_lower": number(lower)}


def kl(value: Any, foreign: Foreign) -> Ours:
    if not number(value):
        return {}
    kind = str(foreign.get("actor.kl_estimator"))
    if kind != "k1":
        foreign.drop("actor.kl_estimator", f"{kind!r} in the reward has the wrong gradient: k1 takes its place")
    return {"actor.kl_ctl": number(value), "actor.kl_estimator": "k1", "actor.kl_in": "reward"}


def truncated(value: Any, foreign: Foreign) -> Ours:
    return {"actor.truncated_samples": "zero"} if truth(value) else {}


def overlong(value: Any, foreign: Foreign) -> Ours:
    if not truth(value):
        return {}
    factor, length = number(foreign.get("actor.overlong_penalty_factor", 1.0)), foreign.get("actor.overlong_tokens")
    if length is None:
        return foreign.drop("actor.overlong_reward_penalty", "its overlong_tokens is missing")
    return {"actor.overlong_tokens": whole(length), "actor.overlong_penalty_factor": factor}


def loss(value: Any, foreign: Foreign) -> Ours:
    return {"actor.loss": "gspo"} if str(value) == "sequence" else {}


def sapo(value: Any, foreign: Foreign) -> Ours:
    return {"actor.loss": "sapo"} if truth(value) else {}


def recompute(value: Any, foreign: Foreign) -> Ours:
    decoupled = truth(foreign.get("actor.use_decoupled_loss"))
    return {"actor.recompute_logprobs": truth(value) or decoupled, "actor.use_decoupled_loss": decoupled}


def proximal(value: Any, foreign: Foreign) -> Ours:
    if str(value) not in ("recompute", "loglinear"):
        return foreign.drop("actor.prox_logp_method", f"{value!r} is not there: recompute")
    return {"actor.prox_logp_method": str(value)}


def warmup(value: Any, foreign: Foreign) -> Ours:
    steps = foreign.get("total_train_steps")
    if not number(value):
        return {}
    if steps is None:
        return foreign.drop(
            "actor.optimizer.warmup_steps_proportion", "set actor.lr_warmup_steps: the number of steps is unknown"
        )
    return {"actor.lr_warmup_steps": round(number(value) * whole(steps))}


def greedy(value: Any, foreign: Foreign) -> Ours:
    return {"gconfig.temperature": 0.0} if truth(value) else {}


def top_k(value: Any, foreign: Foreign) -> Ours:
    return {"gconfig.top_k": whole(value)} if 0 < whole(value) < 100_000_000 else {}  # theirs for "all tokens"


def data_set(value: Any, foreign: Foreign) -> Ours:
    if value == GSM8K:
        return {"data.task": "gsm8k", "data.path": f"{GSM8K}:main"}
    return {"data.path": str(Path(str(value)).expanduser())}


def problems(value: Any, foreign: Foreign) -> Ours:
    return {"evaluate.path": f"{GSM8K}:main" if value == GSM8K else str(value)}


def lora(value: Any, foreign: Foreign) -> Ours:
    if not truth(value):
        return {}
    return adapters(
        foreign.get("actor.lora_rank"), foreign.get("actor.lora_alpha"), foreign.get("actor.target_modules")
    )


def trackers(value: Any, foreign: Foreign) -> Ours:
    return {"journal.tracker": ["wandb"]} if str(value) not in ("disabled", "None") else {}


def skip(value: Any, foreign: Foreign) -> Ours:
    """Read with another key."""
    return {}


OPTIMIZER, NORM, REJECTION = "actor.optimizer.", "actor.reward_norm.", "actor.rejection_sampling."
KEYS = (
    Key("actor.path", "model.path", "", None, path_of("model.path")),
    Key("actor.dtype", "model.dtype", "", "bfloat16", chosen("model.dtype", "actor.dtype", PRECISIONS)),
    Key("actor.gradient_checkpointing", "learner.gradient_checkpointing", "", None,
        as_truth("learner.gradient_checkpointing")),
    Key("actor.mb_spec.max_tokens_per_mb", "learner.max_tokens_per_mb", "", None,
        as_whole("learner.max_tokens_per_mb")),
    Key("actor.use_lora", "actor.lora.rank", "true: adapters; docs/lora.md", None, lora),
    Key("actor.lora_rank", "actor.lora.rank", "with use_lora", 32, skip),
    Key("actor.lora_alpha", "actor.lora.alpha", "with use_lora", 16, skip),
    Key("actor.target_modules", "actor.lora.target_modules", "with use_lora", None, skip),
    Key("train_dataset.path", "data.path",
        "a file or a Hugging Face id; AReaL's code also chooses fields and prompt: set "
        "data.question_key, data.answer_key and data.prompt", None, data_set),
    Key("train_dataset.batch_size", "data.batch_size", "", 1, as_whole("data.batch_size")),
    Key("train_dataset.shuffle", "data.shuffle", "", None, as_truth("data.shuffle")),
    Key("train_dataset.max_length", "data.max_prompt_tokens", "longer rows are refused, never dropped", None,
        as_whole("data.max_prompt_tokens")),
    Key("valid_dataset.path", "evaluate.path", "", None, problems),
    Key("gconfig.n_samples", "gconfig.n_samples", "", 1, as_whole("gconfig.n_samples")),
    Key("gconfig.max_new_tokens", "gconfig.max_new_tokens", "", 16384, as_whole("gconfig.max_new_tokens")),
    Key("gconfig.min_new_tokens", "gconfig.min_new_tokens", "", None, as_whole("gconfig.min_new_tokens")),
    Key("gconfig.temperature", "gconfig.temperature", "", None, as_number("gconfig.temperature")),
    Key("gconfig.greedy", "gconfig.temperature", "true: temperature 0", None, greedy),
    Key("gconfig.top_p", "gconfig.top_p", "", None, as_number("gconfig.top_p")),
    Key("gconfig.top_k", "gconfig.top_k", "", None, top_k),
    Key("gconfig.stop", "gconfig.stop", "", None),
    Key("gconfig.stop_token_ids", "gconfig.stop_token_ids", "", None,
        lambda value, foreign: {"gconfig.stop_token_ids": value} if value else {}),
    Key("gconfig.ignore_eos", "gconfig.ignore_eos", "", None, as_truth("gconfig.ignore_eos")),
    Key("gconfig.frequency_penalty", "gconfig.frequency_penalty", "", None, as_number("gconfig.frequency_penalty")),
    Key("eval_gconfig.n_samples", "evaluate.n_samples", "", None, as_whole("evaluate.n_samples")),
    Key("eval_gconfig.temperature", "evaluate.temperature", "", None, as_number("evaluate.temperature")),
    Key("rollout.max_head_offpolicyness", "rollout.max_head_offpolicyness", "a bound for every trained token here", 0,
        as_whole("rollout.max_head_offpolicyness")),
    Key("rollout.max_concurrent_rollouts", "rollout.max_concurrent_rollouts",
        "samples of one generator here, not of all",
        None, as_whole("rollout.max_concurrent_rollouts")),
    Key("rollout.backend", "rollout.engine, topology.generators, topology.tensor_parallel", "sglang:d4t1", None,
        backend),
    Key("actor.backend", "topology.learners", "fsdp:d4", None, learners),
    Key("allocation_mode", "rollout.engine, topology.generators, topology.tensor_parallel, topology.learners",
        "older; sglang:d4t1+d4t1", None, both),
    Key("cluster.n_gpus_per_node", "topology.gpus_per_host", "", 8, as_whole("topology.gpus_per_host")),
    Key("cluster.fileroot", "run.folder", "", None),
    Key("actor.ppo_n_minibatches", "actor.ppo_n_minibatches", "", 4, as_whole("actor.ppo_n_minibatches")),
    Key("actor.eps_clip", "actor.eps_clip", "", None, clip_range("actor.eps_clip", "actor.eps_clip")),
    Key("actor.eps_clip_higher", "actor.eps_clip_higher", "", None, as_number("actor.eps_clip_higher")),
    Key("actor.c_clip", "actor.c_clip", "", None, as_number("actor.c_clip")),
    Key("actor.m2_threshold", "actor.m2_threshold", "", None, as_number("actor.m2_threshold")),
    Key("actor.reward_scaling", "actor.reward_scaling", "", None, as_number("actor.reward_scaling")),
    Key("actor.reward_bias", "actor.reward_bias", "", None, as_number("actor.reward_bias")),
    Key("actor.reward_clip", "actor.reward_clip", "", 20.0, as_number("actor.reward_clip")),
    Key(f"{NORM}mean_level", "actor.advantage", "group: grpo, with mean_leave1out rloo, without "
        "std_level dr_grpo; batch: reinforce", None, advantage),
    Key(f"{NORM}std_level", "actor.advantage", "", None, skip),
    Key(f"{NORM}mean_leave1out", "actor.advantage", "", None, skip),
    Key(f"{NORM}group_size", "gconfig.n_samples", "always the same here", None, skip),
    Key(f"{NORM}eps", "actor.std_eps", "", None, as_number("actor.std_eps")),
    Key(f"{NORM}std_unbiased", "actor.std_unbiased", "", None, as_truth("actor.std_unbiased")),
    Key("actor.adv_norm.std_level", "actor.normalize_batch, actor.normalize_batch_over", "batch", None, normalize),
    Key("actor.adv_norm.mean_level", "actor.normalize_batch", "with std_level", None, skip),
    Key("actor.overlong_reward_penalty", "actor.overlong_tokens, actor.overlong_penalty_factor", "with its two keys",
        None,
        overlong),
    Key("actor.overlong_tokens", "actor.overlong_tokens", "with overlong_reward_penalty", None, skip),
    Key("actor.overlong_penalty_factor", "actor.overlong_penalty_factor", "with overlong_reward_penalty", None, skip),
    Key("actor.mask_no_eos_with_zero", "actor.truncated_samples", "true: zero", None, truncated),
    Key("actor.discount", "actor.discount", "with a critic", None, as_number("actor.discount")),
    Key("actor.gae_lambda", "actor.gae_lambda", "with a critic", None, as_number("actor.gae_lambda")),
    Key("actor.kl_ctl", "actor.kl_ctl, actor.kl_in", "in the reward", 0.1, kl),
    Key("actor.kl_estimator", "actor.kl_estimator", "", "k1", skip),
    Key("actor.use_sapo_loss", "actor.loss", "true: sapo", None, sapo),
    Key("actor.sapo_tau_pos", "actor.sapo_tau_pos", "with sapo", None, as_number("actor.sapo_tau_pos")),
    Key("actor.sapo_tau_neg", "actor.sapo_tau_neg", "with sapo", None, as_number("actor.sapo_tau_neg")),
    Key("actor.importance_sampling_level", "actor.loss", "sequence is gspo", None, loss),
    Key("actor.recompute_logprob", "actor.recompute_logprobs", "true with use_decoupled_loss", False, recompute),
    Key("actor.use_decoupled_loss", "actor.use_decoupled_loss", "", False, skip),
    Key("actor.prox_logp_method", "actor.prox_logp_method", "recompute, loglinear", None, proximal),
    Key(f"{REJECTION}upper", "actor.behav_imp_weight_cap", "of a token's ratio; other levels and metrics are "
        "actor.correction_*", None, rejection),
    Key(f"{REJECTION}action", "actor.behav_imp_weight_mode", "", None, skip),
    Key(f"{REJECTION}metric", "actor.correction_metric", "", None, skip),
    Key(f"{REJECTION}level", "actor.correction", "token is tis, sequence is tis_sequence", None, skip),
    Key(f"{REJECTION}agg", "actor.correction_aggregate", "", None, skip),
    Key(f"{REJECTION}lower", "actor.correction_lower", "", None, skip),
    Key("actor.behav_imp_weight_cap", "actor.behav_imp_weight_cap", "older", None,
        as_number("actor.behav_imp_weight_cap")),
    Key(f"{OPTIMIZER}lr", "actor.lr", "", 1e-3, as_number("actor.lr")),
    Key(f"{OPTIMIZER}weight_decay", "actor.weight_decay", "", 0.01, as_number("actor.weight_decay")),
    Key(f"{OPTIMIZER}beta1", "actor.adam_beta1", "", None, as_number("actor.adam_beta1")),
    Key(f"{OPTIMIZER}beta2", "actor.adam_beta2", "", 0.999, as_number("actor.adam_beta2")),
    Key(f"{OPTIMIZER}eps", "actor.adam_eps", "", None, as_number("actor.adam_eps")),
    Key(f"{OPTIMIZER}min_lr_ratio", "actor.min_lr_ratio", "", None, as_number("actor.min_lr_ratio")),
    Key(f"{OPTIMIZER}lr_scheduler_type", "actor.lr_schedule", "", None,
        chosen("actor.lr_schedule", f"{OPTIMIZER}lr_scheduler_type", SCHEDULES)),
    Key(f"{OPTIMIZER}warmup_steps_proportion", "actor.lr_warmup_steps", "of total_train_steps", None, warmup),
    Key(f"{OPTIMIZER}gradient_clipping", "actor.max_grad_norm", "", None, as_number("actor.max_grad_norm")),
    Key("ref.path", "reference.path", "with actor.kl_ctl", None),
    Key("teacher.path", "teacher.path", "set actor.distill_coef", None, lambda value, foreign: foreign.drop(
        "teacher.path", "set teacher.path and actor.distill_coef: docs/algorithms.md")),
    Key("critic.path", "critic.path", "with it actor.advantage is gae", None),
    Key("critic.optimizer.lr", "critic.lr", "with critic.path", None, as_number("critic.lr")),
    Key("critic.eps_clip", "critic.eps_clip", "with critic.path", None, as_number("critic.eps_clip")),
    Key("seed", "run.seed", "", None, as_whole("run.seed")),
    Key("experiment_name", "run.name", "", None, lambda value, foreign: {"run.name": run_name(value)}),
    Key("total_train_epochs", "data.total_train_epochs", "", 1, as_whole("data.total_train_epochs")),
    Key("total_train_steps", "run.total_train_steps", "unset: the passes end the run", None,
        positive("run.total_train_steps")),
    Key("saver.freq_steps", "checkpoint.every_steps", "", None, positive("checkpoint.every_steps")),
    Key("recover.freq_secs", "checkpoint.every_s", "", None, as_number("checkpoint.every_s")),
    Key("evaluator.freq_steps", "evaluate.every_steps", "", None, positive("evaluate.every_steps")),
    Key("evaluator.eval_before_train", "evaluate.before", "", None, as_truth("evaluate.before")),
    Key("stats_logger.wandb.mode", "journal.tracker", "online or offline: wandb", None, trackers),
)  # fmt: skip

ABSENT = (
    Absent("dynamic_bs", "see data.max_refill"),
    Absent("gconfig.max_tokens", "data.max_prompt_tokens and gconfig.max_new_tokens bound it"),
    Absent("gconfig.use_beam_search", "samples are drawn, not searched"),
    Absent("valid_dataset.*"),
    Absent("train_dataset.*"),
    Absent("rollout.agent.*", 'workflow.function = "agent": docs/agents.md'),
    Absent("workflow*", "set workflow.function: docs/from-areal.md"),
    Absent("reward_fn*", "set reward.function: docs/from-areal.md"),
    Absent("recover.mode", "--resume RUN or run.resume"),
    Absent("saver.freq_epochs", "set checkpoint.every_steps"),
    Absent("evaluator.freq_epochs", "set evaluate.every_steps"),
    Absent("stats_logger.swanlab.*", "no such tracker: journal.tracker"),
    *(Absent(pattern) for pattern in (
        "actor.*", "rollout.*", "ref.*", "critic.*", "teacher.*", "sglang.*", "vllm.*", "saver.*", "recover.*",
        "evaluator.*",
        "stats_logger.*", "perf_tracer.*", "cluster.*", "scheduler.*", "launcher.*", "gconfig.*", "eval_gconfig.*",
        "tokenizer_path", "trial_name", "enable_offload", "async_training", "cpu*", "mem*", "checkpointer.*",
    )),
)  # fmt: skip


def finish(ours: Ours, foreign: Foreign) -> None:
    if "critic.path" in ours:
        ours["actor.advantage"] = "gae"
    ours.setdefault("actor.advantage", "none")
    if n_generators := ours.get("topology.generators"):
        most = ours.get("rollout.max_concurrent_rollouts", 32 * n_generators)
        ours["rollout.max_concurrent_rollouts"] = max(1, most // n_generators)
    ours["reward.function"] = "math"
    if "data.task" not in ours:
        foreign.dropped["reward"] = 'AReaL names it in the training script: set reward.function = "module:function"'
    if not ours["actor.use_decoupled_loss"]:
        ours.pop("actor.behav_imp_weight_cap", None)
        ours.pop("actor.behav_imp_weight_mode", None)
        for key in [key for key in ours if key.startswith("actor.correction")]:
            del ours[key]
    if any(key.startswith("actor.correction") for key in ours):
        ours.pop("actor.use_decoupled_loss")
    if ours["actor.advantage"] in ("reinforce", "reinforce_plus_plus"):
        ours.pop("actor.normalize_batch", None)
        ours.pop("actor.normalize_batch_over", None)
    tidy(ours, foreign)


AREAL = System("areal", "AReaL", ("gconfig", "train_dataset", "rollout", "ref"), KEYS, ABSENT, finish)
