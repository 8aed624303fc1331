"""TRL's GRPOConfig and AsyncGRPOConfig with the arguments of `trl grpo`, as YAML or JSON."""

import math
from typing import Any

from areal_convert.fitting import UNKNOWN_REWARD, tidy
from areal_convert.mapping import Absent, Foreign, Key, Ours, System
from areal_convert.trl_steps import ASYNC, batch, is_async, n_steps
from areal_convert.values import (
    adapters,
    as_number,
    as_truth,
    as_whole,
    chosen,
    number,
    positive,
    run_name,
    skip,
    taus,
    trackers,
    truth,
    unless,
    warmup_share,
    whole,
)

LOSSES = {  # loss_type -> (loss, aggregation)
    "grpo": ("ppo", "seq-mean-token-mean"),
    "dapo": ("ppo", "token-mean"),
    "bnpo": ("ppo", "token-mean"),
    "dr_grpo": ("ppo", "seq-mean-token-sum-norm"),
    "cispo": ("cispo", "token-mean"),
    "sapo": ("sapo", "seq-mean-token-mean"),
}
CORRECTIONS = {  # vllm_importance_sampling_mode -> (correction, action)
    "token_truncate": ("tis", "clamp"),
    "token_mask": ("tis", "mask"),
    "sequence_truncate": ("tis_sequence", "clamp"),
    "sequence_mask": ("tis_sequence", "mask"),
}
REWARDS = {
    "accuracy_reward": "math",
    "reasoning_accuracy_reward": "math",
    "think_format_reward": "format",
    "model": "model",
}
THINK_FORMAT = "<think>(?!.*<think>).*</think>.*"  # one opening tag at the start, a closing tag, any text around it
PRECISION = {"bfloat16": "bfloat16", "float32": "float32", "auto": "bfloat16"}
SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
VLLM = "vllm_importance_sampling_"
TAUS = taus("sapo_temperature_pos", "sapo_temperature_neg")


def loss(value: Any, foreign: Foreign) -> Ours:
    if str(value) not in LOSSES:
        return foreign.lose("loss_type", f"{value!r} is not there: actor.loss keeps its default, ppo")
    name, aggregation = LOSSES[str(value)]
    is_sequence = name == "ppo" and foreign.get("importance_sampling_level", "token") == "sequence"
    return {"actor.loss": "gspo" if is_sequence else name, "actor.aggregation": aggregation}


def advantage(value: Any, foreign: Foreign) -> Ours:
    name = {True: "group", False: "none"}[value] if isinstance(value, bool) else str(value).lower()
    if name == "batch":
        return {"actor.advantage": "dr_grpo", "actor.normalize_batch": "all"}
    if name == "none":
        return {"actor.advantage": "dr_grpo"}
    return {"actor.advantage": {"group": "grpo"}[name], "actor.std_eps": 1e-4}


def correction(value: Any, foreign: Foreign) -> Ours:
    """The weight for the gap between learner and vLLM; transformers' samples get none."""
    if not truth(value) or not truth(foreign.get("use_vllm")):
        return {}
    mode = str(foreign.get(f"{VLLM}mode"))
    if mode not in CORRECTIONS:
        return foreign.lose(f"{VLLM}mode", f"{mode!r} is not there: see docs/algorithms.md")
    name, action = CORRECTIONS[mode]
    settings: Ours = {"actor.correction": name, "actor.correction_action": action}
    lower, upper = foreign.get(f"{VLLM}clip_min"), foreign.get(f"{VLLM}cap") or foreign.get(f"{VLLM}clip_max")
    settings |= {} if upper is None else {"actor.correction_upper": number(upper)}
    return settings if lower is None else settings | {"actor.correction_lower": number(lower)}


def engine(value: Any, foreign: Foreign) -> Ours:
    return {"rollout.engine": "vllm" if truth(value) else "builtin"}


def precision(value: Any, foreign: Foreign) -> Ours:
    return {"model.dtype": "bfloat16" if truth(value) else "float32"}


def truncated(value: Any, foreign: Foreign) -> Ours:
    return {"actor.truncated_samples": "mask"} if truth(value) else {}


