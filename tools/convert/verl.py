"""verl's settings (ppo_trainer.yaml, or a file with a part of it)."""

import math
from pathlib import Path
from typing import Any

from tools.convert.fitting import tidy
from tools.convert.mapping import Absent, Foreign, Key, Ours, System
from tools.convert.values import (
    ENGINES,
    PRECISIONS,
    SCHEDULES,
    adapters,
    as_number,
    as_truth,
    as_whole,
    chosen,
    in_module,
    number,
    path_of,
    positive,
    run_name,
    trackers,
    truth,
    whole,
)

ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.ref."
OPTIMIZER, VAL = f"{ACTOR}optim.", f"{ROLLOUT}val_kwargs."
ESTIMATORS = {
    "gae": "gae",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "opo": "opo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
}
LOSSES = {"vanilla": "ppo", "gspo": "gspo", "geo_mean": "gmpo", "cispo": "cispo", "sapo": "sapo"}
KL = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def file_of(ours: str, theirs: str) -> Any:
    """The first file of a list; the others have no counterpart."""

    def read(value: Any, foreign: Foreign) -> Ours:
        files = [value] if isinstance(value, str) else [str(one) for one in value]
        if len(files) > 1:
            foreign.drop(theirs, f"only the first of its {len(files)} files is used: join them into one")
        return {ours: str(Path(files[0]).expanduser())}

    return read


def estimator(value: Any, foreign: Foreign) -> Ours:
    theirs = "algorithm.adv_estimator"
    name = str(value).lower()
    if name not in ESTIMATORS:
        return foreign.drop(theirs, f"{name!r} is not there; actor.advantage keeps its default, grpo")
    is_plain = not truth(foreign.get("algorithm.norm_adv_by_std_in_grpo", True))
    return {"actor.advantage": "dr_grpo" if name.startswith("grpo") and is_plain else ESTIMATORS[name]}


def clip_high(value: Any, foreign: Foreign) -> Ours:
    low = foreign.get(f"{ACTOR}clip_ratio_low") or foreign.get(f"{ACTOR}clip_ratio")
    return {} if number(value) == low else {"actor.eps_clip_higher": number(value)}


def dual_clip(value: Any, foreign: Foreign) -> Ours:
    loss = LOSSES.get(str(foreign.get(f"{ACTOR}policy_loss.loss_mode", "vanilla")))
    return {"actor.c_clip": number(value)} if loss in ("ppo", "gspo") and number(value) > 1 else {}


def kl_loss(value: Any, foreign: Foreign) -> Ours:
    if not truth(value):
        return {}
    kind = str(foreign.get(f"{ACTOR}kl_loss_type")).rstrip("+")
    if KL.get(kind, "k1") == "k1":
        foreign.drop(f"{ACTOR}kl_loss_type", f"{kind!r} has no gradient as a loss, on average: k3 takes its place")
    coefficient = number(foreign.get(f"{ACTOR}kl_loss_coef"))
    estimator_name = {"k2": "k2"}.get(KL.get(kind, "k3"), "k3")
    return {"actor.kl_ctl": coefficient, "actor.kl_estimator": estimator_name, "actor.kl_in": "loss"}


def kl_reward(value: Any, foreign: Foreign) -> Ours:
    if not truth(value):
        return {}
    if truth(foreign.get(f"{ACTOR}use_kl_loss", False)):
        return foreign.drop(
            "algorithm.use_kl_in_reward", "the KL is in the loss or in the reward: here it is in the loss"
        )
    kind = KL.get(str(foreign.get("algorithm.kl_penalty")), "k1")
    if kind != "k1":
        foreign.drop("algorithm.kl_penalty", f"{kind!r} in the reward has the wrong gradient: k1 takes its place")
    coefficient = number(foreign.get("algorithm.kl_ctrl.kl_coef"))
    return {"actor.kl_ctl": coefficient, "actor.kl_estimator": "k1", "actor.kl_in": "reward"}


def warmup_share(value: Any, foreign: Foreign) -> Ours:
    steps, total = foreign.get(f"{OPTIMIZER}lr_warmup_steps", -1), foreign.get("trainer.total_training_steps")
    if number(steps) >= 0 or not number(value):
        return {}
    if total is None:
        return foreign.drop(
            f"{OPTIMIZER}lr_warmup_steps_ratio", "set actor.lr_warmup_steps: the number of steps is unknown"
        )
    return {"actor.lr_warmup_steps": round(number(value) * whole(total))}


