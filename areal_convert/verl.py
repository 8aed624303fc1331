"""verl's settings (ppo_trainer.yaml and the files of its asynchronous trainers, or a part of one)."""

from collections.abc import Callable
from typing import Any

from areal_convert import verl_distillation, verl_reward
from areal_convert.fitting import tidy
from areal_convert.mapping import Absent, Foreign, Key, Ours, System
from areal_convert.values import (
    ENGINES,
    PRECISIONS,
    SCHEDULES,
    as_number,
    as_truth,
    as_whole,
    chosen,
    path_of,
    positive,
    run_name,
    skip,
    taus,
    trackers,
    truth,
    unless,
    warmup_share,
)
from areal_convert.verl_values import (
    ACTOR,
    ASYNC,
    CORRECTION,
    LOSSES,
    MEGATRON_LAYERS,
    MODEL,
    OPTIMIZER,
    REF,
    ROLLOUT,
    VAL,
    VERSIONS,
    batch_size,
    betas,
    clip_high,
    correction,
    dual_clip,
    estimator,
    greedy,
    in_a_set,
    kl_loss,
    kl_reward,
    long_prompts,
    lora,
    lora_of_megatron,
    minibatches,
    optimizer,
    refill,
    several_turns,
    staleness,
    streamed_batches,
    token_budget,
    top_k,
    train_files,
    truncation,
    val_files,
)