def reference(value: Any, foreign: Foreign) -> Ours:
    if not truth(value):
        return {}
    if number(foreign.get("ref_model_mixup_alpha")) != 1:
        foreign.lose("ref_model_mixup_alpha", "the reference model is replaced as a whole")
    return n_steps("reference.update_every")(foreign.get("ref_model_sync_steps"), foreign)


def rewards(value: Any, foreign: Foreign) -> Ours:
    names = [value] if isinstance(value, str) else [str(name) for name in value]
    if foreign.get("reward_model_name_or_path") is not None:
        names = ["model", *names]  # `trl grpo` has it first
    known = {name: REWARDS.get(name) or as_function(name) for name in names}
    if lost := [name for name in names if not known[name]]:
        foreign.lose("reward_funcs", f"{', '.join(lost)}: no such reward here")
    found = [(name, ours) for name, ours in known.items() if ours]
    weights = foreign.get("reward_weights") or [1.0] * len(names)
    if not isinstance(weights, list) or len(weights) != len(names):
        foreign.lose("reward_weights", f"mismatch: {weights} for {len(names)} rewards ({', '.join(names)})")
        weights = [1.0] * len(names)
    settings: Ours = {"reward.format.pattern": THINK_FORMAT} if "think_format_reward" in names else {}
    if len(names) == 1 and found:
        return settings | {"reward.function": found[0][1]}
    terms = [
        {"function": ours, "weight": number(weights[names.index(name)]), "name": run_name(name.rpartition(".")[2])}
        for name, ours in found
    ]
    return settings | {"reward.function": "weighted", "reward.terms": terms} if terms else {}


def reward_model(value: Any, foreign: Foreign) -> Ours:
    """With reward_funcs it is one of the terms."""
    alone: Ours = {} if foreign.get("reward_funcs") else {"reward.function": "model"}
    return {"reward.model.path": str(value)} | alone


def as_function(name: str) -> str:
    module, dot, function = name.rpartition(".")
    return f"{module}:{function}" if dot else ""


def lora(value: Any, foreign: Foreign) -> Ours:
    if not truth(value):
        return {}
    modules = foreign.get("lora_target_modules")
    variant = [kind for kind in ("rslora", "dora") if truth(foreign.get(f"use_{kind}", False))]
    dropout = None if "dora" in variant else foreign.get("lora_dropout")
    ours = adapters(foreign.get("lora_r"), foreign.get("lora_alpha"), modules, dropout)
    return ours | {"actor.lora.variant": variant} if variant else ours


def evaluation(value: Any, foreign: Foreign) -> Ours:
    if str(foreign.get("eval_strategy", "no")) != "steps":
        return {}
    every = n_steps("evaluate.every_steps")(value, foreign).get("evaluate.every_steps", 1)
    return foreign.lose("eval_steps", f"set evaluate.path and evaluate.every_steps = {every}")


def data_set(value: Any, foreign: Foreign) -> Ours:
    subset = foreign.get("dataset_config")
    return {"data.path": f"{value}:{subset}" if subset else str(value)}


def clip_high(value: Any, foreign: Foreign) -> Ours:
    return {} if number(value) == number(foreign.get("epsilon")) else {"actor.eps_clip_higher": number(value)}


def schedule(value: Any, foreign: Foreign) -> Ours:
    return chosen("actor.lr_schedule", "lr_scheduler_type", SCHEDULES)(value, foreign)


def long_prompts(value: Any, foreign: Foreign) -> Ours:
    foreign.notes["data.max_prompt_tokens"] = "TRL cuts longer prompts; here they are refused: data.long_prompts"
    return {"data.max_prompt_tokens": whole(value)}


def slots(value: Any, foreign: Foreign) -> Ours:
    foreign.notes["rollout.max_concurrent_rollouts"] = "of one generator here"
    return positive("rollout.max_concurrent_rollouts")(value, foreign)


def budget(value: Any, foreign: Foreign) -> Ours:
    return positive("learner.max_tokens_per_mb")(value, foreign)


