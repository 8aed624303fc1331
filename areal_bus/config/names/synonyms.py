"""Maps setting names of other systems (verl, TRL, OpenRLHF, prime-rl, AReaL, ...) to our keys."""

import difflib

OURS_TO_THEIRS: dict[str, str] = {  # our key -> names of other systems
    "actor.lr": "learning_rate actor_learning_rate max_lr peak_lr",
    "actor.lr_warmup_steps": "warmup_steps num_warmup_steps warmup_ratio lr_warmup_ratio warmup_steps_proportion",
    "actor.lr_schedule": "lr_scheduler lr_scheduler_type lr_decay_style scheduler",
    "actor.advantage": "adv_estimator advantage_estimator",
    "actor.eps_clip": "clip_ratio cliprange clip_range clip_eps epsilon clip_epsilon clip_ratio_low epsilon_low",
    "actor.eps_clip_higher": "clip_ratio_high epsilon_high eps_clip_high clip_higher",
    "actor.c_clip": "clip_ratio_c dual_clip delta",
    "actor.loss": "policy_loss loss_type loss_mode loss_fn policy_loss_fn importance_sampling_level use_sapo_loss",
    "actor.aggregation": "loss_agg_mode loss_aggregation loss_reduction",
    "actor.correction": "rejection_sampling rollout_is rollout_correction importance_sampling_correction",
    "actor.kl_ctl": "kl_coef kl_loss_coef init_kl_coef kl_beta beta use_kl_loss kl_penalty_coef kl_loss_weight kl_tau",
    "actor.kl_estimator": "kl_loss_type kl_type kl_penalty kl_estimator_type",
    "actor.kl_in": "use_kl_in_reward use_kl_in_loss kl_in_reward",
    "actor.distill_beta": "gkd_beta jsd_beta distillation_beta",
    "actor.distill_top_k": "gkd_logits_topk distillation_topk logprobs_topk",
    "actor.distill_coef": "distillation_coef distill_weight distillation_weight teacher_kl_coef opd_kl_coef lmbda",
    "actor.entropy_coef": "entropy_coeff entropy_bonus ent_coef entropy_loss_coef",
    "actor.truncated_samples": "mask_no_eos_with_zero mask_truncated_completions overlong_filtering",
    "actor.overlong_tokens": "overlong_reward_penalty overlong_buffer overlong_buffer_len",
    "actor.min_lr_ratio": "min_lr lr_min_ratio",
    "actor.behav_imp_weight_cap": "tis_imp_ratio_cap truncated_importance_sampling_ratio_cap imp_ratio_cap rho_bar",
    "actor.use_decoupled_loss": "decoupled_ppo decoupled_loss use_tis",
    "actor.ppo_epochs": "num_ppo_epochs ppo_epoch num_iterations n_epochs_per_batch",
    "actor.ppo_n_minibatches": "ppo_mini_batch_size mini_batch_size num_minibatches num_mini_batches",
    "actor.max_grad_norm": "grad_clip clip_grad max_norm gradient_clipping clip_grad_norm",
    "actor.normalize_batch": "normalize_advantages whiten_advantages adv_norm norm_adv",
    "actor.gae_lambda": "lam lambda_ gae_lam",
    "actor.discount": "gamma discount_factor",
    "critic.lr": "critic_lr critic_learning_rate value_lr",
    "critic.eps_clip": "value_clip cliprange_value value_clip_range eps_clip_value",
    "critic.warmup_updates": "critic_warmup critic_warmup_steps",
    "critic.path": "critic_path critic_model critic_pretrain value_model reward_model_path",
    "checkpoint.every_steps": "save_steps save_freq save_interval checkpoint_interval ckpt_interval",
    "checkpoint.keep": "save_total_limit max_ckpt_num max_actor_ckpt_to_keep keep_last",
    "data.batch_size": "rollout_batch_size train_batch_size global_batch_size gen_batch_size prompts_per_step",
    "data.max_prompt_tokens": "max_prompt_length max_prompt_len prompt_max_len",
    "data.max_refill": "dynamic_sampling filter_groups max_num_gen_batches filter_zero_variance oversampling",
    "data.path": "dataset dataset_name dataset_path train_files train_path prompt_data",
    "data.total_train_epochs": "num_train_epochs total_epochs num_epochs epochs num_episodes",
    "engine.python": "server_python python_executable",
    "gconfig.max_new_tokens": "max_completion_length max_response_length response_length generate_max_len"
    " max_length max_gen_len",
    "gconfig.n_samples": "group_size num_generations n_samples_per_prompt rollout_n rollouts_per_example num_samples n",
    "gconfig.min_new_tokens": "min_tokens min_length",
    "gconfig.stop": "stop_strings stop_sequences stop_strs stop_words stop_texts",
    "gconfig.temperature": "temp sampling_temperature rollout_temperature",
    "workflow.agent.timeout_s": "max_episode_s episode_timeout_s rollout_timeout_s",
    "journal.tracker": "logger report_to use_wandb wandb trackers log_with",
    "actor.lora.rank": "lora_rank lora_r",
    "actor.lora.variant": "use_dora use_rslora use_qlora load_in_4bit bnb_4bit_quant_type",
    "evaluate.every_steps": "eval_steps test_freq eval_every eval_interval eval_freq",
    "learner.compile": "use_torch_compile torch_compile compile_model",
    "learner.gradient_checkpointing": "enable_gradient_checkpointing activation_checkpointing ac recompute_activations",
    "learner.max_tokens_per_mb": "micro_batch_size per_device_train_batch_size max_tokens_per_gpu"
    " ppo_max_token_len_per_gpu ppo_micro_batch_size_per_gpu gradient_accumulation_steps micro_train_batch_size",
    "model.dtype": "bf16 fp16 torch_dtype precision param_dtype",
    "model.path": "model_name_or_path model_name pretrain actor_path hf_checkpoint",
    "reference.path": "ref_model_path ref_model ref_path ref_load reference_model_path ref_pretrain",
    "reference.update_every": "ref_model_sync_steps sync_ref_model ref_update_interval kl_ref_update_every",
    "reward.function": "reward_fn reward_funcs reward_function custom_reward_function reward_model rm_type",
    "reward.terms": "reward_weights reward_components",
    "rollout.engine": "backend inference_engine inference_backend rollout_backend gen_backend",
    "rollout.max_concurrent_rollouts": "max_num_seqs max_concurrency max_running_requests max_concurrent_requests",
    "rollout.max_head_offpolicyness": "eta max_staleness staleness_threshold max_off_policy_steps async_level"
    " max_async_level off_policy_steps staleness eta_max",
    "run.folder": "output_dir save_path default_local_dir fileroot",
    "run.name": "experiment_name trial_name project_name run_name job_name",
    "run.resume": "resume_from_checkpoint resume_mode load_checkpoint_path recover_mode",
    "run.total_train_steps": "max_steps total_steps total_training_steps num_train_steps num_steps n_steps num_rollout"
    " max_train_steps train_steps",
    "teacher.path": "teacher_model teacher_model_path teacher_model_name_or_path teacher_path teacher_pretrain",
    "topology.gpus_per_host": "n_gpus_per_node gpus_per_node num_gpus num_gpus_per_node",
    "topology.ranks": "nnodes num_nodes n_nodes world_size",
    "topology.tensor_parallel": "tensor_model_parallel_size tensor_parallel_size tp tp_size",
}
NEAR = 0.85


def is_foreign(name: str) -> bool:
    """Whether another system has a setting of exactly this name."""
    return any(name in theirs.split() for theirs in OURS_TO_THEIRS.values())


def by_meaning(key: str, known: "frozenset[str] | set[str]") -> str:
    """Our key for a setting of another system, as the end of an error text; "" if unknown. Only keys in `known`."""
    names = {
        their: f": here it is {our}"
        for our, theirs in OURS_TO_THEIRS.items()
        if our in known
        for their in theirs.split()
    }
    last = key.lower().replace("-", "_").rpartition(".")[2]
    near = [last] if last in names else difflib.get_close_matches(last, names, 1, NEAR)
    return names[near[0]] if near else ""