KEYS = (
    Key(f"{MODEL}path", "model.path", "", None, path_of("model.path")),
    Key(f"{ROLLOUT}dtype", "model.dtype", "", "bfloat16", chosen("model.dtype", f"{ROLLOUT}dtype", PRECISIONS)),
    Key(f"{MODEL}enable_gradient_checkpointing", "learner.gradient_checkpointing", "", True,
        as_truth("learner.gradient_checkpointing")),
    Key(f"{MODEL}lora_rank", "actor.lora.rank", "0: all weights are trained; docs/lora.md", None, lora),
    Key(f"{MODEL}lora_alpha", "actor.lora.alpha", "with lora_rank", 16, skip),
    Key(f"{MODEL}target_modules", "actor.lora.target_modules", "with lora_rank", "all-linear", skip),
    Key(f"{MODEL}lora.rank", "actor.lora.rank", "Megatron's adapters, all linear layers", None, lora_of_megatron),
    Key(f"{MODEL}lora.alpha", "actor.lora.alpha", "with lora.rank", None, skip),
    Key(f"{MODEL}lora.dropout", "actor.lora.dropout", "with lora.rank", None, skip),
    Key(f"{MODEL}lora.target_modules", "actor.lora.target_modules", "with lora.rank", None, skip),
    Key("data.train_files", "data.path, data.source", "several: a source each, of equal weight", None, train_files),
    Key("data.val_files", "evaluate.path, evaluate.sets", "several: a set each", None, val_files),
    Key("data.prompt_key", "data.question_key", "chat messages", "prompt"),
    Key("data.train_max_samples", "data.limit", "-1: all", None, positive("data.limit")),
    Key("data.val_max_samples", "evaluate.limit", "-1: all", None, positive("evaluate.limit")),
    Key("data.train_batch_size", "data.batch_size", "prompts of one update", 1024, batch_size),
    Key("data.max_prompt_length", "data.max_prompt_tokens", "longer rows: the next key", 512,
        as_whole("data.max_prompt_tokens")),
    Key("data.filter_overlong_prompts", "data.long_prompts", "true: drop, false: refuse", False, long_prompts),
    Key("data.truncation", "data.long_prompts", "error only: no prompt is truncated", None, truncation),
    Key("data.max_response_length", "gconfig.max_new_tokens", "", 512, as_whole("gconfig.max_new_tokens")),
    Key("data.shuffle", "data.shuffle", "", None, as_truth("data.shuffle")),
    Key("data.seed", "run.seed", "", None, as_whole("run.seed")),
    Key("data.apply_chat_template_kwargs.*", "data.chat_template_kwargs", "each argument by name", None,
        lambda value, foreign: {"data.chat_template_kwargs": value}),
    Key(f"{ROLLOUT}name", "rollout.engine", "vllm, sglang; hf is builtin", None,
        chosen("rollout.engine", f"{ROLLOUT}name", ENGINES)),
    Key(f"{ROLLOUT}n", "gconfig.n_samples", "samples of a prompt", 1, as_whole("gconfig.n_samples")),
    Key(f"{ROLLOUT}temperature", "gconfig.temperature", "", None, as_number("gconfig.temperature")),
    Key(f"{ROLLOUT}do_sample", "gconfig.temperature", "false: temperature 0", None, greedy("gconfig.temperature")),
    Key(f"{ROLLOUT}top_p", "gconfig.top_p", "", None, as_number("gconfig.top_p")),
    Key(f"{ROLLOUT}top_k", "gconfig.top_k", "-1 is 0", None, top_k),
    Key(f"{ROLLOUT}repetition_penalty", "gconfig.repetition_penalty", "", None,
        as_number("gconfig.repetition_penalty")),
    Key(f"{ROLLOUT}ignore_eos", "gconfig.ignore_eos", "", None, as_truth("gconfig.ignore_eos")),
    Key(f"{ROLLOUT}tensor_model_parallel_size", "topology.tensor_parallel", "with sglang and vllm", None,
        as_whole("topology.tensor_parallel")),
    Key(f"{ROLLOUT}max_num_seqs", "rollout.max_concurrent_rollouts", "", None,
        as_whole("rollout.max_concurrent_rollouts")),
    Key(f"{VAL}n", "evaluate.n_samples", "", 1, as_whole("evaluate.n_samples")),
    Key(f"{VAL}temperature", "evaluate.temperature", "", 0, as_number("evaluate.temperature")),
    Key(f"{VAL}do_sample", "evaluate.temperature", "false: temperature 0", None, greedy("evaluate.temperature")),
    Key(f"{VAL}top_p", "evaluate.sets", "set it there", None, in_a_set("top_p", 1.0)),
    Key(f"{VAL}top_k", "evaluate.sets", "set it there", None, in_a_set("top_k", -1)),
    Key(f"{VAL}repetition_penalty", "evaluate.sets", "set it there", None,
        in_a_set("repetition_penalty", 1.0)),
    Key(f"{ASYNC}staleness_threshold", "rollout.max_head_offpolicyness", "rounded up; verl's synchronous trainers: 0, "
        "the one-step-off trainer: 1", None, skip),
    Key(f"{ASYNC}require_batches", "data.batch_size, actor.ppo_n_minibatches", "x trigger_parameter_sync_step "
        "minibatches of ppo_mini_batch_size are a batch", None, skip),
    Key(f"{ASYNC}trigger_parameter_sync_step", "data.batch_size, actor.ppo_n_minibatches", "", None, skip),
    Key(f"{ASYNC}partial_rollout", "rollout.on_update", "false: drain", None,
        lambda value, foreign: {} if truth(value) else {"rollout.on_update": "drain"}),
    Key("rollout.total_rollout_steps", "run.total_train_steps", "prompts: / data.batch_size", None, skip),
    Key("trainer.v1.trainer_mode", "rollout.max_head_offpolicyness", "sync: 0", None, skip),
    Key(VERSIONS, "rollout.max_head_offpolicyness", "of the modes colocate_async and separate_async", None, skip),
    Key("algorithm.adv_estimator", "actor.advantage", "grpo with norm_adv_by_std_in_grpo = false is dr_grpo", "gae",
        estimator),
    Key("algorithm.norm_adv_by_std_in_grpo", "actor.advantage", "with grpo", None, skip),
    Key("algorithm.gamma", "actor.discount", "with gae", None, as_number("actor.discount")),
    Key("algorithm.lam", "actor.gae_lambda", "with gae", None, as_number("actor.gae_lambda")),
    Key("algorithm.use_kl_in_reward", "actor.kl_ctl, actor.kl_in, actor.kl_estimator",
        "with kl_ctrl.kl_coef and kl_penalty", None, kl_reward),
    Key("algorithm.kl_ctrl.kl_coef", "actor.kl_ctl", "with use_kl_in_reward", 0.001, skip),
    Key("algorithm.kl_ctrl.type", "", "fixed only", None, skip),
    Key("algorithm.kl_ctrl.horizon", "", "of the adaptive type", None, skip),
    Key("algorithm.kl_ctrl.target_kl", "", "of the adaptive type", None, skip),
    Key("algorithm.kl_penalty", "actor.kl_estimator", "with use_kl_in_reward", "kl", skip),
    Key(f"{CORRECTION}rollout_is", "actor.correction", "token is tis, sequence is tis_sequence; unset: none, as in "
        "verl", None, skip),
    Key(f"{CORRECTION}rollout_is_threshold", "actor.correction_upper", '"0.5_5.0": two bounds, correction_action = '
        "mask", None, skip),
    Key(f"{CORRECTION}bypass_mode", "actor.recompute_logprobs", "true: false, with actor.correction = none", None,
        skip),
    Key(f"{CORRECTION}loss_type", "actor.loss", "with bypass_mode; reinforce", None, skip),
    Key(f"{ACTOR}tis_imp_ratio_cap", "actor.correction, actor.correction_upper", "older; tis", None, skip),
    Key("algorithm.filter_groups.enable", "data.max_refill", "dynamic sampling: prompts that replace groups without "
        "signal", None, refill),
    Key("algorithm.filter_groups.max_num_gen_batches", "data.max_refill", "with filter_groups.enable", None, skip),
    Key(f"{ACTOR}ppo_mini_batch_size", "actor.ppo_n_minibatches", "train_batch_size / ppo_mini_batch_size", 256,
        minibatches),
    Key(f"{ACTOR}ppo_epochs", "actor.ppo_epochs", "", None, as_whole("actor.ppo_epochs")),
    Key(f"{ACTOR}ppo_max_token_len_per_gpu", "learner.max_tokens_per_mb", "with use_dynamic_bsz", None, token_budget),
    Key(f"{ACTOR}use_dynamic_bsz", "learner.max_tokens_per_mb", "always here", None, skip),
    Key(f"{ACTOR}clip_ratio", "actor.eps_clip", "where clip_ratio_low is unset", None, as_number("actor.eps_clip")),
    Key(f"{ACTOR}clip_ratio_low", "actor.eps_clip", "", None, as_number("actor.eps_clip")),
    Key(f"{ACTOR}clip_ratio_high", "actor.eps_clip_higher", "", None, clip_high),
    Key(f"{ACTOR}clip_ratio_c", "actor.c_clip", "with ppo and gspo", 3.0, dual_clip),
    Key(f"{ACTOR}policy_loss.loss_mode", "actor.loss", "vanilla is ppo, geo_mean is gmpo; gspo, cispo, sapo", None,
        chosen("actor.loss", f"{ACTOR}policy_loss.loss_mode", LOSSES)),
    Key(f"{ACTOR}loss_agg_mode", "actor.aggregation", "the same names", None),
    Key(f"{ACTOR}loss_scale_factor", "actor.aggregation_length", "with seq-mean-token-sum-norm", None,
        as_whole("actor.aggregation_length")),
    Key(f"{ACTOR}tau_pos", "actor.sapo_tau", "with sapo", None, taus(f"{ACTOR}tau_pos", f"{ACTOR}tau_neg")),
    Key(f"{ACTOR}tau_neg", "actor.sapo_tau", "with sapo", None, taus(f"{ACTOR}tau_pos", f"{ACTOR}tau_neg")),
    Key(f"{ACTOR}entropy_coeff", "actor.entropy_coef", "", None, as_number("actor.entropy_coef")),
    Key(f"{ACTOR}use_kl_loss", "actor.kl_ctl, actor.kl_in, actor.kl_estimator", "with kl_loss_coef and kl_loss_type",
        None, kl_loss),
    Key(f"{ACTOR}kl_loss_coef", "actor.kl_ctl", "with use_kl_loss", 0.001, skip),
    Key(f"{ACTOR}kl_loss_type", "actor.kl_estimator", "mse is k2, low_var_kl is k3; kl has no gradient as a loss",
        "low_var_kl", skip),
    Key(f"{ACTOR}grad_clip", "actor.max_grad_norm", "", None, as_number("actor.max_grad_norm")),
    Key(f"{OPTIMIZER}optimizer", "", "AdamW only", None, optimizer),
    Key(f"{OPTIMIZER}lr", "actor.lr", "", 1e-6, as_number("actor.lr")),
    Key(f"{OPTIMIZER}lr_warmup_steps", "actor.lr_warmup_steps", "-1: by the ratio", None,
        positive("actor.lr_warmup_steps")),
    Key(f"{OPTIMIZER}lr_warmup_steps_ratio", "actor.lr_warmup_steps", "of the run", None,
        warmup_share(f"{OPTIMIZER}lr_warmup_steps_ratio")),
    Key(f"{OPTIMIZER}lr_scheduler_type", "actor.lr_schedule", "", None,
        chosen("actor.lr_schedule", f"{OPTIMIZER}lr_scheduler_type", SCHEDULES)),
    Key(f"{OPTIMIZER}warmup_style", "actor.lr_schedule", "older name", None,
        chosen("actor.lr_schedule", f"{OPTIMIZER}warmup_style", SCHEDULES)),
    Key(f"{OPTIMIZER}min_lr_ratio", "actor.min_lr_ratio", "", None, as_number("actor.min_lr_ratio")),
    Key(f"{OPTIMIZER}weight_decay", "actor.weight_decay", "", 0.01, as_number("actor.weight_decay")),
    Key(f"{OPTIMIZER}betas", "actor.adam_beta1, actor.adam_beta2", "", [0.9, 0.999], betas),
    Key(f"{OPTIMIZER}clip_grad", "actor.max_grad_norm", "", None, as_number("actor.max_grad_norm")),
    *verl_distillation.KEYS,
    Key(f"{REF}model.path", "reference.path", "with a KL", None, path_of("reference.path")),
    Key("critic.optim.lr", "critic.lr", "with gae", None, as_number("critic.lr")),
    Key("critic.model.path", "critic.path", "with gae", None, path_of("critic.path")),
    Key("trainer.critic_warmup", "critic.warmup_updates", "with gae", 0, as_whole("critic.warmup_updates")),
    Key("critic.cliprange_value", "critic.eps_clip", "with gae", 0.5, as_number("critic.eps_clip")),
    Key(f"{ROLLOUT}multi_turn.enable", "workflow.function", "write a workflow, or bring an agent: docs/agents.md", None,
        several_turns),
    *(Key(f"{base}path", "reward.function", "the file's module and `name`; put the file beside the TOML", None, skip)
      for base in verl_reward.FUNCTIONS),
    *(Key(f"{base}name", "reward.function", "", None, skip) for base in verl_reward.FUNCTIONS),
    *(Key(key, "", "set reward.model.path", None, skip) for key in verl_reward.MODELS),
    *(Key(key, "reward.function", "naive, batch, prime, dapo: those that call the function", None, skip)
      for key in verl_reward.MANAGERS),
    *(Key(f"{base}url", "reward.function", "code, where no function is named", None, skip)
      for base in verl_reward.SANDBOXES),
    *(Key(f"{base}memory_limit_mb", "reward.code.memory_mib", "with its url", None, skip)
      for base in verl_reward.SANDBOXES),
    *(Key(f"{base}enable", "actor.overlong_tokens, actor.overlong_penalty_factor", "with len and penalty_factor", None,
          skip) for base in verl_reward.OVERLONG),
    *(Key(f"{base}len", "actor.overlong_tokens", "with enable", None, skip) for base in verl_reward.OVERLONG),
    *(Key(f"{base}penalty_factor", "actor.overlong_penalty_factor", "with enable", None, skip)
      for base in verl_reward.OVERLONG),
    Key("trainer.total_epochs", "data.total_train_epochs", "", 30, as_whole("data.total_train_epochs")),
    Key("trainer.total_training_steps", "run.total_train_steps", "unset: the passes end the run", None,
        positive("run.total_train_steps")),
    Key("trainer.experiment_name", "run.name", "", None, lambda value, foreign: {"run.name": run_name(value)}),
    Key("trainer.logger", "journal.tracker", "wandb, tensorboard, trackio, mlflow, swanlab", None,
        lambda value, foreign: {"journal.tracker": found} if (found := trackers(value)) else {}),
    Key("trainer.n_gpus_per_node", "topology.gpus_per_host", "choose the split of GPUs: docs/choosing.md", None,
        as_whole("topology.gpus_per_host")),
    Key("trainer.save_freq", "checkpoint.every_steps", "-1: by time only", None, positive("checkpoint.every_steps")),
    Key("trainer.max_actor_ckpt_to_keep", "checkpoint.keep", "", None, as_whole("checkpoint.keep")),
    Key("trainer.test_freq", "evaluate.every_steps", "-1: never", None, positive("evaluate.every_steps")),
    Key("trainer.val_before_train", "evaluate.before", "", True, as_truth("evaluate.before")),
)  # fmt: skip