KEYS = (
    Key("model_name_or_path", "model.path"),
    Key("bf16", "model.dtype", "true: bfloat16", True, precision),
    Key("dtype", "model.dtype", "", None, chosen("model.dtype", "dtype", PRECISION)),
    Key("torch_dtype", "model.dtype", "older name", None, chosen("model.dtype", "torch_dtype", PRECISION)),
    Key("dataset_name", "data.path", "a Hugging Face id, NAME:CONFIG with dataset_config", None, data_set),
    Key("dataset_config", "data.path", "with dataset_name", None, skip),
    Key("dataset_train_split", "data.split", "", None),
    Key("shuffle_dataset", "data.shuffle", "", None, as_truth("data.shuffle")),
    Key("seed", "run.seed", "", 42, as_whole("run.seed")),
    Key("max_prompt_length", "data.max_prompt_tokens", "older; longer rows are refused or dropped, never truncated",
        None, long_prompts),
    Key("max_completion_length", "gconfig.max_new_tokens", "AsyncGRPO: 2048", 512, as_whole("gconfig.max_new_tokens")),
    Key("chat_template_kwargs.*", "data.chat_template_kwargs", "each argument by name", None,
        lambda value, foreign: {"data.chat_template_kwargs": value}),
    Key("num_generations", "gconfig.n_samples", "", 8, as_whole("gconfig.n_samples")),
    Key("num_generations_eval", "evaluate.n_samples", "", None, as_whole("evaluate.n_samples")),
    Key("per_device_train_batch_size", "data.batch_size",
        "x steps_per_generation / num_generations: prompts instead of completions, of one process", 8, skip),
    Key("generation_batch_size", "data.batch_size", "/ num_generations", None, skip),
    Key("gradient_accumulation_steps", "data.batch_size", "where steps_per_generation is unset", 1, skip),
    Key("steps_per_generation", "actor.ppo_n_minibatches", "/ gradient_accumulation_steps", None, skip),
    Key("num_iterations", "actor.ppo_epochs", "", None, as_whole("actor.ppo_epochs")),
    Key("temperature", "gconfig.temperature", "", None, as_number("gconfig.temperature")),
    Key("top_p", "gconfig.top_p", "", None, as_number("gconfig.top_p")),
    Key("top_k", "gconfig.top_k", "", None, positive("gconfig.top_k")),
    Key("min_p", "gconfig.min_p", "", None, as_number("gconfig.min_p")),
    Key("repetition_penalty", "gconfig.repetition_penalty", "", None, as_number("gconfig.repetition_penalty")),
    Key("generation_kwargs.presence_penalty", "gconfig.presence_penalty", "", None,
        as_number("gconfig.presence_penalty")),
    Key("generation_kwargs.frequency_penalty", "gconfig.frequency_penalty", "", None,
        as_number("gconfig.frequency_penalty")),
    Key("generation_kwargs.stop", "gconfig.stop", "", None,
        lambda value, foreign: {"gconfig.stop": [value] if isinstance(value, str) else list(value)}),
    Key("generation_kwargs.stop_token_ids", "gconfig.stop_token_ids", "", None),
    Key("generation_kwargs.ignore_eos", "gconfig.ignore_eos", "", None, as_truth("gconfig.ignore_eos")),
    Key("generation_kwargs.min_tokens", "gconfig.min_new_tokens", "", None, as_whole("gconfig.min_new_tokens")),
    Key("use_vllm", "rollout.engine", "true: vllm, false: builtin; AsyncGRPO: vllm", False, engine),
    Key("vllm_tensor_parallel_size", "topology.tensor_parallel", "", None, as_whole("topology.tensor_parallel")),
    Key("max_staleness", "rollout.max_head_offpolicyness", "AsyncGRPO, in published versions; GRPO is synchronous: 0",
        None, skip),
    Key("weight_sync_steps", "data.batch_size, actor.ppo_n_minibatches", "AsyncGRPO: optimizer steps of a version",
        None, skip),
    Key("max_inflight_tasks", "rollout.max_concurrent_rollouts", "AsyncGRPO, of one generator here", None, slots),
    Key("token_budget", "learner.max_tokens_per_mb", "AsyncGRPO", None, budget),
    Key("beta", "actor.kl_ctl", "in the loss, estimator k3", None, as_number("actor.kl_ctl")),
    Key("epsilon", "actor.eps_clip", "", 0.2, as_number("actor.eps_clip")),
    Key("epsilon_high", "actor.eps_clip_higher", "", None, clip_high),
    Key("delta", "actor.c_clip", "", None, as_number("actor.c_clip")),
    Key("loss_type", "actor.loss, actor.aggregation", "grpo, dapo, bnpo, dr_grpo, cispo, sapo", "dapo", loss),
    Key("importance_sampling_level", "actor.loss", "sequence is gspo", None, skip),
    Key("sapo_temperature_pos", "actor.sapo_tau", "with sapo", None, TAUS),
    Key("sapo_temperature_neg", "actor.sapo_tau", "with sapo", None, TAUS),
    Key("scale_rewards", "actor.advantage, actor.std_eps", "group is grpo, none is dr_grpo, batch adds normalize_batch",
        "group", advantage),
    Key("mask_truncated_completions", "actor.truncated_samples", "true: mask", None, truncated),
    Key("sync_ref_model", "reference.update_every", "ref_model_sync_steps, in updates; the whole model is replaced",
        None, reference),
    Key("ref_model_sync_steps", "reference.update_every", "with sync_ref_model", 512, skip),
    Key("ref_model_mixup_alpha", "", "1 only", 0.6, skip),
    Key("entropy_coef", "actor.entropy_coef", "", None, as_number("actor.entropy_coef")),
    Key(f"{VLLM}correction", "actor.correction", "with use_vllm, by the mode; without it none", True, correction),
    Key(f"{VLLM}mode", "actor.correction, actor.correction_action",
        "token is tis, sequence is tis_sequence; truncate is clamp, mask is mask", "sequence_mask", skip),
    Key(f"{VLLM}clip_max", "actor.correction_upper", "", 3.0, skip),
    Key(f"{VLLM}clip_min", "actor.correction_lower", "", None, skip),
    Key(f"{VLLM}cap", "actor.correction_upper", "older name", None, skip),
    Key("reward_funcs", "reward.function, reward.terms", "module.function is module:function; several are weighted",
        None, rewards),
    Key("reward_weights", "reward.terms", "", None, skip),
    Key("reward_model_name_or_path", "reward.function, reward.model.path", "model; beside reward_funcs a term", None,
        reward_model),
    Key("learning_rate", "actor.lr", "", 1e-6, as_number("actor.lr")),
    Key("lr_scheduler_type", "actor.lr_schedule", "constant, linear (GRPO's default), cosine", None, schedule),
    Key("warmup_steps", "actor.lr_warmup_steps", "optimizer steps there, updates here", None,
        n_steps("actor.lr_warmup_steps")),
    Key("warmup_ratio", "actor.lr_warmup_steps", "of the run", None, warmup_share("warmup_ratio")),
    Key("weight_decay", "actor.weight_decay", "", None, as_number("actor.weight_decay")),
    Key("adam_beta1", "actor.adam_beta1", "", None, as_number("actor.adam_beta1")),
    Key("adam_beta2", "actor.adam_beta2", "", 0.999, as_number("actor.adam_beta2")),
    Key("adam_epsilon", "actor.adam_eps", "", None, as_number("actor.adam_eps")),
    Key("max_grad_norm", "actor.max_grad_norm", "", None, as_number("actor.max_grad_norm")),
    Key("gradient_checkpointing", "learner.gradient_checkpointing", "", True,
        as_truth("learner.gradient_checkpointing")),
    Key("num_train_epochs", "data.total_train_epochs", "rounded up", 3,
        lambda value, foreign: {"data.total_train_epochs": max(1, math.ceil(number(value)))}),
    Key("max_steps", "run.total_train_steps", "optimizer steps there, updates here; -1: the passes end the run", None,
        n_steps("run.total_train_steps")),
    Key("run_name", "run.name", "", None, lambda value, foreign: {"run.name": run_name(value)}),
    Key("output_dir", "run.folder", "", None, lambda value, foreign: {"run.folder": str(value)}),
    Key("report_to", "journal.tracker", "", None,
        lambda value, foreign: {"journal.tracker": found} if (found := trackers(value)) else {}),
    Key("save_steps", "checkpoint.every_steps", "optimizer steps there, updates here", None,
        n_steps("checkpoint.every_steps")),
    Key("save_total_limit", "checkpoint.keep", "", None, as_whole("checkpoint.keep")),
    Key("use_peft", "actor.lora.rank", "true: adapters; docs/lora.md", None, lora),
    Key("lora_r", "actor.lora.rank", "with use_peft", 16, skip),
    Key("lora_alpha", "actor.lora.alpha", "with use_peft", 32, skip),
    Key("lora_dropout", "actor.lora.dropout", "with use_peft; none with use_dora", 0.05, skip),
    Key("use_rslora", "actor.lora.variant", "with use_peft", False, skip),
    Key("use_dora", "actor.lora.variant", "with use_peft", False, skip),
    Key("lora_target_modules", "actor.lora.target_modules", "with use_peft", None, skip),
    Key("eval_steps", "evaluate.every_steps", 'with eval_strategy = "steps"; set evaluate.path', None, evaluation),
    Key("eval_strategy", "evaluate.every_steps", "with eval_steps", None, skip),
)  # fmt: skip


