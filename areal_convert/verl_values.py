"""Readers of verl's values: what each means here."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

from areal_convert.mapping import Foreign, Ours
from areal_convert.values import adapters, number, run_name, truth, whole

ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.ref."
MODEL = "actor_rollout_ref.model."
OPTIMIZER, VAL, CORRECTION = f"{ACTOR}optim.", f"{ROLLOUT}val_kwargs.", "algorithm.rollout_correction."
ASYNC, VERSIONS = "async_training.", "trainer.v1.sampler.max_off_policy_threshold"
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
MEGATRON_LAYERS = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]  # all linear layers, by Megatron's names


def train_files(value: Any, foreign: Foreign) -> Ours:
    """A file; several are the sources of the data, which verl joins row by row."""
    files = [value] if isinstance(value, str) else [str(one) for one in value]
    paths = [Path(file).expanduser() for file in files]
    if len(paths) == 1:
        return {"data.path": str(paths[0])}
    if foreign.values.get("data.train_max_samples", -1) > 0:
        foreign.notes["data.limit"] = "of each file here, of all together there"
    foreign.notes["data.source"] = "verl joins the files: set each weight to the file's number of rows for the same mix"
    return {"data.source": [{**one, "weight": 1.0} for one in named(paths)]}


def named(paths: list[Path]) -> list[dict[str, Any]]:
    """The files with names that differ."""
    n_named = Counter(path.stem for path in paths)
    names = [f"{path.parent.name}-{path.stem}" if n_named[path.stem] > 1 else path.stem for path in paths]
    names = [name if names.count(name) == 1 else f"{name}-{n}" for n, name in enumerate(names)]
    return [{"path": str(path), "name": run_name(name) or "set"} for path, name in zip(paths, names, strict=True)]


def val_files(value: Any, foreign: Foreign) -> Ours:
    """A file; several are sets of the evaluation, each with figures of its own."""
    files = [value] if isinstance(value, str) else [str(one) for one in value]
    paths = [Path(file).expanduser() for file in files]
    ours: Ours = {"evaluate.path": str(paths[0])}
    return ours if len(paths) == 1 else ours | {"evaluate.sets": named(paths)[1:]}


def estimator(value: Any, foreign: Foreign) -> Ours:
    name = str(value).lower()
    if name not in ESTIMATORS:
        return foreign.lose(
            "algorithm.adv_estimator", f"{name!r} is not there: actor.advantage keeps its default, grpo"
        )
    if not name.startswith("grpo"):
        return {"actor.advantage": ESTIMATORS[name]}
    has_std = truth(foreign.get("algorithm.norm_adv_by_std_in_grpo", True))
    return {"actor.advantage": "grpo" if has_std else "dr_grpo"}


def clip_high(value: Any, foreign: Foreign) -> Ours:
    low = foreign.get(f"{ACTOR}clip_ratio_low") or foreign.get(f"{ACTOR}clip_ratio")
    return {} if number(value) == low else {"actor.eps_clip_higher": number(value)}


def dual_clip(value: Any, foreign: Foreign) -> Ours:
    loss = LOSSES.get(str(foreign.get(f"{ACTOR}policy_loss.loss_mode", "vanilla")))
    return {"actor.c_clip": number(value)} if loss in ("ppo", "gspo") and number(value) > 1 else {}


def kl_loss(value: Any, foreign: Foreign) -> Ours:
    coefficient = number(foreign.get(f"{ACTOR}kl_loss_coef")) if truth(value) else 0.0
    if not coefficient:
        return {}
    kind = str(foreign.get(f"{ACTOR}kl_loss_type")).rstrip("+")
    if KL.get(kind, "k1") == "k1":
        foreign.lose(f"{ACTOR}kl_loss_type", f"{kind!r} has no gradient as a loss, on average: k3 takes its place")
    name = {"k2": "k2"}.get(KL.get(kind, "k3"), "k3")
    return {"actor.kl_ctl": coefficient, "actor.kl_estimator": name, "actor.kl_in": "loss"}


def kl_reward(value: Any, foreign: Foreign) -> Ours:
    coefficient = number(foreign.get("algorithm.kl_ctrl.kl_coef")) if truth(value) else 0.0
    if not coefficient:
        return {}
    if truth(foreign.get(f"{ACTOR}use_kl_loss", False)):
        why = "the KL is in the loss or in the reward: here it is in the loss"
        return foreign.lose("algorithm.use_kl_in_reward", why)
    if foreign.get("algorithm.kl_ctrl.type", "fixed") != "fixed":
        foreign.lose("algorithm.kl_ctrl.type", "the coefficient is constant: actor.kl_ctl")
    kind = KL.get(str(foreign.get("algorithm.kl_penalty")), "k1")
    if kind != "k1":
        foreign.lose("algorithm.kl_penalty", f"{kind!r} in the reward has the wrong gradient: k1 takes its place")
    return {"actor.kl_ctl": coefficient, "actor.kl_estimator": "k1", "actor.kl_in": "reward"}


def optimizer(value: Any, foreign: Foreign) -> Ours:
    return {} if str(value).lower() in ("adamw", "adam") else foreign.lose(f"{OPTIMIZER}optimizer", "AdamW only")


def minibatches(value: Any, foreign: Foreign) -> Ours:
    """Of the synchronous trainers; `finish` sets those of the asynchronous one."""
    batch = whole(foreign.get("data.train_batch_size"))
    return {"actor.ppo_n_minibatches": max(1, round(batch / whole(value)))}


def batch_size(value: Any, foreign: Foreign) -> Ours:
    return {"data.batch_size": whole(value)} if whole(value) > 0 else {}


def long_prompts(value: Any, foreign: Foreign) -> Ours:
    return {"data.long_prompts": "drop" if truth(value) else "refuse"}


def truncation(value: Any, foreign: Foreign) -> Ours:
    return {} if str(value) == "error" else foreign.lose("data.truncation", "no prompt is truncated: data.long_prompts")


def refill(value: Any, foreign: Foreign) -> Ours:
    """Dynamic sampling: so many batches of prompts for one of training, 0 without a limit."""
    if not truth(value):
        return {}
    n = whole(foreign.get("algorithm.filter_groups.max_num_gen_batches", 0))
    return {"data.max_refill": (n - 1 if n > 0 else 9) * whole(foreign.get("data.train_batch_size"))}


def betas(value: Any, foreign: Foreign) -> Ours:
    first, second = value
    return {"actor.adam_beta1": number(first), "actor.adam_beta2": number(second)}


def greedy(ours: str) -> Any:
    """do_sample = false is temperature 0."""
    return lambda value, foreign: {} if truth(value) else {ours: 0.0}


def top_k(value: Any, foreign: Foreign) -> Ours:
    return {"gconfig.top_k": whole(value)} if whole(value) > 0 else {}


def in_a_set(name: str, unset: float) -> Any:
    """An evaluation samples from the model's own distribution, unless a table [[evaluate.sets]] sets keys."""

    def read(value: Any, foreign: Foreign) -> Ours:
        if number(value) == unset or max(number(value), unset) <= 0:
            return {}
        return foreign.lose(f"{VAL}{name}", f"set {name} of a table [[evaluate.sets]]")

    return read