def correction(value: Any, foreign: Foreign) -> Ours:
    level = str(value).lower()
    names = {"token": "tis", "sequence": "tis_sequence"}
    if level not in names:
        return foreign.drop(
            "algorithm.rollout_correction.rollout_is", f"{level!r} is not there: see docs/algorithms.md"
        )
    upper = number(foreign.get("algorithm.rollout_correction.rollout_is_threshold", 2.0))
    return {"actor.correction": names[level], "actor.correction_upper": upper}


def minibatches(value: Any, foreign: Foreign) -> Ours:
    return {"actor.ppo_n_minibatches": max(1, round(whole(foreign.get("data.train_batch_size")) / whole(value)))}


def reward_function(value: Any, foreign: Foreign) -> Ours:
    return {"reward.function": in_module(str(value), str(foreign.get("custom_reward_function.name")))}


def refill(value: Any, foreign: Foreign) -> Ours:
    """Dynamic sampling: so many batches of prompts for one of training, 0 without a limit."""
    if not truth(value):
        return {}
    n = whole(foreign.get("algorithm.filter_groups.max_num_gen_batches", 0))
    return {"data.max_refill": (n - 1 if n > 0 else 9) * whole(foreign.get("data.train_batch_size"))}


def overlong(value: Any, foreign: Foreign) -> Ours:
    if not truth(value):
        return {}
    base = "reward_model.overlong_buffer."
    factor, length = number(foreign.get(f"{base}penalty_factor", 1.0)), foreign.get(f"{base}len")
    if length is None:
        return foreign.drop(f"{base}enable", "its len is missing")
    return {"actor.overlong_tokens": whole(length), "actor.overlong_penalty_factor": factor}


def betas(value: Any, foreign: Foreign) -> Ours:
    first, second = value
    return {"actor.adam_beta1": number(first), "actor.adam_beta2": number(second)}


def greedy(value: Any, foreign: Foreign) -> Ours:
    return {} if truth(value) else {"evaluate.temperature": 0.0}


def top_k(value: Any, foreign: Foreign) -> Ours:
    return {"gconfig.top_k": whole(value)} if whole(value) > 0 else {}


def token_budget(value: Any, foreign: Foreign) -> Ours:
    return {"learner.max_tokens_per_mb": whole(value)} if truth(foreign.get(f"{ACTOR}use_dynamic_bsz", False)) else {}


def checkpointing(value: Any, foreign: Foreign) -> Ours:
    return {"checkpoint.every_steps": whole(value)} if whole(value) > 0 else {}


def once(value: Any, foreign: Foreign) -> Ours:
    return {} if whole(value) == 1 else foreign.drop(f"{ACTOR}ppo_epochs", "a batch is trained once here")


def lora(value: Any, foreign: Foreign) -> Ours:
    if whole(value) <= 0:
        return {}
    base = "actor_rollout_ref.model."
    return adapters(value, foreign.get(f"{base}lora_alpha"), foreign.get(f"{base}target_modules"))


def reward_model(value: Any, foreign: Foreign) -> Ours:
    if not truth(value):
        return {}
    return foreign.drop("reward_model.enable", 'no reward model here; a model behind a URL can grade: reward "judge"')


def several_turns(foreign: Foreign) -> Ours:
    return foreign.drop(f"{ROLLOUT}multi_turn.enable", "write a workflow, or bring an agent: docs/agents.md")


def adaptive(value: Any, foreign: Foreign) -> Ours:
    return (
        {} if value == "fixed" else foreign.drop("algorithm.kl_ctrl.type", "the coefficient is constant: actor.kl_ctl")
    )


def staleness(value: Any, foreign: Foreign) -> Ours:
    return {"rollout.max_head_offpolicyness": math.ceil(number(value))}


