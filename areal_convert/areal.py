"""AReaL's GRPOConfig and PPOConfig as YAML."""

from typing import Any

from areal_convert.areal_values import (
    ADVANTAGES,
    CAPS,
    MODES,
    NORM,
    REJECTION,
    advantage,
    backend,
    both,
    correction,
    data_set,
    every_passes,
    is_unfiltered,
    kl,
    learners,
    lora,
    overlong,
    problems,
    proximal,
    recompute,
    top_k,
    truncated,
)
from areal_convert.fitting import tidy
from areal_convert.mapping import Absent, Foreign, Key, Ours, System
from areal_convert.values import (
    PRECISIONS,
    SCHEDULES,
    as_number,
    as_truth,
    as_whole,
    chosen,
    clip_range,
    path_of,
    positive,
    run_name,
    skip,
    taus,
    truth,
    unless,
    warmup_share,
    whole,
)

OPTIMIZER = "actor.optimizer."
MATH_REWARDS = ("gsm8k_reward_fn", "math_reward_fn", "process_results")  # of areal.reward: the answer in mathematics


def greedy(ours: str) -> Any:
    return lambda value, foreign: {ours: 0.0} if truth(value) else {}


def loss(value: Any, foreign: Foreign) -> Ours:
    return {"actor.loss": "gspo"} if str(value) == "sequence" else {}


def sapo(value: Any, foreign: Foreign) -> Ours:
    return {"actor.loss": "sapo"} if truth(value) else {}


def reward(value: Any, foreign: Foreign) -> Ours:
    module, dot, name = str(value).rpartition(".")
    if module.startswith("areal.reward") and name in MATH_REWARDS:
        return {"reward.function": "math"}
    return {"reward.function": f"{module}:{name}"} if dot else foreign.lose("reward_fn_path", f"{value!r} is no path")


def workflow(value: Any, foreign: Foreign) -> Ours:
    if str(value).rpartition(".")[2] == "RLVRWorkflow":
        return {"workflow.function": "single_turn"}
    return foreign.lose("workflow", 'set workflow.function = "module:Class": docs/from-areal.md')


