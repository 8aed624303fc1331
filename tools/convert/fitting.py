"""Adjusts converted settings so that the config loader accepts them."""

from tools.convert.mapping import Foreign, Ours

GROUPED = ("grpo", "dr_grpo", "rloo", "opo", "reinforce_plus_plus_baseline")  # baselines over the samples of a prompt
SHAPING = ("top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "min_new_tokens")
MANY_STEPS = 1_000_000  # the passes through the data end the run before


def tidy(ours: Ours, foreign: Foreign) -> None:
    """What our loader asks for, whatever the system."""
    for step in (fit_batch, fit_algorithm, fit_evaluation, fit_sampling):
        step(ours, foreign)


def fit_batch(ours: Ours, foreign: Foreign) -> None:
    batch, steps = ours.get("data.batch_size", 8), ours.get("actor.ppo_n_minibatches", 1)
    ours["actor.ppo_n_minibatches"] = max(1, min(steps, batch))
    n = ours.get("gconfig.n_samples", 8)
    if "rollout.max_concurrent_rollouts" in ours or n > 32:
        ours["rollout.max_concurrent_rollouts"] = max(ours.get("rollout.max_concurrent_rollouts", 32), n)
    if ours.get("actor.advantage") in GROUPED and n < 2:
        ours["gconfig.n_samples"] = 2
        foreign.dropped["one sample a prompt"] = "a group baseline needs two samples: gconfig.n_samples is 2"
    if ours.get("gconfig.n_samples", 8) < 2:
        drop(ours, "data.max_refill")  # a group of one has no signal to wait for
    if "data.total_train_epochs" in ours:
        ours.setdefault("run.total_train_steps", MANY_STEPS)


def fit_algorithm(ours: Ours, foreign: Foreign) -> None:
    if ours.get("actor.loss") == "sapo":
        drop(
            ours,
            "actor.correction",
            "actor.behav_imp",
            "actor.use_decoupled_loss",
            "actor.eps_clip_higher",
            "actor.c_clip",
        )
        ours["actor.correction"] = "none"
    else:
        drop(ours, "actor.sapo_")
    if ours.get("actor.loss") not in ("sapo", "ppo", "gspo", None):
        drop(ours, "actor.c_clip")
    if ours.get("actor.advantage") != "gae":
        drop(ours, "critic.", "actor.discount", "actor.gae_lambda")
    if not ours.get("actor.kl_ctl"):
        drop(ours, "actor.kl_", "reference.")
    if "actor.overlong_tokens" in ours:
        ours["actor.overlong_tokens"] = min(ours["actor.overlong_tokens"], ours.get("gconfig.max_new_tokens", 256))
    if "actor.lora.rank" in ours:
        drop(ours, "reference.update_every")  # the reference is the model without adapters
    if ours.get("actor.aggregation") == "seq-mean-token-sum-norm":
        ours.setdefault("actor.aggregation_length", ours.get("gconfig.max_new_tokens", 256))
    else:
        drop(ours, "actor.aggregation_length")
    if ours.get("actor.lr_schedule", "constant") == "constant":
        drop(ours, "actor.min_lr_ratio")


def fit_evaluation(ours: Ours, foreign: Foreign) -> None:
    if not ours.get("evaluate.path"):
        drop(ours, "evaluate.")
    if ours.get("evaluate.every_steps"):
        room = ours.get("evaluate.n_samples", 8) + ours.get("gconfig.n_samples", 8)
        ours["rollout.max_concurrent_rollouts"] = max(ours.get("rollout.max_concurrent_rollouts", 32), room)


def fit_sampling(ours: Ours, foreign: Foreign) -> None:
    engine = ours.get("rollout.engine", "builtin")
    if engine == "builtin":
        drop(ours, "topology.tensor_parallel")
    temperatures = {ours.get("gconfig.temperature", 1.0)}
    if ours.get("evaluate.before") or ours.get("evaluate.every_steps"):
        temperatures.add(ours.get("evaluate.temperature", 1.0))
    if engine == "vllm" and not temperatures <= {0.0, 1.0}:
        for key in [key for key in ours if key.removeprefix("gconfig.") in SHAPING]:
            if ours.pop(key) not in (0, 1):
                foreign.dropped[key] = "vLLM has log-probs of the model at temperature 1 only: docs/engines.md"
    if engine == "sglang":
        for key in ("gconfig.repetition_penalty", "gconfig.frequency_penalty", "gconfig.min_new_tokens"):
            if ours.pop(key, 0) not in (0, 1):
                foreign.dropped[key] = "SGLang's log-probs would be those after the penalty: docs/engines.md"


def drop(ours: Ours, *prefixes: str) -> None:
    for key in [key for key in ours if key.startswith(prefixes)]:
        del ours[key]