def of_another_loss(value: object, foreign: Foreign) -> bool:
    """Parameters of a loss are off unless that loss is chosen; it is lost itself then."""
    return str(foreign.get(f"{ACTOR}policy_loss.loss_mode", "vanilla")) in LOSSES


def of_turns(value: object, foreign: Foreign) -> bool:
    return not foreign.get(f"{ROLLOUT}multi_turn.enable", False)


def of_answers(value: object, foreign: Foreign) -> bool:
    """Whether a limit in tokens is that of [data], which counts here."""
    return value is None or value in (foreign.get("data.max_response_length"), foreign.get("data.max_prompt_length"))


def of_critic(*usual: object) -> Callable[[Any, Foreign], bool]:
    """Off without a critic, and at the usual values."""
    return lambda value, foreign: foreign.get("algorithm.adv_estimator") != "gae" or unless(*usual)(value, foreign)


def as_policy(name: str, usual: float) -> Callable[[Any, Foreign], bool]:
    """Off without a critic, and at the value of the policy's optimizer."""
    return lambda value, foreign: of_critic()(value, foreign) or value == foreign.get(f"{OPTIMIZER}{name}", usual)


ABSENT = (
    Absent("*_target_"),
    Absent(f"{MODEL}lora_adapter_path", "adapters begin at zero"),
    Absent(f"{MODEL}lora.adapter_path", "adapters begin at zero"),
    Absent(f"{MODEL}*exclude_modules", "name the layers with adapters: actor.lora.target_modules"),
    Absent(f"{MODEL}lora.type", "LoRA only; set actor.lora.variant", unless("lora")),
    Absent(f"{MODEL}custom_chat_template", "write it into the model's folder (tokenizer_config.json)"),
    Absent(f"{MODEL}tokenizer_path", "the tokenizer is read from model.path"),
    Absent(f"{MODEL}hf_config_path", "the config is read from model.path"),
    Absent(f"{MODEL}override_config*", "edit config.json of the model's folder"),
    Absent(f"{MODEL}mtp.enable*", "no multi-token prediction here"),
    Absent("critic.optim.lr_warmup_steps", "the critic warms up as the policy does", as_policy("lr_warmup_steps", -1)),
    Absent("critic.optim.lr_warmup_steps_ratio", "the critic warms up as the policy does",
           as_policy("lr_warmup_steps_ratio", 0.0)),
    Absent("critic.optim.weight_decay", "the critic has the weight decay of the policy",
           as_policy("weight_decay", 0.01)),
    Absent("critic.grad_clip", "the critic's gradient is clipped as the policy's", lambda value, foreign: of_critic()(
        value, foreign) or value == foreign.get(f"{ACTOR}grad_clip", 1.0)),
    Absent("critic.optim.*", "[critic] has a constant rate and AdamW's usual betas", of_critic(
        "AdamW", "torch.optim", "constant", [0.9, 0.999], 0.5, -1, 1.0, True)),
    Absent("critic.ppo_mini_batch_size", "the critic has the policy's minibatches", lambda value, foreign: of_critic()(
        value, foreign) or value == foreign.get(f"{ACTOR}ppo_mini_batch_size")),
    Absent("critic.ppo_epochs", "the critic has the policy's passes", lambda value, foreign: value in (
        None, foreign.get(f"{ACTOR}ppo_epochs", 1))),
    Absent("critic.loss_agg_mode", "the critic's loss is a mean over tokens", of_critic("token-mean")),
    Absent("critic.loss_scale_factor", "the critic's loss is a mean over tokens", of_critic()),
    Absent("critic.shuffle", "groups are dealt to minibatches in order", of_critic()),
    Absent("critic.enable", "actor.advantage = gae has a critic, others none", lambda value, foreign: value in (
        None, foreign.get("algorithm.adv_estimator") == "gae")),
    Absent("data.function_tool_path", "tools are a workflow's: docs/environments.md"),
    Absent("data.mm_processor_kwargs*", "text models only"),
    Absent("data.tool_config_path", "tools are a workflow's: docs/environments.md"),
    Absent("data.custom_cls.*", "rows are files or Hugging Face ids, or of data.function: docs/data.md"),
    Absent("data.datagen.*", "rows are files or Hugging Face ids, or of data.function: docs/data.md"),
    Absent("data.sampler.*", "rows are drawn in a shuffled order, or by data.function: docs/data.md"),
    Absent("data.reward_fn_key", "a reward function reads any field of the row", unless("data_source")),
    Absent("data.gen_batch_size", "prompts are drawn one by one: data.max_refill", lambda value, foreign: bool(
        foreign.section(ASYNC)) or value in (None, foreign.get("data.train_batch_size"))),
    Absent("data.validation_shuffle", "problems are evaluated in their order"),
    Absent("*custom_reward_function.reward_kwargs*", "give the parameters of the function defaults"),
    *(Absent(key, 'a class of its own computes the reward: set reward.function = "module:function"')
      for key in verl_reward.MANAGER_FILES),
    Absent("reward*.reward_kwargs.max_resp_len", "gconfig.max_new_tokens", of_answers),
    Absent("reward*.reward_kwargs.*overlong_buffer_cfg.log"),
    Absent("reward*overlong_buffer*.log"),
    Absent("reward*.reward_kwargs*", "give the parameters of the function defaults"),
    Absent(f"{CORRECTION}rollout_rs", "rejection without a weight: docs/algorithms.md has what there is"),
    Absent(f"{CORRECTION}rollout_rs_threshold", "with rollout_rs", lambda value, foreign: not foreign.get(
        f"{CORRECTION}rollout_rs")),
    Absent(f"{CORRECTION}rollout_is_batch_normalize", "weights are not normalised over the batch"),
    Absent("algorithm.filter_groups.metric", "groups whose rewards are equal have no signal", unless(
        "acc", "score", "seq_reward", "seq_final_reward")),
    Absent("algorithm.filter_groups.max_inflight_gen_batches"),
    Absent("algorithm.use_pf_ppo", "all samples of a batch are trained"),
    Absent("algorithm.pf_ppo.*", "all samples of a batch are trained", lambda value, foreign: not foreign.get(
        "algorithm.use_pf_ppo")),
    *verl_distillation.ABSENT,
    Absent(f"{ACTOR}policy_loss.*", "a parameter of a loss that is not there", of_another_loss),
    Absent(f"{ACTOR}shuffle", "groups are dealt to minibatches in order"),
    Absent(f"{ACTOR}freeze_vision_tower", "text models only"),
    Absent(f"{ACTOR}router_replay.*", "routes of experts are not replayed", unless("disabled")),
    Absent(f"{ROLLOUT}enable_rollout_routing_replay", "routes of experts are not replayed"),
    Absent(f"{ACTOR}calculate_sum_pi_squared", "no such baseline: docs/algorithms.md"),
    Absent(f"{OPTIMIZER}override_optimizer_config*", "AdamW with the settings of [actor]"),
    Absent(f"{OPTIMIZER}num_cycles", "the cosine is half a cycle", unless(0.5)),
    Absent(f"{OPTIMIZER}total_training_steps", "set trainer.total_training_steps", lambda value, foreign: value in (
        None, -1, foreign.get("trainer.total_training_steps"))),
    Absent("*.qat.enable", "weights are trained as they are"),
    Absent(f"{ROLLOUT}quantization*", "samples come from the trained weights as they are"),
    Absent(f"{ROLLOUT}prompt_length", "set data.max_prompt_length", of_answers),
    Absent(f"{ROLLOUT}response_length", "set data.max_response_length", of_answers),
    Absent(f"{ROLLOUT}max_model_len", "data.max_prompt_tokens and gconfig.max_new_tokens bound a sequence"),
    Absent(f"{ROLLOUT}over_sample_rate", "no sample is cut off because others are done"),
    Absent(f"{ROLLOUT}engine_kwargs*", "pass options of the server in engine.arguments"),
    Absent(f"{ROLLOUT}multi_turn.*", "with multi_turn.enable", of_turns),
    Absent(f"{ROLLOUT}agent.default_agent_loop", "write a workflow: docs/environments.md", unless("single_turn_agent")),
    Absent(f"{ROLLOUT}agent.agent_loop_config_path", "write a workflow: docs/environments.md"),
    Absent(f"{ROLLOUT}agent.custom_async_server.*", "rollout.engine is one of those here"),
    Absent("rollout.n", "actor_rollout_ref.rollout.n counts the samples", lambda value, foreign: value in (
        None, foreign.get(f"{ROLLOUT}n"))),
    Absent("trainer.v1.sampler.max_off_policy_strategy", "set rollout.staleness_policy", lambda value, foreign: str(
        foreign.get("trainer.v1.trainer_mode", "sync")) == "sync"),
    Absent("trainer.v1.sampler.sync_refill_failed_groups"),
    Absent("trainer.v1.sampler.*", "prompts are drawn by the head", unless(None)),
    Absent("trainer.val_only", "python -m tools.evaluate evaluates alone"),
    Absent("trainer.resume_mode", "--resume RUN or run.resume", unless("auto", "disable")),
    Absent("trainer.resume_from_path", "--resume RUN or run.resume"),
    Absent("trainer.nnodes", "mpirun's ranks decide: docs/choosing.md", unless(1)),
    *(Absent(f"{ACTOR}{name}") for name in (
        "strategy", "rollout_n", "ppo_micro_batch_size*", "use_torch_compile", "use_fused_kernels",
        "use_remove_padding", "use_prefix_grouper", "ulysses_sequence_parallel_size", "entropy_from_logits_*",
        "entropy_checkpointing", "sum_pi_squared_checkpointing", "pad_to_length", "data_loader_seed",
        "calculate_entropy", "checkpoint.*", "use_rollout_log_probs", "fsdp_config.*", "megatron.*", "veomni.*",
        "torchtitan.*", "automodel.*", "qat.*", "profiler.*", "load_weight",
    )),
    *(Absent(f"{OPTIMIZER}{name}") for name in ("optimizer_impl", "zero_indexed_step")),
    *(Absent(f"{REF}{name}") for name in (
        "strategy", "rollout_n", "use_torch_compile", "log_prob_*", "ulysses_sequence_parallel_size",
        "entropy_from_logits_*", "entropy_checkpointing", "pad_to_length", "fsdp_config.*", "megatron.*", "veomni.*",
        "torchtitan.*", "automodel.*", "profiler.*", "router_replay.*", "load_weight",
    )),
    *(Absent(f"{ROLLOUT}{name}") for name in (
        "mode", "nnodes", "n_gpus_per_node", "gpu_memory_utilization", "standalone_gpu_memory_utilization",
        "enforce_eager", "cudagraph_capture_sizes", "free_cache_engine", "data_parallel_size", "expert_parallel_size",
        "pipeline_model_parallel_size", "max_num_batched_tokens", "enable_chunked_prefill", "enable_prefix_caching",
        "scheduling_policy", "load_format", "layered_summon", "log_prob_*", "logprobs_mode", "disable_log_stats",
        "multi_stage_wake_up", "calculate_log_probs", "agent.num_workers", "checkpoint_engine.*", "trace.*",
        "skip_*", "moe_load_balance_metrics_interval", "prometheus.*", "mtp*", "qat*", "disaggregation.*",
        "profiler.*", "full_determinism", "seed", "update_weights_bucket_megabytes", "limit_images",
    )),
    *(Absent(f"{base}{name}") for base in (MODEL, "critic.model.") for name in (
        "use_shm", "trust_remote_code", "external_lib", "enable_activation_offload", "use_remove_padding", "use_liger",
        "use_fused_kernels", "fused_kernel_options.*", "tiled_mlp.*", "mtp.*", "lora.merge", "lora.dropout_position",
        "lora.lora_?_init_method", "lora.a2a_experimental", "lora.dtype", "lora.freeze_*",
    )),
    *(Absent(f"critic.{name}") for name in (
        "strategy", "rollout_n", "ppo_micro_batch_size*", "use_dynamic_bsz", "*_max_token_len_per_gpu",
        "forward_micro_batch_size*", "ulysses_sequence_parallel_size", "data_loader_seed", "checkpoint.*", "profiler.*",
        "fsdp.*", "megatron.*", "veomni.*", "torchtitan.*", "load_weight",
    )),
    *(Absent(f"data.{name}") for name in (
        "tokenizer", "use_shm", "val_batch_size", "return_*", "dataloader_num_workers", "image_*", "video_*", "audio_*",
        "filter_overlong_prompts_workers", "trust_remote_code", "cache_dir",
    )),
    *(Absent(f"trainer.{name}") for name in (
        "balance_batch", "project_name", "log_val_generations", "rollout_data_dir", "validation_data_dir",
        "esi_redundant_time", "default_hdfs_dir", "del_local_ckpt_after_load", "default_local_dir",
        "max_critic_ckpt_to_keep", "ray_wait_register_center_timeout", "device", "use_legacy_worker_impl", "use_v1",
        "v1.sync*", "v1.colocate_async.*", "v1.separate_async.*",
    )),
    Absent("critic.model.enable_gradient_checkpointing"),
    Absent("critic.model.*", "[critic] has a path only", of_critic("all-linear", "lora", 16, 32, MEGATRON_LAYERS)),
    *(Absent(name) for name in (
        "reward.num_workers", "reward*.reward_manager.source", "reward*.reward_manager.module.name",
        "reward_manager.source", "reward_manager.module.name", "reward.reward_model.*", "reward_model.model.*",
        "reward_model.rollout.*", "reward_model.profiler.*", "reward_model.enable_resource_pool", "reward_model.n*",
        "reward_model.strategy", "reward_model.*micro_batch_size*", "reward_model.max_length", "reward_model.use_*",
        "reward_model.forward_max_token_len_per_gpu", "reward_model.reward_loop_*",
        "reward_model.launch_reward_fn_async",
        "reward_model.ulysses_sequence_parallel_size", "*sandbox_fusion.max_concurrent", "rollout.nnodes",
        "rollout.n_gpus_per_node", "actor_rollout_ref.hybrid_engine", "actor_rollout_ref.nccl_timeout",
        f"{ASYNC}use_*", f"{ASYNC}dynamic_schedule_*", f"{ASYNC}concurrent_samples_per_replica",
        "global_profiler.*", "transfer_queue.*", "ray_kwargs.*", "ray_init.*", "skip.*", "hydra.*", "defaults*",
    )),
)  # fmt: skip


def finish(ours: Ours, foreign: Foreign) -> None:
    ours["data.answer_key"] = "reward_model.ground_truth"
    streamed_batches(ours, foreign)
    correction(ours, foreign)
    staleness(ours, foreign)
    verl_reward.reward(ours, foreign)
    verl_distillation.distillation(ours, foreign)
    tidy(ours, foreign)


VERL = System("verl", "verl", ("actor_rollout_ref", "algorithm"), KEYS, ABSENT, finish)