def token_budget(value: Any, foreign: Foreign) -> Ours:
    return {"learner.max_tokens_per_mb": whole(value)} if truth(foreign.get(f"{ACTOR}use_dynamic_bsz", False)) else {}


def lora(value: Any, foreign: Foreign) -> Ours:
    if whole(value) <= 0:
        return {}
    return adapters(value, foreign.get(f"{MODEL}lora_alpha"), foreign.get(f"{MODEL}target_modules"))


def lora_of_megatron(value: Any, foreign: Foreign) -> Ours:
    if whole(value) <= 0:
        return {}
    base = f"{MODEL}lora."
    layers = foreign.get(f"{base}target_modules", MEGATRON_LAYERS)
    if sorted(layers) != sorted(MEGATRON_LAYERS):
        foreign.lose(f"{base}target_modules", "layers by Megatron's names: set actor.lora.target_modules")
    return adapters(value, foreign.get(f"{base}alpha", 32), None, foreign.get(f"{base}dropout", 0.0))


def several_turns(value: Any, foreign: Foreign) -> Ours:
    why = "write a workflow, or bring an agent: docs/agents.md"
    return foreign.lose(f"{ROLLOUT}multi_turn.enable", why) if truth(value) else {}


def correction(ours: Ours, foreign: Foreign) -> None:
    """The weight for the gap between learner and sampler; without `rollout_is` it is 1."""
    is_async = bool(foreign.section(ASYNC))
    bypass = truth(foreign.get(f"{CORRECTION}bypass_mode", is_async))
    is_reinforce = bypass and foreign.get(f"{CORRECTION}loss_type", "ppo_clip") == "reinforce"
    of_mode = [f"{CORRECTION}bypass_mode", f"{CORRECTION}loss_type"] if bypass else []
    settings: Ours = {"actor.correction": "none"}
    if bypass and not is_reinforce:
        settings["actor.recompute_logprobs"] = False
    if is_reinforce:
        settings["actor.loss"] = "reinforce"
    foreign.put(ours, settings, *of_mode)
    weighs = str(foreign.get(f"{CORRECTION}rollout_is", "none")).lower()
    cap = foreign.get(f"{ACTOR}tis_imp_ratio_cap", -1)
    if weighs != "none" and (not bypass or is_reinforce):
        foreign.put(ours, *weight(weighs, foreign))
    elif number(cap) > 0 and not bypass:
        settings = {"actor.correction": "tis", "actor.correction_upper": number(cap)}
        foreign.put(ours, settings, f"{ACTOR}tis_imp_ratio_cap")