def of_adapters(value: Any, foreign: Foreign) -> bool:
    return not foreign.get("use_peft", False) or unless("CAUSAL_LM")(value, foreign)


def of_entropy(value: Any, foreign: Foreign) -> bool:
    return not foreign.get("use_adaptive_entropy", False)


def of_vespo(value: Any, foreign: Foreign) -> bool:
    return str(foreign.get("loss_type")) != "vespo"


ABSENT = (
    Absent("dataset_test_split", "set evaluate.path: its split test is read", lambda value, foreign: foreign.get(
        "eval_strategy", "no") == "no"),
    Absent("datasets*", "one file or data set: data.path; several: [[data.source]]"),
    Absent("dataset_streaming", "rows are read at the start"),
    Absent("lora_*", "see docs/lora.md", of_adapters),
    Absent("load_in_*bit", "no quantized training here"),
    Absent("bnb_*", "no quantized training here", lambda value, foreign: not foreign.get("load_in_4bit", False)),
    Absent("use_bnb_nested_quant", "no quantized training here"),
    Absent("generation_kwargs*", "set keys of [gconfig]: docs/engines.md"),
    Absent("multi_objective_aggregation", "rewards are summed before they are normalised",
           unless("sum_then_normalize")),
    Absent("top_entropy_quantile", "all trained tokens enter the loss", unless(1)),
    Absent("off_policy_mask_threshold", "see actor.m2_threshold"),
    Absent("use_bias_correction_kl", "the KL is not weighted by the ratio"),
    Absent("use_adaptive_entropy", "the entropy coefficient is constant"),
    Absent("entropy_*", "the entropy coefficient is constant", of_entropy),
    Absent("vespo_*", "of a loss that is not there", of_vespo),
    Absent("router_aux_loss_coef", "no auxiliary loss of experts", unless(0.001)),
    Absent("disable_dropout", "models have no dropout here"),
    Absent("neftune_noise_alpha", "no noise on embeddings"),
    Absent("label_smoothing_factor", "not of this loss"),
    Absent("optim", "AdamW only", lambda value, foreign: str(value).startswith("adamw")),
    Absent("optim_args", "AdamW with the settings of [actor]"),
    Absent("optim_target_modules", "AdamW only"),
    Absent("lr_scheduler_kwargs*", "actor.min_lr_ratio is the only one"),
    Absent("model_init_kwargs*", "model.path and model.dtype say which model", unless("auto", "bfloat16", "float32",
           "sdpa", "flash_attention_2", "eager")),
    Absent("vllm_structured_outputs_regex", "completions are not constrained"),
    Absent("vllm_max_model_length", "data.max_prompt_tokens and gconfig.max_new_tokens bound a sequence"),
    Absent("max_tool_calling_iterations", "workflow.agent.max_calls: docs/agents.md"),
    Absent("fork_threshold_tokens", "workflow.agent.rewritten: docs/agents.md", unless(1024)),
    Absent("environment_factory", "write a workflow: docs/environments.md"),
    Absent("tools", "write a workflow: docs/environments.md"),
    Absent("resume_from_checkpoint", "--resume RUN or run.resume"),
    Absent("save_strategy", "set checkpoint.every_steps", unless("steps", "no")),
    Absent("load_best_model_at_end", "checkpoint.keep_best and RUN/best"),
    Absent("metric_for_best_model", "evaluate.metric"),
    Absent("early_stopping_*", "evaluate.early_stop_patience"),
    Absent("data_seed", "run.seed is the seed of the data order"),
    *(Absent(pattern) for pattern in (
        "vllm_mode", "vllm_model_impl", "vllm_enable_sleep_mode", "vllm_server_*", "vllm_group_port",
        "vllm_gpu_memory_utilization", "vllm_guided_decoding_regex", "request_timeout", "queue_maxsize",
        "heartbeat_stale_after_s",
        "logging_*", "log_level*", "log_on_each_node", "log_completions*", "log_multimodal", "log_unique_prompts",
        "ddp_*", "fsdp*", "deepspeed*", "dataloader_*", "ds3_gather_for_generation", "hub_*", "push_to_hub*",
        "save_only_model", "save_safetensors", "save_on_each_node", "per_device_eval_batch_size",
        "eval_accumulation_steps",
        "eval_on_start", "eval_delay", "eval_do_concat_batches", "eval_use_gather_object", "batch_eval_metrics",
        "bf16_full_eval", "fp16*", "half_precision_backend", "tf32", "torch_compile*", "torch_empty_cache_steps",
        "use_liger_*", "liger_*", "attn_implementation", "remove_unused_columns", "do_train", "do_eval", "do_predict",
        "disable_tqdm", "num_completions_to_print", "trust_remote_code", "model_revision",
        "gradient_checkpointing_kwargs*",
        "average_tokens_across_devices", "auto_find_batch_size", "overwrite_output_dir", "use_cpu", "use_mps_device",
        "cache_implementation", "pad_to_multiple_of", "cast_lm_head_to_fp32", "use_transformers_*", "transformers_*",
        "project", "trackio_*", "include_*", "local_rank", "accelerator_config*", "parallelism_config*",
        "full_determinism",
        "ignore_data_skip", "ignore_bias_buffers", "jit_mode_eval", "restore_callback_states_from_checkpoint",
        "skip_memory_metrics", "length_column_name", "group_by_length", "greater_is_better", "prediction_loss_only",
        "debug",
        "enable_jit_checkpoint", "config", "output_router_logits", "weight_transfer*",
    )),
)  # fmt: skip


