"""Adjusts converted settings so that the config loader accepts them."""

from areal_convert.mapping import Foreign, Ours

GROUPED = ("grpo", "dr_grpo", "rloo", "opo", "reinforce_plus_plus_baseline")  # baselines over the samples of a prompt
SHAPING = ("top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "min_new_tokens")
MANY_STEPS = 1_000_000  # the passes through the data end the run before
UNKNOWN_REWARD = (
    "SET_THIS:reward"  # a start refuses it, so that no other reward takes the place of the one that is named
)


def tidy(ours: Ours, foreign: Foreign) -> None:
    """What our loader asks for, whatever the system."""
    for step in (fit_batch, fit_warmup, fit_length, fit_algorithm, fit_bounds, fit_evaluation, fit_sampling):
        step(ours, foreign)


def fit_batch(ours: Ours, foreign: Foreign) -> None:
    batch, steps = ours.get("data.batch_size", 8), ours.get("actor.ppo_n_minibatches", 1)
    ours["actor.ppo_n_minibatches"] = max(1, min(steps, batch))
    n = ours.get("gconfig.n_samples", 8)
    if "rollout.max_concurrent_rollouts" in ours or n > 32:
        ours["rollout.max_concurrent_rollouts"] = max(ours.get("rollout.max_concurrent_rollouts", 32), n)
    if ours.get("actor.advantage") in GROUPED and n < 2:
        ours["gconfig.n_samples"] = 2
        foreign.notes["gconfig.n_samples"] = "1 there; a group baseline needs two samples"
    if ours.get("gconfig.n_samples", 8) < 2:
        foreign.remove(ours, "a group of one has no signal to wait for", "data.max_refill")


def fit_warmup(ours: Ours, foreign: Foreign) -> None:
    """A share of the run as steps."""
    epochs, batch = ours.get("data.total_train_epochs"), ours.get("data.batch_size", 8)
    by_rows = None if epochs is None or foreign.n_rows is None else foreign.n_rows * epochs // batch
    total = ours.get("run.total_train_steps", by_rows)
    if foreign.warmup is None or "actor.lr_warmup_steps" in ours:
        return
    key, share = foreign.warmup
    if total is None:
        foreign.lose(key, "set actor.lr_warmup_steps: the number of steps is unknown; --rows computes it")
    else:
        foreign.put(ours, {"actor.lr_warmup_steps": round(share * total)}, key)


def fit_length(ours: Ours, foreign: Foreign) -> None:
    """Steps of a run that counts passes: a falling rate needs their number, a constant rate does not."""
    epochs, batch = ours.get("data.total_train_epochs"), ours.get("data.batch_size", 8)
    if epochs is None or "run.total_train_steps" in ours:
        return
    by = foreign.parts.get("data.total_train_epochs", [])
    if foreign.n_rows is not None:
        foreign.put(ours, {"run.total_train_steps": max(1, foreign.n_rows * epochs // batch)}, *by)
        foreign.notes["run.total_train_steps"] = f"{foreign.n_rows} rows x {epochs} passes / {batch} prompts"
    elif ours.get("actor.lr_schedule", "constant") == "constant":
        foreign.put(ours, {"run.total_train_steps": MANY_STEPS}, *by)
        foreign.notes["run.total_train_steps"] = "no limit: the passes through the data end the run"
    else:
        ours["run.total_train_steps"] = 1
        foreign.to_set["run.total_train_steps"] = (
            f"rows x {epochs} passes / {batch} prompts, the end of the {ours['actor.lr_schedule']} rate: give --rows"
        )


def fit_algorithm(ours: Ours, foreign: Foreign) -> None:
    if ours.get("actor.loss") == "sapo":
        why = 'actor.loss = "sapo" has no place for it'
        foreign.remove(ours, why, "actor.correction_", "actor.behav_imp")
        foreign.unset(ours, "actor.eps_clip_higher", "actor.c_clip", "actor.use_decoupled_loss")
        if ours.get("actor.correction", "none") != "none":
            foreign.remove(ours, why, "actor.correction")
        ours["actor.correction"] = "none"
    else:
        foreign.unset(ours, "actor.sapo_")
    if ours.get("actor.loss") not in ("sapo", "ppo", "gspo", None):
        foreign.unset(ours, "actor.c_clip")
    if ours.get("actor.loss") == "reinforce":
        foreign.unset(ours, "actor.eps_clip_higher")
    if ours.get("actor.advantage") != "gae":
        foreign.unset(ours, "critic.", "actor.discount", "actor.gae_lambda")
    if not ours.get("actor.kl_ctl"):
        foreign.unset(ours, "actor.kl_", "reference.")
    if "actor.lora.rank" in ours:
        foreign.remove(ours, "with adapters the reference is the model without them", "reference.update_every")


def fit_bounds(ours: Ours, foreign: Foreign) -> None:
    if "actor.overlong_tokens" in ours:
        ours["actor.overlong_tokens"] = min(ours["actor.overlong_tokens"], ours.get("gconfig.max_new_tokens", 256))
    if ours.get("actor.aggregation") == "seq-mean-token-sum-norm":
        ours.setdefault("actor.aggregation_length", ours.get("gconfig.max_new_tokens", 256))
    else:
        foreign.unset(ours, "actor.aggregation_length")
    if ours.get("actor.lr_schedule", "constant") == "constant":
        foreign.unset(ours, "actor.min_lr_ratio")


def fit_evaluation(ours: Ours, foreign: Foreign) -> None:
    if not ours.get("evaluate.path"):
        foreign.remove(ours, "set evaluate.path: the file names no problems", "evaluate.every_steps")
        foreign.unset(ours, "evaluate.")
    if ours.get("evaluate.every_steps"):
        room = ours.get("evaluate.n_samples", 8) + ours.get("gconfig.n_samples", 8)
        ours["rollout.max_concurrent_rollouts"] = max(ours.get("rollout.max_concurrent_rollouts", 32), room)


def fit_sampling(ours: Ours, foreign: Foreign) -> None:
    engine = ours.get("rollout.engine", "builtin")
    if engine == "builtin":
        foreign.unset(ours, "topology.tensor_parallel")
    temperatures = {ours.get("gconfig.temperature", 1.0)}
    if ours.get("evaluate.before") or ours.get("evaluate.every_steps"):
        temperatures.add(ours.get("evaluate.temperature", 1.0))
    if engine == "vllm" and not temperatures <= {0.0, 1.0}:
        why = "vLLM has log-probs of the model at temperature 1 only: docs/engines.md"
        refuse_shaping(ours, foreign, why, SHAPING)
    if engine == "sglang":
        why = "SGLang's log-probs would be those after the penalty: docs/engines.md"
        refuse_shaping(
            ours, foreign, why, ("repetition_penalty", "frequency_penalty", "presence_penalty", "min_new_tokens")
        )


def refuse_shaping(ours: Ours, foreign: Foreign, why: str, names: tuple[str, ...]) -> None:
    for key in [f"gconfig.{name}" for name in names]:
        if ours.get(key) in (0, 1):
            foreign.unset(ours, key)
        else:
            foreign.remove(ours, why, key)