KEYS = (
    Key("actor_rollout_ref.model.path", "model.path", "", None, path_of("model.path")),
    Key(f"{ROLLOUT}dtype", "model.dtype", "", "bfloat16", chosen("model.dtype", f"{ROLLOUT}dtype", PRECISIONS)),
    Key("actor_rollout_ref.model.enable_gradient_checkpointing", "learner.gradient_checkpointing", "", True,
        as_truth("learner.gradient_checkpointing")),
    Key("actor_rollout_ref.model.lora_rank", "actor.lora.rank", "0: all weights are trained; docs/lora.md", None, lora),
    Key("actor_rollout_ref.model.lora_alpha", "actor.lora.alpha", "with lora_rank", 16, lambda value, foreign: {}),
    Key("actor_rollout_ref.model.target_modules", "actor.lora.target_modules", "with lora_rank", "all-linear",
        lambda value, foreign: {}),
    Key("data.train_files", "data.path", "one file; a list: its first", None, file_of("data.path", "data.train_files")),
    Key("data.val_files", "evaluate.path", "one file", None, file_of("evaluate.path", "data.val_files")),
    Key("data.prompt_key", "data.question_key", "chat messages", "prompt"),
    Key("data.train_max_samples", "data.limit", "-1: all", None, positive("data.limit")),
    Key("data.val_max_samples", "evaluate.limit", "-1: all", None, positive("evaluate.limit")),
    Key("data.train_batch_size", "data.batch_size", "prompts of one update", 1024, as_whole("data.batch_size")),
    Key("data.max_prompt_length", "data.max_prompt_tokens", "longer rows are refused, never truncated", 512,
        as_whole("data.max_prompt_tokens")),
    Key("data.max_response_length", "gconfig.max_new_tokens", "", 512, as_whole("gconfig.max_new_tokens")),
    Key("data.shuffle", "data.shuffle", "", None, as_truth("data.shuffle")),
    Key("data.seed", "run.seed", "", None, as_whole("run.seed")),
    Key("data.apply_chat_template_kwargs.enable_thinking", "data.chat_template_kwargs", "each argument by name", None,
        lambda value, foreign: {"data.chat_template_kwargs": {"enable_thinking": truth(value)}}),
    Key(f"{ROLLOUT}name", "rollout.engine", "vllm, sglang; hf is builtin", None,
        chosen("rollout.engine", f"{ROLLOUT}name", ENGINES)),
    Key(f"{ROLLOUT}n", "gconfig.n_samples", "samples of a prompt", 1, as_whole("gconfig.n_samples")),
    Key(f"{ROLLOUT}temperature", "gconfig.temperature", "", None, as_number("gconfig.temperature")),
    Key(f"{ROLLOUT}top_p", "gconfig.top_p", "", None, as_number("gconfig.top_p")),
    Key(f"{ROLLOUT}top_k", "gconfig.top_k", "-1 is 0", None, top_k),
    Key(f"{ROLLOUT}ignore_eos", "gconfig.ignore_eos", "", None, as_truth("gconfig.ignore_eos")),
    Key(f"{ROLLOUT}tensor_model_parallel_size", "topology.tensor_parallel", "with sglang and vllm", None,
        as_whole("topology.tensor_parallel")),
    Key(f"{ROLLOUT}max_num_seqs", "rollout.max_concurrent_rollouts", "", None,
        as_whole("rollout.max_concurrent_rollouts")),
    Key(f"{VAL}n", "evaluate.n_samples", "", 1, as_whole("evaluate.n_samples")),
    Key(f"{VAL}temperature", "evaluate.temperature", "", 0, as_number("evaluate.temperature")),
    Key(f"{VAL}do_sample", "evaluate.temperature", "false: temperature 0", None, greedy),
    Key("async_training.staleness_threshold", "rollout.max_head_offpolicyness", "rounded up; verl's other trainers are "
        "synchronous: 0", None, staleness),
    Key("algorithm.adv_estimator", "actor.advantage", "grpo with norm_adv_by_std_in_grpo = false is dr_grpo", "gae",
        estimator),
    Key("algorithm.gamma", "actor.discount", "with gae", None, as_number("actor.discount")),
    Key("algorithm.lam", "actor.gae_lambda", "with gae", None, as_number("actor.gae_lambda")),
    Key("algorithm.use_kl_in_reward", "actor.kl_ctl, actor.kl_in, actor.kl_estimator",
        "with kl_ctrl.kl_coef and kl_penalty", None, kl_reward),
    Key("algorithm.kl_ctrl.kl_coef", "actor.kl_ctl", "with use_kl_in_reward", 0.001, lambda value, foreign: {}),
    Key("algorithm.kl_ctrl.type", "", "fixed only", None, adaptive),
    Key("algorithm.kl_penalty", "actor.kl_estimator", "with use_kl_in_reward", "kl", lambda value, foreign: {}),
    Key("algorithm.rollout_correction.rollout_is", "actor.correction, actor.correction_upper",
        "token is tis, sequence is tis_sequence; unset: the decoupled loss of the paper", None, correction),
    Key("algorithm.filter_groups.enable", "data.max_refill", "dynamic sampling: prompts that replace groups without "
        "signal", None, refill),
    Key(f"{ACTOR}ppo_mini_batch_size", "actor.ppo_n_minibatches", "train_batch_size / ppo_mini_batch_size", 256,
        minibatches),
    Key(f"{ACTOR}ppo_epochs", "", "1 only", None, once),
    Key(f"{ACTOR}ppo_max_token_len_per_gpu", "learner.max_tokens_per_mb", "with use_dynamic_bsz", None, token_budget),
    Key(f"{ACTOR}clip_ratio", "actor.eps_clip", "", None, as_number("actor.eps_clip")),
    Key(f"{ACTOR}clip_ratio_low", "actor.eps_clip", "", None, as_number("actor.eps_clip")),
    Key(f"{ACTOR}clip_ratio_high", "actor.eps_clip_higher", "", None, clip_high),
    Key(f"{ACTOR}clip_ratio_c", "actor.c_clip", "with ppo and gspo", 3.0, dual_clip),
    Key(f"{ACTOR}policy_loss.loss_mode", "actor.loss", "vanilla is ppo, geo_mean is gmpo; gspo, cispo, sapo", None,
        chosen("actor.loss", f"{ACTOR}policy_loss.loss_mode", LOSSES)),
    Key(f"{ACTOR}loss_agg_mode", "actor.aggregation", "the same names", None),
    Key(f"{ACTOR}loss_scale_factor", "actor.aggregation_length", "with seq-mean-token-sum-norm", None,
        as_whole("actor.aggregation_length")),
    Key(f"{ACTOR}tau_pos", "actor.sapo_tau_pos", "with sapo", None, as_number("actor.sapo_tau_pos")),
    Key(f"{ACTOR}tau_neg", "actor.sapo_tau_neg", "with sapo", None, as_number("actor.sapo_tau_neg")),
    Key(f"{ACTOR}entropy_coeff", "actor.entropy_coef", "", None, as_number("actor.entropy_coef")),
    Key(f"{ACTOR}use_kl_loss", "actor.kl_ctl, actor.kl_in, actor.kl_estimator", "with kl_loss_coef and kl_loss_type",
        None, kl_loss),
    Key(f"{ACTOR}kl_loss_coef", "actor.kl_ctl", "with use_kl_loss", 0.001, lambda value, foreign: {}),
    Key(f"{ACTOR}kl_loss_type", "actor.kl_estimator", "mse is k2, low_var_kl is k3; kl has no gradient as a loss",
        "low_var_kl", lambda value, foreign: {}),
    Key(f"{ACTOR}grad_clip", "actor.max_grad_norm", "", None, as_number("actor.max_grad_norm")),
    Key(f"{OPTIMIZER}lr", "actor.lr", "", 1e-6, as_number("actor.lr")),
    Key(f"{OPTIMIZER}lr_warmup_steps", "actor.lr_warmup_steps", "-1: by the ratio", None,
        positive("actor.lr_warmup_steps")),
    Key(f"{OPTIMIZER}lr_warmup_steps_ratio", "actor.lr_warmup_steps", "of total_training_steps", None, warmup_share),
    Key(f"{OPTIMIZER}lr_scheduler_type", "actor.lr_schedule", "", None,
        chosen("actor.lr_schedule", f"{OPTIMIZER}lr_scheduler_type", SCHEDULES)),
    Key(f"{OPTIMIZER}warmup_style", "actor.lr_schedule", "older name", None,
        chosen("actor.lr_schedule", f"{OPTIMIZER}warmup_style", SCHEDULES)),
    Key(f"{OPTIMIZER}min_lr_ratio", "actor.min_lr_ratio", "", None, as_number("actor.min_lr_ratio")),
    Key(f"{OPTIMIZER}weight_decay", "actor.weight_decay", "", 0.01, as_number("actor.weight_decay")),
    Key(f"{OPTIMIZER}betas", "actor.adam_beta1, actor.adam_beta2", "", [0.9, 0.999], betas),
    Key(f"{OPTIMIZER}clip_grad", "actor.max_grad_norm", "", None, as_number("actor.max_grad_norm")),
    Key(f"{REF}model.path", "reference.path", "with a KL", None, path_of("reference.path")),
    Key("critic.optim.lr", "critic.lr", "with gae", None, as_number("critic.lr")),
    Key("critic.model.path", "critic.path", "with gae", None, path_of("critic.path")),
    Key("critic.cliprange_value", "critic.eps_clip", "with gae", 0.5, as_number("critic.eps_clip")),
    Key("critic.optim.weight_decay", "critic.weight_decay", "with gae", 0.01, as_number("critic.weight_decay")),
    Key(f"{ROLLOUT}multi_turn.enable", "workflow.function", "write a workflow, or bring an agent: docs/agents.md", None,
        lambda value, foreign: several_turns(foreign) if truth(value) else {}),
    Key("custom_reward_function.path", "reward.function", "the file's module and `name`; put the file beside the TOML",
        None, reward_function),
    Key("custom_reward_function.name", "reward.function", "", "compute_score", lambda value, foreign: {}),
    Key("reward_model.enable", "", "no reward model", None, reward_model),
    Key("reward_model.overlong_buffer.enable", "actor.overlong_tokens, actor.overlong_penalty_factor",
        "with len and penalty_factor", None, overlong),
    Key("trainer.total_epochs", "data.total_train_epochs", "", 30, as_whole("data.total_train_epochs")),
    Key("trainer.total_training_steps", "run.total_train_steps", "unset: the passes end the run", None,
        positive("run.total_train_steps")),
    Key("trainer.experiment_name", "run.name", "", None, lambda value, foreign: {"run.name": run_name(value)}),
    Key("trainer.logger", "journal.tracker", "wandb and tensorboard", None,
        lambda value, foreign: {"journal.tracker": found} if (found := trackers(value)) else {}),
    Key("trainer.n_gpus_per_node", "topology.gpus_per_host", "choose the split of GPUs: docs/choosing.md", None,
        as_whole("topology.gpus_per_host")),
    Key("trainer.save_freq", "checkpoint.every_steps", "-1: by time only", None, checkpointing),
    Key("trainer.max_actor_ckpt_to_keep", "checkpoint.keep", "", None, as_whole("checkpoint.keep")),
    Key("trainer.test_freq", "evaluate.every_steps", "-1: never", None, positive("evaluate.every_steps")),
    Key("trainer.val_before_train", "evaluate.before", "", True, as_truth("evaluate.before")),
)  # fmt: skip

