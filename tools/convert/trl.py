"""TRL's GRPOConfig with the arguments of `trl grpo`, as YAML or JSON."""

from typing import Any

from tools.convert.fitting import tidy
from tools.convert.mapping import Absent, Foreign, Key, Ours, System
from tools.convert.values import (
    adapters,
    as_number,
    as_truth,
    as_whole,
    chosen,
    number,
    positive,
    run_name,
    trackers,
    truth,
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
REWARDS = {"accuracy_reward": "math", "reasoning_accuracy_reward": "math", "think_format_reward": "format"}
PRECISION = {"bfloat16": "bfloat16", "float32": "float32", "auto": "bfloat16"}


def loss(value: Any, foreign: Foreign) -> Ours:
    if str(value) not in LOSSES:
        return foreign.drop("loss_type", f"{value!r} is not there: actor.loss keeps its default, ppo")
    name, aggregation = LOSSES[str(value)]
    is_sequence = foreign.get("importance_sampling_level") == "sequence" and name == "ppo"
    return {"actor.loss": "gspo" if is_sequence else name, "actor.aggregation": aggregation}


def advantage(value: Any, foreign: Foreign) -> Ours:
    name = (
        {True: "group", False: "none"}.get(value, str(value).lower()) if isinstance(value, bool) else str(value).lower()
    )
    if name == "batch":
        return {"actor.advantage": "dr_grpo", "actor.normalize_batch": True, "actor.normalize_batch_over": "all"}
    return {"actor.advantage": {"group": "grpo", "none": "dr_grpo"}[name]}


def prompts(value: Any, foreign: Foreign) -> Ours:
    """TRL counts completions of one process; a batch here is the prompts of one generation."""
    completions = foreign.get("generation_batch_size")
    if completions is None:
        steps = foreign.get("steps_per_generation") or foreign.get("gradient_accumulation_steps")
        completions = whole(value) * whole(steps)
        if "per_device_train_batch_size" in foreign.values:
            foreign.drop("per_device_train_batch_size", "data.batch_size is for one process: multiply by their number")
    return {"data.batch_size": max(1, whole(completions) // whole(foreign.get("num_generations")))}


def minibatches(value: Any, foreign: Foreign) -> Ours:
    return {"actor.ppo_n_minibatches": max(1, whole(value) // whole(foreign.get("gradient_accumulation_steps")))}


def once(value: Any, foreign: Foreign) -> Ours:
    return {} if whole(value) == 1 else foreign.drop("num_iterations", "a batch is trained once here")


def correction(value: Any, foreign: Foreign) -> Ours:
    mode = str(foreign.get("vllm_importance_sampling_mode"))
    upper = foreign.get("vllm_importance_sampling_cap") or foreign.get("vllm_importance_sampling_clip_max")
    if not truth(value) or not truth(foreign.get("use_vllm")):
        return {}
    if mode not in CORRECTIONS:
        return foreign.drop("vllm_importance_sampling_mode", f"{mode!r} is not there: see docs/algorithms.md")
    name, action = CORRECTIONS[mode]
    return {"actor.correction": name, "actor.correction_action": action, "actor.correction_upper": number(upper)}


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
        foreign.drop("ref_model_mixup_alpha", "the reference model is replaced as a whole")
    return {"reference.update_every": whole(foreign.get("ref_model_sync_steps"))}


def warmup_share(value: Any, foreign: Foreign) -> Ours:
    steps = foreign.get("max_steps", -1)
    if not number(value) or foreign.values.get("warmup_steps"):
        return {}
    if whole(steps) <= 0:
        return foreign.drop("warmup_ratio", "set actor.lr_warmup_steps: the number of steps is unknown")
    return {"actor.lr_warmup_steps": round(number(value) * whole(steps))}


def rewards(value: Any, foreign: Foreign) -> Ours:
    names = [value] if isinstance(value, str) else [str(name) for name in value]
    known = {name: REWARDS.get(name) or as_function(name) for name in names}
    lost = [name for name in names if not known[name]]
    if lost:
        foreign.drop("reward_funcs", f"{', '.join(lost)} is not there")
    found = [(name, ours) for name, ours in known.items() if ours]
    weights = foreign.get("reward_weights") or [1.0] * len(names)
    if len(found) == 1:
        return {"reward.function": found[0][1]}
    terms = [
        {"function": ours, "weight": number(weights[names.index(name)]), "name": run_name(name.rpartition(".")[2])}
        for name, ours in found
    ]
    return {"reward.function": "weighted", "reward.terms": terms} if terms else {}


def as_function(name: str) -> str:
    module, dot, function = name.rpartition(".")
    return f"{module}:{function}" if dot else ""


def lora(value: Any, foreign: Foreign) -> Ours:
    if not truth(value):
        return {}
    modules = foreign.get("lora_target_modules")
    return adapters(foreign.get("lora_r"), foreign.get("lora_alpha"), modules, foreign.get("lora_dropout"))


def evaluation(value: Any, foreign: Foreign) -> Ours:
    if str(foreign.get("eval_strategy", "no")) != "steps":
        return {}
    return foreign.drop("eval_steps", f"set evaluate.path and evaluate.every_steps = {whole(value)}")


def data_set(value: Any, foreign: Foreign) -> Ours:
    subset = foreign.get("dataset_config")
    return {"data.path": f"{value}:{subset}" if subset else str(value)}


def clip_high(value: Any, foreign: Foreign) -> Ours:
    return {} if number(value) == number(foreign.get("epsilon")) else {"actor.eps_clip_higher": number(value)}


def schedule(value: Any, foreign: Foreign) -> Ours:
    names = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
    return chosen("actor.lr_schedule", "lr_scheduler_type", names)(value, foreign)


def skip(value: Any, foreign: Foreign) -> Ours:
    """Read with another key."""
    return {}


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
    Key("max_prompt_length", "data.max_prompt_tokens", "longer rows are refused, never truncated", None,
        as_whole("data.max_prompt_tokens")),
    Key("max_completion_length", "gconfig.max_new_tokens", "", 512, as_whole("gconfig.max_new_tokens")),
    Key("num_generations", "gconfig.n_samples", "", 8, as_whole("gconfig.n_samples")),
    Key("num_generations_eval", "evaluate.n_samples", "", None, as_whole("evaluate.n_samples")),
    Key("per_device_train_batch_size", "data.batch_size",
        "x steps_per_generation / num_generations: prompts instead of "
        "completions, of one process", 8, prompts),
    Key("generation_batch_size", "data.batch_size", "/ num_generations", None, skip),
    Key("gradient_accumulation_steps", "data.batch_size", "where steps_per_generation is unset", 1, skip),
    Key("steps_per_generation", "actor.ppo_n_minibatches", "/ gradient_accumulation_steps", None, minibatches),
    Key("num_iterations", "", "1 only", None, once),
    Key("temperature", "gconfig.temperature", "", None, as_number("gconfig.temperature")),
    Key("top_p", "gconfig.top_p", "", None, as_number("gconfig.top_p")),
    Key("top_k", "gconfig.top_k", "", None, positive("gconfig.top_k")),
    Key("min_p", "gconfig.min_p", "", None, as_number("gconfig.min_p")),
    Key("repetition_penalty", "gconfig.repetition_penalty", "", None, as_number("gconfig.repetition_penalty")),
    Key("use_vllm", "rollout.engine", "true: vllm, false: builtin", False, engine),
    Key("vllm_tensor_parallel_size", "topology.tensor_parallel", "", None, as_whole("topology.tensor_parallel")),
    Key("beta", "actor.kl_ctl", "in the loss, estimator k3", None, as_number("actor.kl_ctl")),
    Key("epsilon", "actor.eps_clip", "", 0.2, as_number("actor.eps_clip")),
    Key("epsilon_high", "actor.eps_clip_higher", "", None, clip_high),
    Key("delta", "actor.c_clip", "", None, as_number("actor.c_clip")),
    Key("loss_type", "actor.loss, actor.aggregation", "grpo, dapo, bnpo, dr_grpo, cispo, sapo", "dapo", loss),
    Key("importance_sampling_level", "actor.loss", "sequence is gspo", "token", skip),
    Key("sapo_temperature_pos", "actor.sapo_tau_pos", "with sapo", None, as_number("actor.sapo_tau_pos")),
    Key("sapo_temperature_neg", "actor.sapo_tau_neg", "with sapo", None, as_number("actor.sapo_tau_neg")),
    Key("scale_rewards", "actor.advantage", "group is grpo, none is dr_grpo, batch adds normalize_batch", "group",
        advantage),
    Key("mask_truncated_completions", "actor.truncated_samples", "true: mask", None, truncated),
    Key("sync_ref_model", "reference.update_every", "ref_model_sync_steps; the whole model is replaced", None,
        reference),
    Key("ref_model_sync_steps", "reference.update_every", "with sync_ref_model", 512, skip),
    Key("ref_model_mixup_alpha", "", "1 only", 0.6, skip),
    Key("entropy_coef", "actor.entropy_coef", "", None, as_number("actor.entropy_coef")),
    Key("vllm_importance_sampling_correction", "actor.correction", "with use_vllm, by the mode", True, correction),
    Key("vllm_importance_sampling_mode", "actor.correction, actor.correction_action",
        "token is tis, sequence is tis_sequence; truncate is clamp, mask is mask", "sequence_mask", skip),
    Key("vllm_importance_sampling_clip_max", "actor.correction_upper", "", 3.0, skip),
    Key("vllm_importance_sampling_cap", "actor.correction_upper", "older name", None, skip),
    Key("reward_funcs", "reward.function, reward.terms", "module.function is module:function; several are weighted",
        None,
        rewards),
    Key("reward_weights", "reward.terms", "", None, skip),
    Key("learning_rate", "actor.lr", "", 1e-6, as_number("actor.lr")),
    Key("lr_scheduler_type", "actor.lr_schedule", "constant, linear, cosine", "linear", schedule),
    Key("warmup_steps", "actor.lr_warmup_steps", "", None, positive("actor.lr_warmup_steps")),
    Key("warmup_ratio", "actor.lr_warmup_steps", "of max_steps", None, warmup_share),
    Key("weight_decay", "actor.weight_decay", "", None, as_number("actor.weight_decay")),
    Key("adam_beta1", "actor.adam_beta1", "", None, as_number("actor.adam_beta1")),
    Key("adam_beta2", "actor.adam_beta2", "", 0.999, as_number("actor.adam_beta2")),
    Key("adam_epsilon", "actor.adam_eps", "", None, as_number("actor.adam_eps")),
    Key("max_grad_norm", "actor.max_grad_norm", "", None, as_number("actor.max_grad_norm")),
    Key("gradient_checkpointing", "learner.gradient_checkpointing", "", True,
        as_truth("learner.gradient_checkpointing")),
    Key("num_train_epochs", "data.total_train_epochs", "", 3, as_whole("data.total_train_epochs")),
    Key("max_steps", "run.total_train_steps", "-1: the passes end the run", None, positive("run.total_train_steps")),
    Key("run_name", "run.name", "", None, lambda value, foreign: {"run.name": run_name(value)}),
    Key("output_dir", "run.folder", "", None, lambda value, foreign: {"run.folder": str(value)}),
    Key("report_to", "journal.tracker", "", None,
        lambda value, foreign: {"journal.tracker": found} if (found := trackers(value)) else {}),
    Key("save_steps", "checkpoint.every_steps", "", None, positive("checkpoint.every_steps")),
    Key("save_total_limit", "checkpoint.keep", "", None, as_whole("checkpoint.keep")),
    Key("use_peft", "actor.lora.rank", "true: adapters; docs/lora.md", None, lora),
    Key("lora_r", "actor.lora.rank", "with use_peft", 16, skip),
    Key("lora_alpha", "actor.lora.alpha", "with use_peft", 32, skip),
    Key("lora_dropout", "actor.lora.dropout", "with use_peft", 0.05, skip),
    Key("lora_target_modules", "actor.lora.target_modules", "with use_peft", None, skip),
    Key("eval_steps", "evaluate.every_steps", 'with eval_strategy = "steps"; set evaluate.path', None, evaluation),
    Key("eval_strategy", "evaluate.every_steps", "with eval_steps", None, skip),
)  # fmt: skip

ABSENT = (
    Absent("dataset_test_split", "set evaluate.path: its split test is read"),
    Absent("datasets*", "one file or data set: data.path"),
    Absent("reward_model_name_or_path", 'no reward model here; a model behind a URL can grade: reward "judge"'),
    Absent("lora_*", "see docs/lora.md"),
    Absent("use_rslora", "the factor is alpha / rank"),
    Absent("use_dora", "plain LoRA only"),
    Absent("load_in_*bit", "no quantized training here"),
    Absent("generation_kwargs*", "set keys of [gconfig]: docs/engines.md"),
    Absent("multi_objective_aggregation", "rewards are summed before they are normalised"),
    Absent("top_entropy_quantile", "all trained tokens enter the loss"),
    Absent("off_policy_mask_threshold", "see actor.m2_threshold"),
    Absent("use_adaptive_entropy", "the entropy coefficient is constant"),
    Absent("entropy_*", "the entropy coefficient is constant"),
    Absent("vespo_*", "of a loss that is not there"),
    Absent("optim", "AdamW only"),
    Absent("max_tool_calling_iterations", "workflow.agent.max_calls: docs/agents.md"),
    Absent("resume_from_checkpoint", "--resume RUN or run.resume"),
    *(Absent(pattern) for pattern in (
        "vllm_*", "log*", "ddp_*", "fsdp*", "deepspeed", "dataloader_*", "ds3_*", "hub_*", "push_to_hub", "save_*",
        "per_device_eval_batch_size", "bf16_*", "fp16*", "tf32", "torch_compile*", "use_liger_*", "attn_*", "report_*",
        "remove_unused_columns", "do_*", "eval_*", "disable_*", "num_completions_to_print", "trust_remote_code",
        "model_revision", "gradient_checkpointing_kwargs*", "average_tokens_*", "auto_find_*", "overwrite_*", "use_cpu",
        "cache_implementation", "pad_to_multiple_of", "cast_lm_head_to_fp32", "use_transformers_*", "transformers_*",
        "model_init_kwargs*", "project", "trackio_*", "include_*", "local_rank", "neftune_*", "accelerator_config*",
        "_name_or_path", "lr_scheduler_kwargs*", "jit_*", "liger_*", "router_aux_loss_coef",
    )),
)  # fmt: skip


def finish(ours: Ours, foreign: Foreign) -> None:
    ours.setdefault("data.question_key", "prompt")
    ours.setdefault("data.answer_key", "solution")
    ours.setdefault("reward.function", "math")
    tidy(ours, foreign)


SIGNS = (
    "num_generations", "max_completion_length", "per_device_train_batch_size", "model_name_or_path", "loss_type",
    "learning_rate", "dataset_name", "reward_funcs", "generation_batch_size",
)  # fmt: skip
TRL = System("trl", "TRL", SIGNS, KEYS, ABSENT, finish)