def weight(level: str, foreign: Foreign) -> Any:
    """Settings of a correction, and their keys. "0.5_5.0" are two bounds: outside of them the weight is 0."""
    theirs, bound = f"{CORRECTION}rollout_is", f"{CORRECTION}rollout_is_threshold"
    names = {"token": "tis", "sequence": "tis_sequence"}
    if level not in names:
        foreign.lose(theirs, f"{level!r} is not there: docs/algorithms.md")
        return {"actor.correction": "none"}, theirs
    lower, _, upper = str(foreign.get(bound, 2.0)).rpartition("_")
    settings: Ours = {"actor.correction": names[level], "actor.correction_upper": float(upper)}
    if lower:
        settings |= {"actor.correction_lower": float(lower), "actor.correction_action": "mask"}
    return settings, theirs, bound


def staleness(ours: Ours, foreign: Foreign) -> None:
    """Eta: 0 for the synchronous trainers. The asynchronous ones count published versions."""
    mode, key = str(foreign.get("trainer.v1.trainer_mode", "sync")), "rollout.max_head_offpolicyness"
    if foreign.section(ASYNC):
        ahead = f"{ASYNC}staleness_threshold"
        foreign.put(ours, {key: math.ceil(number(foreign.get(ahead, 0.1)))}, ahead)
        foreign.notes[key] = "rounded up to whole versions"
    elif foreign.section("rollout."):
        foreign.put(ours, {key: 1}, *[name for name in foreign.values if name.startswith("rollout.")])
        foreign.notes[key] = "verl's one-step-off trainer"
    elif mode != "sync" and truth(foreign.get("trainer.use_v1", True)):
        foreign.put(ours, {key: whole(foreign.get(VERSIONS, 8))}, "trainer.v1.trainer_mode", VERSIONS)
    else:
        foreign.put(ours, {key: 0}, "trainer.v1.trainer_mode")
        foreign.notes[key] = "verl's trainer is synchronous"


def streamed_batches(ours: Ours, foreign: Foreign) -> None:
    """The asynchronous trainer publishes after so many minibatches; they are one batch here."""
    if not foreign.section(ASYNC):
        return
    size, names = f"{ACTOR}ppo_mini_batch_size", [f"{ASYNC}require_batches", f"{ASYNC}trigger_parameter_sync_step"]
    n_minibatches = whole(foreign.get(names[0], 1)) * whole(foreign.get(names[1], 4))
    batch = whole(foreign.get(size)) * n_minibatches
    foreign.put(ours, {"data.batch_size": batch}, size, *names)
    foreign.put(ours, {"actor.ppo_n_minibatches": n_minibatches}, *names)
    total = foreign.get("rollout.total_rollout_steps")
    if total is not None:
        foreign.put(ours, {"run.total_train_steps": max(1, whole(total) // batch)}, "rollout.total_rollout_steps")