def trackers(value: Any, foreign: Foreign) -> Ours:
    """Those that are on; each key gives all of them."""
    asked = {
        name: str(foreign.get(f"stats_logger.{name}.mode", "disabled")) for name in ("wandb", "trackio", "swanlab")
    }
    asked["tensorboard"] = str(foreign.get("stats_logger.tensorboard.path", "disabled"))
    names = [name for name, mode in asked.items() if mode != "disabled"]
    return {"journal.tracker": names} if names else {}


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
    Key("train_dataset.split", "data.split", "", None),
    Key("train_dataset.batch_size", "data.batch_size", "", 1, as_whole("data.batch_size")),
    Key("train_dataset.shuffle", "data.shuffle", "", None, as_truth("data.shuffle")),
    Key("train_dataset.drop_last", "data.drop_last", "", True, as_truth("data.drop_last")),
    Key("train_dataset.max_length", "data.max_prompt_tokens, data.long_prompts", "longer rows are dropped", None,
        lambda value, foreign: {"data.max_prompt_tokens": whole(value), "data.long_prompts": "drop"}),
    Key("valid_dataset.path", "evaluate.path", "", None, problems),
    Key("gconfig.n_samples", "gconfig.n_samples", "", 1, as_whole("gconfig.n_samples")),
    Key("gconfig.max_new_tokens", "gconfig.max_new_tokens", "", 16384, as_whole("gconfig.max_new_tokens")),
    Key("gconfig.min_new_tokens", "gconfig.min_new_tokens", "", None, as_whole("gconfig.min_new_tokens")),
    Key("gconfig.temperature", "gconfig.temperature", "", None, as_number("gconfig.temperature")),
    Key("gconfig.greedy", "gconfig.temperature", "true: temperature 0", None, greedy("gconfig.temperature")),
    Key("gconfig.top_p", "gconfig.top_p", "", None, as_number("gconfig.top_p")),
    Key("gconfig.top_k", "gconfig.top_k", "", None, top_k),
    Key("gconfig.stop", "gconfig.stop", "", None),
    Key("gconfig.stop_token_ids", "gconfig.stop_token_ids", "", None,
        lambda value, foreign: {"gconfig.stop_token_ids": value} if value else {}),
    Key("gconfig.ignore_eos", "gconfig.ignore_eos", "", None, as_truth("gconfig.ignore_eos")),
    Key("gconfig.frequency_penalty", "gconfig.frequency_penalty", "", None, as_number("gconfig.frequency_penalty")),
    Key("eval_gconfig.n_samples", "evaluate.n_samples", "", None, as_whole("evaluate.n_samples")),
    Key("eval_gconfig.temperature", "evaluate.temperature", "", None, as_number("evaluate.temperature")),
    Key("eval_gconfig.greedy", "evaluate.temperature", "true: temperature 0", None, greedy("evaluate.temperature")),
    Key("rollout.max_head_offpolicyness", "rollout.max_head_offpolicyness", "a bound for every trained token here", 0,
        lambda value, foreign: {"rollout.max_head_offpolicyness": min(whole(value), 1024)}),
    Key("rollout.max_concurrent_rollouts", "rollout.max_concurrent_rollouts",
        "samples of one generator here, not of all", None, as_whole("rollout.max_concurrent_rollouts")),
    Key("rollout.backend", "rollout.engine, topology.generators, topology.tensor_parallel", "sglang:d4t1", None,
        backend("rollout.backend")),
    Key("actor.backend", "topology.learners", "fsdp:d4", None, learners("actor.backend")),
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
    Key(f"{NORM}mean_level", "actor.advantage", "group: grpo, with mean_leave1out rloo, without std_level dr_grpo; "
        "batch, with std_level: none with normalize_batch; unset in a norm: batch", None, skip),
    Key(f"{NORM}std_level", "actor.advantage, actor.normalize_batch", "batch: normalize_batch; unset in a norm: batch",
        None, skip),
    Key(f"{NORM}mean_leave1out", "actor.advantage", "with mean_level = group", None, skip),
    Key(f"{NORM}group_size", "gconfig.n_samples", "always the same here", None, skip),
    Key(f"{NORM}eps", "actor.std_eps", "in a norm: 1e-5", None, skip),
    Key(f"{NORM}std_unbiased", "actor.std_unbiased", "", None, skip),
    Key(f"{ADVANTAGES}std_level", "actor.normalize_batch", "batch", None, skip),
    Key(f"{ADVANTAGES}mean_level", "actor.normalize_batch", "with std_level", None, skip),
    Key(f"{ADVANTAGES}mean_leave1out", "", "the mean is over all tokens", None, skip),
    Key(f"{ADVANTAGES}group_size", "", "of groups only", None, skip),
    Key(f"{ADVANTAGES}eps", "actor.std_eps", "without a reward_norm", None, skip),
    Key(f"{ADVANTAGES}std_unbiased", "actor.std_unbiased", "without a reward_norm", None, skip),
    Key("actor.overlong_reward_penalty", "actor.overlong_tokens, actor.overlong_penalty_factor", "with its two keys",
        None, overlong),
    Key("actor.overlong_tokens", "actor.overlong_tokens", "with overlong_reward_penalty", None, skip),
    Key("actor.overlong_penalty_factor", "actor.overlong_penalty_factor", "x reward_scaling: the penalty is scaled "
        "there, not here", None, skip),
    Key("actor.mask_no_eos_with_zero", "actor.truncated_samples", "true: mask; zero without bias, norm and overlong "
        "penalty", None, truncated),
    Key("actor.discount", "actor.discount", "with a critic", None, as_number("actor.discount")),
    Key("actor.gae_lambda", "actor.gae_lambda", "with a critic", None, as_number("actor.gae_lambda")),
    Key("actor.kl_ctl", "actor.kl_ctl, actor.kl_in", "in the reward; with ref only", 0.1, kl),
    Key("actor.kl_estimator", "actor.kl_estimator", "", "k1", skip),
    Key("actor.use_sapo_loss", "actor.loss", "true: sapo", None, sapo),
    Key("actor.sapo_tau_pos", "actor.sapo_tau", "with sapo", None, taus("actor.sapo_tau_pos", "actor.sapo_tau_neg")),
    Key("actor.sapo_tau_neg", "actor.sapo_tau", "with sapo", None, taus("actor.sapo_tau_pos", "actor.sapo_tau_neg")),
    Key("actor.importance_sampling_level", "actor.loss", "sequence is gspo", None, loss),
    Key("actor.recompute_logprob", "actor.recompute_logprobs", "true with use_decoupled_loss", False, recompute),
    Key("actor.use_decoupled_loss", "actor.use_decoupled_loss, actor.correction", "true without rejection_sampling: "
        "correction = none", False, skip),
    Key("actor.prox_logp_method", "actor.prox_logp_method", "recompute, loglinear; metrics is recompute", None,
        proximal),
    Key(f"{REJECTION}upper", "actor.behav_imp_weight_cap", "of a token's ratio; other levels and metrics are "
        "actor.correction_*; unset in the section: 5", None, skip),
    Key(f"{REJECTION}action", "actor.correction_action", "unset in the section: mask", None, skip),
    Key(f"{REJECTION}metric", "actor.correction_metric", "", None, skip),
    Key(f"{REJECTION}level", "actor.correction", "token is tis, sequence is tis_sequence", None, skip),
    Key(f"{REJECTION}agg", "actor.correction_aggregate", "", None, skip),
    Key(f"{REJECTION}lower", "actor.correction_lower", "", None, skip),
    *(Key(key, "actor.behav_imp_weight_cap", "older", None, skip) for key in CAPS),
    *(Key(key, "actor.correction_action", "older; token_mask is mask, token_truncate is clamp", None, skip)
      for key in MODES),
    Key(f"{OPTIMIZER}lr", "actor.lr", "", 1e-3, as_number("actor.lr")),
    Key(f"{OPTIMIZER}weight_decay", "actor.weight_decay", "", 0.01, as_number("actor.weight_decay")),
    Key(f"{OPTIMIZER}beta1", "actor.adam_beta1", "", None, as_number("actor.adam_beta1")),
    Key(f"{OPTIMIZER}beta2", "actor.adam_beta2", "", 0.999, as_number("actor.adam_beta2")),
    Key(f"{OPTIMIZER}eps", "actor.adam_eps", "", None, as_number("actor.adam_eps")),
    Key(f"{OPTIMIZER}min_lr_ratio", "actor.min_lr_ratio", "", None, as_number("actor.min_lr_ratio")),
    Key(f"{OPTIMIZER}lr_scheduler_type", "actor.lr_schedule", "", None,
        chosen("actor.lr_schedule", f"{OPTIMIZER}lr_scheduler_type", SCHEDULES)),
    Key(f"{OPTIMIZER}warmup_steps_proportion", "actor.lr_warmup_steps", "of the run", None,
        warmup_share(f"{OPTIMIZER}warmup_steps_proportion")),
    Key(f"{OPTIMIZER}gradient_clipping", "actor.max_grad_norm", "", None, as_number("actor.max_grad_norm")),
    Key("ref.path", "reference.path", "with actor.kl_ctl", None),
    Key("critic.path", "critic.path", "with it actor.advantage is gae", None),
    Key("critic.optimizer.lr", "critic.lr", "with critic.path", None, as_number("critic.lr")),
    Key("critic.eps_clip", "critic.eps_clip", "with critic.path", None, as_number("critic.eps_clip")),
    Key("reward_fn_path", "reward.function", "areal.reward's mathematics is math", None, reward),
    Key("workflow", "workflow.function", "RLVRWorkflow is single_turn", None, workflow),
    Key("seed", "run.seed", "", None, as_whole("run.seed")),
    Key("experiment_name", "run.name", "", None, lambda value, foreign: {"run.name": run_name(value)}),
    Key("total_train_epochs", "data.total_train_epochs", "", 1, as_whole("data.total_train_epochs")),
    Key("total_train_steps", "run.total_train_steps", "unset: the passes end the run", None,
        positive("run.total_train_steps")),
    Key("recover.freq_steps", "checkpoint.every_steps", "", None, positive("checkpoint.every_steps")),
    Key("saver.freq_steps", "checkpoint.every_steps", "", None, positive("checkpoint.every_steps")),
    Key("recover.freq_epochs", "checkpoint.every_steps", "with --rows", None, every_passes("recover")),
    Key("saver.freq_epochs", "checkpoint.every_steps", "with --rows", None, every_passes("saver")),
    Key("saver.freq_secs", "checkpoint.every_s", "", None, as_number("checkpoint.every_s")),
    Key("recover.freq_secs", "checkpoint.every_s", "", None, as_number("checkpoint.every_s")),
    Key("evaluator.freq_steps", "evaluate.every_steps", "", None, positive("evaluate.every_steps")),
    Key("evaluator.freq_epochs", "evaluate.every_steps", "with --rows", None, every_passes("evaluator")),
    Key("evaluator.eval_before_train", "evaluate.before", "", None, as_truth("evaluate.before")),
    Key("stats_logger.wandb.mode", "journal.tracker", "online or offline: wandb", None, trackers),
    Key("stats_logger.trackio.mode", "journal.tracker", "online or offline: trackio", None, trackers),
    Key("stats_logger.swanlab.mode", "journal.tracker", "online or offline: swanlab", None, trackers),
    Key("stats_logger.tensorboard.path", "journal.tracker", "tensorboard", None, trackers),
)  # fmt: skip