def reward(ours: Ours, foreign: Foreign) -> None:
    """Where a function is named that is not there, a placeholder that a start refuses."""
    if foreign.get("reward_funcs") is not None and "reward_funcs" in foreign.lost:
        why = "a function of reward_funcs has no counterpart"
    elif "reward.function" not in ours:
        ours["reward.function"], foreign.to_set["reward.function"] = "math", "the file names none"
        return
    else:
        return
    ours.pop("reward.terms", None)
    ours["reward.function"], foreign.to_set["reward.function"] = UNKNOWN_REWARD, why


def finish(ours: Ours, foreign: Foreign) -> None:
    ours.setdefault("data.question_key", "prompt")
    ours.setdefault("data.answer_key", "solution")
    reward(ours, foreign)
    batch(ours, foreign)
    if is_async(foreign):
        asynchronous(ours, foreign)
    else:
        foreign.put(ours, {"rollout.max_head_offpolicyness": 0})
        foreign.notes["rollout.max_head_offpolicyness"] = "GRPOTrainer is synchronous"
        ours.setdefault("actor.lr_schedule", "linear")
    ours.setdefault("actor.correction", "none")
    tidy(ours, foreign)


def asynchronous(ours: Ours, foreign: Foreign) -> None:
    """AsyncGRPO: vLLM's log-probs are the old ones of the ratio; the deviation of a group divides by n."""
    foreign.put(ours, {"rollout.max_head_offpolicyness": whole(foreign.get("max_staleness", 4))}, "max_staleness")
    if foreign.values.get("max_completion_length") is None:
        foreign.put(ours, {"gconfig.max_new_tokens": 2048})
    foreign.put(ours, {"rollout.engine": "vllm"})
    ours |= {"actor.correction": "none", "actor.recompute_logprobs": False, "actor.aggregation": "token-mean"}
    ours |= {"actor.advantage": "grpo", "actor.std_unbiased": False, "actor.std_eps": 1e-8}
    foreign.unset(ours, "actor.correction_")


SIGNS = (
    "num_generations", "max_completion_length", "per_device_train_batch_size", "model_name_or_path", "loss_type",
    "learning_rate", "dataset_name", "reward_funcs", "generation_batch_size", *ASYNC,
)  # fmt: skip
TRL = System("trl", "TRL", SIGNS, KEYS, ABSENT, finish)