ABSENT = (
    Absent("*_target_"),
    Absent("actor_rollout_ref.model.lora_adapter_path", "adapters begin at zero"),
    Absent("actor_rollout_ref.model.exclude_modules", "name the layers with adapters: actor.lora.target_modules"),
    Absent("data.filter_overlong_prompts", "rows over data.max_prompt_tokens are refused at the start: remove them"),
    Absent("data.truncation", "no prompt is truncated"),
    Absent("data.custom_cls*", "rows are files or Hugging Face ids"),
    Absent("data.sampler*", "rows are drawn in a shuffled order"),
    Absent("custom_reward_function.reward_kwargs*", "give the parameters of the function defaults"),
    Absent("reward_model.sandbox_fusion.url", 'programs run in a local sandbox: reward.function = "code"'),
    Absent("algorithm.kl_ctrl.*"),
    Absent("algorithm.pf_ppo.*"),
    Absent("algorithm.*", "no such part here: docs/algorithms.md lists what there is"),
    Absent("trainer.critic_warmup", "policy and critic train together from the first step"),
    Absent("reward_manager.*"),
    Absent("trainer.resume_mode", "--resume RUN or run.resume"),
    Absent("trainer.nnodes", "mpirun's ranks decide: docs/choosing.md"),
    Absent("critic.*"),
    Absent("reward_model.*"),
    Absent("actor_rollout_ref.*"),
    Absent("trainer.*"),
    Absent("data.*"),
    *(
        Absent(f"{name}.*")
        for name in ("global_profiler", "ray_kwargs", "ray_init", "transfer_queue", "async_training")
    ),
)


def finish(ours: Ours, foreign: Foreign) -> None:
    for key in ("algorithm.norm_adv_by_std_in_grpo", f"{ACTOR}use_dynamic_bsz"):
        foreign.read.add(key)
    for base in ("algorithm.filter_groups.", "reward_model.overlong_buffer.", "algorithm.rollout_correction."):
        foreign.read |= {key for key in foreign.values if key.startswith(base)}
    ours["data.answer_key"] = "reward_model.ground_truth"
    ours.setdefault("reward.function", "math")  # verl's own choice goes by data_source
    tidy(ours, foreign)


VERL = System("verl", "verl", ("actor_rollout_ref", "algorithm"), KEYS, ABSENT, finish)