def as_gconfig(name: str) -> Any:
    """Off where an evaluation has the value of training."""
    return lambda value, foreign: value is None or value == foreign.get(f"gconfig.{name}")


ABSENT = (
    Absent("dynamic_bs", "see data.max_refill"),
    Absent("gconfig.max_tokens", "data.max_prompt_tokens and gconfig.max_new_tokens bound it"),
    Absent("gconfig.use_beam_search", "samples are drawn, not searched"),
    Absent("actor.group_size", "a group has gconfig.n_samples", lambda value, foreign: value == foreign.get(
        "gconfig.n_samples")),
    *(Absent(f"eval_gconfig.{name}", f"an evaluation uses gconfig.{name}", as_gconfig(name)) for name in (
        "max_new_tokens", "stop", "stop_token_ids")),
    *(Absent(f"eval_gconfig.{name}", f"set {name} of a table [[evaluate.sets]]") for name in (
        "min_new_tokens", "ignore_eos", "frequency_penalty")),
    *(Absent(f"eval_gconfig.{name}", f"set {name} of a table [[evaluate.sets]]", is_unfiltered) for name in (
        "top_p", "top_k")),
    Absent("eval_gconfig.max_tokens", "data.max_prompt_tokens and gconfig.max_new_tokens bound it",
           as_gconfig("max_tokens")),
    Absent("eval_gconfig.use_beam_search", "samples are drawn, not searched"),
    Absent("valid_dataset.max_length", "data.max_prompt_tokens counts for problems, too"),
    Absent("*_dataset.dataset_kwargs*", "rows are files or Hugging Face ids, or of data.function: docs/data.md"),
    Absent("rollout.agent.*", 'workflow.function = "agent": docs/agents.md', unless("inline")),
    Absent("rollout.return_routed_experts", "routes of experts are not replayed"),
    Absent("eval_workflow*", "an evaluation uses the workflow of training"),
    Absent("workflow*", "set workflow.function: docs/from-areal.md"),
    Absent("reward_fn*", "set reward.function: docs/from-areal.md"),
    *(Absent(pattern, "of its training script: set workflow.function and workflow.arguments") for pattern in (
        "econfig.*", "tir.*", "agent_*", "max_turns", "n_trajs", "max_llm_calls_per_run", "max_tokens_per_trajectory",
        "export_style", "turn_discount", "workflow_kwargs*")),
    Absent("judge_engine.*", 'a model behind a URL can grade: reward.function = "judge"'),
    Absent("recover.mode", "--resume RUN or run.resume", unless("disabled")),
    Absent("evaluator.freq_secs", "set evaluate.every_steps"),
    Absent("total_train_n_seqs", "set run.total_train_steps"),
    Absent("actor.init_from_scratch", "set [model.scratch]"),
    Absent("actor.temperature", "gconfig.temperature counts for the learner, too", as_gconfig("temperature")),
    Absent("actor.max_new_tokens", "gconfig.max_new_tokens is the limit", as_gconfig("max_new_tokens")),
    Absent("actor.is_critic", "a policy is trained"),
    Absent("actor.optimizer.type", "AdamW only", unless("adam", "adamw")),
    Absent("actor.peft_type", "plain LoRA only", unless("lora")),
    Absent("actor.*fp8_config*", "no training in float8", unless("disabled", ["output", "router", "score"])),
    Absent("teacher.path", "set teacher.path and actor.distill_coef: docs/algorithms.md"),
    Absent("teacher.*_loss_weight", "set teacher.path and actor.distill_coef: docs/algorithms.md"),
    Absent("critic.optimizer.type", "AdamW only", unless("adam", "adamw")),
    Absent("critic.optimizer.weight_decay", "the critic has the weight decay of the policy", lambda value, foreign: (
        value == foreign.get(f"{OPTIMIZER}weight_decay"))),
    Absent("critic.optimizer.gradient_clipping", "the critic's gradient is clipped as the policy's",
           lambda value, foreign: value == foreign.get(f"{OPTIMIZER}gradient_clipping", 1.0)),
    Absent("critic.optimizer.*", "[critic] has a constant rate and AdamW's usual betas", unless(
        "constant", 0.9, 0.999, 1e-8, "1e-8", 0.001, 0.0)),
    Absent("critic.mask_no_eos_with_zero", "actor.truncated_samples counts for the critic, too"),
    Absent("critic.ppo_n_minibatches", "the critic has the policy's minibatches", lambda value, foreign: value in (
        None, foreign.get("actor.ppo_n_minibatches"))),
    Absent("*.dtype", "model.dtype is that of all models", lambda value, foreign: value in (
        None, "auto", foreign.get("actor.dtype"))),
    Absent("sglang.context_length", "data.max_prompt_tokens and gconfig.max_new_tokens bound a sequence"),
    Absent("vllm.max_model_len", "data.max_prompt_tokens and gconfig.max_new_tokens bound a sequence"),
    Absent("sglang.enable_multimodal", "text models only"),
    Absent("sglang.kv_cache_dtype", "set engine.arguments", unless("auto")),
    *(Absent(f"{OPTIMIZER}{name}") for name in (
        "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")),
    *(Absent(f"{role}.{name}") for role in ("actor", "ref", "critic", "teacher") for name in (
        "experiment_name", "trial_name", "attn_impl", "use_kernels", "init_from_scratch", "is_critic", "mb_spec.*",
        "pad_to_maximum", "disable_dropout", "gradient_checkpointing", "grad_reduce_dtype", "weight_update_mode",
        "fsdp*", "archon*", "megatron*", "offload", "use_lora", "lora_rank", "lora_alpha", "target_modules",
        "peft_type",
        "enable_tree_training", "scheduling_s*", "backend", "_version", "admin_api_key", "log_level", "request_timeout",
        "setup_timeout", "log_agent_stats*", "optimizer", "reward_norm", "adv_norm", "rejection_sampling",
    )),
    *(Absent(f"{role}.{name}") for role in ("ref", "teacher") for name in (
        "optimizer.*", "ppo_n_minibatches", "temperature")),
    *(Absent(f"rollout.{name}") for name in (
        "experiment_name", "trial_name", "fileroot", "queue_size", "consumer_batch_size", "enable_rollout_tracing",
        "check_trajectory_format", "tokenizer_path", "dump_to_file", "setup_timeout", "request_timeout",
        "request_retries", "pause_grace_period", "scheduling_s*", "use_lora", "_version", "model", "routing_strategy",
        "poll_interval", "admin_api_key", "api_url", "provider_api_key", "agent", "schedule_policy",
    )),
    *(Absent(f"sglang.{name}") for name in (
        "model_path", "random_seed", "skip_tokenizer_init", "disable_*", "enable_nccl_nvls", "enable_mixed_chunk",
        "enable_dp_attention", "enable_ep_moe", "enable_torch_compile", "torch_compile_max_bs", "cuda_graph_*",
        "torchao_config", "enable_nan_detection", "enable_p2p_check", "triton_attention_*",
        "num_continuous_decode_steps", "enable_memory_saver", "allow_auto_truncate", "attention_backend",
        "sampling_backend", "mem_fraction_static", "max_running_requests", "chunked_prefill_size",
        "max_prefill_tokens", "schedule_*", "cpu_offload_gb", "dp_size", "ep_size", "enable_lora", "max_lora_rank",
        "max_loaded_loras", "lora_*", "log_*", "show_time_cost", "enable_metrics", "decode_log_interval",
        "enable_multithread_load", "enable_return_routed_experts",
    )),
    *(Absent(f"vllm.{name}") for name in (
        "model", "seed", "skip_tokenizer_init", "enforce_eager", "distributed_executor_backend", "max_num_seqs",
        "block_size", "swap_space", "cpu_offload_gb", "disable_sliding_window", "no_enable_*",
        "gpu_memory_utilization", "worker_extension_cls", "enable_sleep_mode", "uvicorn_log_level", "enable_lora",
        "max_lora_rank", "max_loras", "lora_modules",
    )),
    *(Absent(f"{dataset}.{name}") for dataset in ("train_dataset", "valid_dataset") for name in (
        "type", "pin_memory", "num_workers", "num_dataset_workers", "scheduling_spec*", "setup_timeout")),
    *(Absent(f"valid_dataset.{name}") for name in ("split", "batch_size", "shuffle", "drop_last")),
    *(Absent(f"{timer}.{name}") for timer in ("saver", "recover", "evaluator", "checkpointer") for name in (
        "experiment_name", "trial_name", "fileroot", "mode", "retries", "no_save_optim", "no_load_optim", "freq_*")),
    *(Absent(pattern) for pattern in (
        "gconfig.skip_special_tokens", "gconfig.lora_name", "eval_gconfig.skip_special_tokens",
        "eval_gconfig.lora_name",
        "stats_logger.experiment_name", "stats_logger.trial_name", "stats_logger.fileroot", "stats_logger.wandb.*",
        "stats_logger.swanlab.*", "stats_logger.trackio.*", "stats_logger.tensorboard", "perf_tracer.*",
        "perf_tracer", "memory_profiler*", "cluster.n_nodes", "cluster.cluster_name", "cluster.name_resolve.*",
        "scheduler.*", "launcher.*", "tokenizer_path", "trial_name", "enable_offload", "async_training", "model_path",
        "log_agent_stats", "cpu*", "mem*", "ref", "critic", "teacher", "valid_dataset", "eval_gconfig",
    )),
)  # fmt: skip


def finish(ours: Ours, foreign: Foreign) -> None:
    advantage(ours, foreign)
    correction(ours, foreign)
    if n_generators := ours.get("topology.generators"):
        most = ours.get("rollout.max_concurrent_rollouts", 32 * n_generators)
        ours["rollout.max_concurrent_rollouts"] = max(1, most // n_generators)
    if "reward.function" not in ours:
        ours["reward.function"] = "math"
        if "data.task" not in ours:
            foreign.to_set["reward.function"] = 'AReaL names it in the training script: "module:function"'
    if ours.get("actor.prox_logp_method") == "loglinear":
        foreign.remove(ours, 'with actor.prox_logp_method = "loglinear"', "actor.m2_threshold")
    if not ours.get("actor.recompute_logprobs"):
        foreign.remove(ours, "compares the recomputed policy with the sampler: set actor.recompute_logprob",
                       "actor.m2_threshold")  # fmt: skip
    tidy(ours, foreign)


AREAL = System("areal", "AReaL", ("gconfig", "train_dataset", "rollout", "ref"), KEYS, ABSENT, finish)
