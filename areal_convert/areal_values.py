"""Readers of AReaL's values: what each means here."""

import re
from pathlib import Path
from typing import Any

from areal_convert.mapping import Foreign, Ours
from areal_convert.values import adapters, number, truth, whole

BACKEND = re.compile(r"(?P<engine>[a-z]+):(?P<sizes>(?:[a-z]\d+)+)")
GSM8K = "openai/gsm8k"
NORM, ADVANTAGES, REJECTION = "actor.reward_norm.", "actor.adv_norm.", "actor.rejection_sampling."
LEVELS = ("mean_level", "std_level", "mean_leave1out", "group_size")
ALL_TOKENS = 100_000_000  # their top_k for no limit
CAPS = ("actor.behave_imp_weight_cap", "actor.behav_imp_weight_cap")  # older than rejection_sampling
MODES = ("actor.behave_imp_weight_mode", "actor.behav_imp_weight_mode")


def has(foreign: Foreign, prefix: str) -> bool:
    """Whether a section has a value."""
    return any(key.startswith(prefix) and value is not None for key, value in foreign.values.items())


def sizes_of(text: str) -> dict[str, int]:
    """ "d4p1t2" as sizes by letter."""
    return {letter: int(size) for letter, size in re.findall(r"([a-z])(\d+)", text)}


def backend(theirs: str) -> Any:
    def read(value: Any, foreign: Foreign) -> Ours:
        found = BACKEND.fullmatch(str(value))
        if found is None or found["engine"] not in ("sglang", "vllm"):
            return foreign.lose(theirs, f"{value!r} is no ENGINE:d4t1 of sglang or vllm")
        sizes = sizes_of(found["sizes"])
        return {
            "rollout.engine": found["engine"],
            "topology.generators": sizes.get("d", 1),
            "topology.tensor_parallel": sizes.get("t", 1),
        }

    return read


def learners(theirs: str) -> Any:
    def read(value: Any, foreign: Foreign) -> Ours:
        found = BACKEND.fullmatch(str(value))
        if found is None:
            return foreign.lose(theirs, f"{value!r} is no BACKEND:d4")
        sizes = sizes_of(found["sizes"])
        if any(size > 1 for letter, size in sizes.items() if letter != "d"):
            foreign.notes["topology.learners"] = "learners shard by FSDP2 only: other sizes are left out"
        return {"topology.learners": sizes.get("d", 1)}

    return read


def both(value: Any, foreign: Foreign) -> Ours:
    """The older allocation_mode: "sglang:d4t1+d4t1"."""
    first, _, second = str(value).partition("+")
    trained = second if ":" in second else f"fsdp:{second}"
    ours: Ours = backend("allocation_mode")(first, foreign)
    return ours | (learners("allocation_mode")(trained, foreign) if second else {})


def level(foreign: Foreign, key: str) -> str | None:
    """The level of a norm: "group", "batch" or None. A norm without the key has "batch", one with null has none."""
    name = foreign.values.get(key) if key in foreign.values else "batch"
    if str(name) not in ("group", "batch", "None", "none"):
        foreign.latest = key
        raise ValueError
    return None if str(name).lower() == "none" else str(name)


def advantage(ours: Ours, foreign: Foreign) -> None:
    """Of both norms: by group of a prompt, by batch, or none."""
    rewards, tokens = norm_of_rewards(foreign), norm_of_tokens(foreign)
    if has(foreign, "critic."):
        rewards = {"actor.advantage": "gae"}
        for name in LEVELS:
            foreign.lose(f"{NORM}{name}", "a critic takes the rewards as they are")
    elif rewards["actor.advantage"] in ("none", "reinforce") and tokens:
        rewards = {"actor.advantage": "none" if tokens.get("std") else "reinforce"}
        foreign.notes.pop("actor.normalize_batch", None)  # the second norm undoes the first
    normalizes = bool(rewards.pop("actor.normalize_batch", tokens.get("std", False)))
    foreign.put(ours, rewards, "critic.path", *(f"{NORM}{name}" for name in LEVELS))
    if normalizes:
        settings = {"actor.normalize_batch": "all"}
        base = ADVANTAGES if tokens else NORM
        foreign.put(ours, settings, f"{base}mean_level", f"{base}std_level")
    for base in (NORM, ADVANTAGES):
        spread(ours, foreign, base)


def spread(ours: Ours, foreign: Foreign, base: str) -> None:
    """What is added to a deviation, and how it is divided; one setting for both norms."""
    if not has(foreign, base) or (base == ADVANTAGES and "actor.std_eps" in ours):
        return
    foreign.put(ours, {"actor.std_eps": number(foreign.get(f"{base}eps", 1e-5))}, f"{base}eps")
    if foreign.get(f"{base}std_unbiased") is not None:
        unbiased = truth(foreign.get(f"{base}std_unbiased"))
        foreign.put(ours, {"actor.std_unbiased": unbiased}, f"{base}std_unbiased")


def norm_of_rewards(foreign: Foreign) -> Ours:
    """The estimator of reward_norm."""
    if not has(foreign, NORM):
        return {"actor.advantage": "none"}
    mean, std = level(foreign, f"{NORM}mean_level"), level(foreign, f"{NORM}std_level")
    others = truth(foreign.get(f"{NORM}mean_leave1out", False))
    differs = foreign.notes
    if mean == "group" and std != "batch":
        if others and std == "group":
            foreign.lose(f"{NORM}std_level", "rloo does not divide by the deviation")
        return {"actor.advantage": "rloo" if others else "grpo" if std == "group" else "dr_grpo"}
    if mean == "group":
        differs["actor.normalize_batch"] = "over the tokens of the batch here, over its samples there"
        return {"actor.advantage": "rloo" if others else "dr_grpo", "actor.normalize_batch": True}
    if others:
        foreign.lose(f"{NORM}mean_leave1out", "without one's own sample: the mean of a group only")
    if std == "group":
        foreign.lose(f"{NORM}std_level", "the deviation of a group without its mean")
        std = None
    if mean == std == "batch":
        differs["actor.normalize_batch"] = "over the tokens of the batch here, over its samples there"
        return {"actor.advantage": "none", "actor.normalize_batch": True}
    if std == "batch":
        foreign.lose(f"{NORM}std_level", "the deviation of the batch without its mean")
    if mean is None:
        return {"actor.advantage": "none"}
    differs["actor.advantage"] = "the mean over the tokens of the batch here, over its samples there"
    return {"actor.advantage": "reinforce"}


def norm_of_tokens(foreign: Foreign) -> dict[str, bool]:
    """What adv_norm computes over the tokens of the batch: mean, std."""
    if not has(foreign, ADVANTAGES):
        return {}
    mean, std = level(foreign, f"{ADVANTAGES}mean_level"), level(foreign, f"{ADVANTAGES}std_level")
    for key, name in (("mean_level", mean), ("std_level", std)):
        if name == "group":
            foreign.lose(f"{ADVANTAGES}{key}", "advantages are normalised over the batch, or not")
    if truth(foreign.get(f"{ADVANTAGES}mean_leave1out", False)):
        foreign.lose(f"{ADVANTAGES}mean_leave1out", "the mean is over all tokens")
    if std == "batch" and mean != "batch":
        foreign.lose(f"{ADVANTAGES}mean_level", "a deviation without the mean: both are over the batch here")
    if std == "batch":
        return {"mean": True, "std": True}
    if mean == "batch" and norm_of_rewards(foreign)["actor.advantage"] != "none":
        foreign.lose(f"{ADVANTAGES}mean_level", "the mean of the batch after that of the group")
    return {"mean": True} if mean == "batch" else {}


def correction(ours: Ours, foreign: Foreign) -> None:
    """The weight prox/behav: AReaL has one with rejection_sampling only, or with the older cap."""
    if not truth(foreign.get("actor.use_decoupled_loss")):
        foreign.put(ours, {"actor.use_decoupled_loss": False}, "actor.use_decoupled_loss")
        return
    is_off = any(foreign.get(key) == "disabled" for key in MODES)
    cap = "" if is_off else next((key for key in CAPS if foreign.get(key) is not None), "")
    if has(foreign, REJECTION):
        names = ("level", "action", "metric", "agg", "upper", "lower")
        foreign.put(ours, rejection(foreign), "actor.use_decoupled_loss", *(f"{REJECTION}{name}" for name in names))
    elif cap:
        foreign.put(ours, older_cap(foreign, cap), "actor.use_decoupled_loss", cap, *MODES)
    elif str(foreign.get("actor.prox_logp_method", "recompute")) == "loglinear":
        foreign.put(ours, {"actor.use_decoupled_loss": True}, "actor.use_decoupled_loss")
        foreign.notes["actor.use_decoupled_loss"] = "weighs by prox/behav: AReaL needs rejection_sampling for it"
    else:
        foreign.put(ours, {"actor.correction": "none"}, "actor.use_decoupled_loss")
        foreign.notes["actor.correction"] = "clipped around the recomputed policy, no weight without rejection_sampling"


def rejection(foreign: Foreign) -> Ours:
    metric, by = str(foreign.get(f"{REJECTION}metric", "ratio")), str(foreign.get(f"{REJECTION}level", "token"))
    action, lower = str(foreign.get(f"{REJECTION}action", "mask")), foreign.get(f"{REJECTION}lower")
    upper = number(foreign.get(f"{REJECTION}upper", 5.0))
    if metric == "ratio" and by == "token" and not lower:
        return {
            "actor.use_decoupled_loss": True,
            "actor.behav_imp_weight_cap": upper,
            "actor.correction_action": action,
        }
    ours: Ours = {
        "actor.correction": "tis" if by == "token" else "tis_sequence",
        "actor.correction_action": "mask" if metric != "ratio" else action,
        "actor.correction_upper": upper,
    }
    if metric != "ratio":
        ours["actor.correction_metric"] = metric.removeprefix("kl_")
    if by == "sequence":
        ours["actor.correction_aggregate"] = str(foreign.get(f"{REJECTION}agg", "mean"))
    return ours if lower is None else ours | {"actor.correction_lower": number(lower)}


def older_cap(foreign: Foreign, cap: str) -> Ours:
    mode = next((str(foreign.get(key)) for key in MODES if foreign.get(key) is not None), "token_mask")
    if mode.startswith("sequence"):
        foreign.notes["actor.correction_action"] = "of each token here, of the sequence there"
    return {
        "actor.use_decoupled_loss": True,
        "actor.behav_imp_weight_cap": number(foreign.get(cap)),
        "actor.correction_action": "clamp" if mode.endswith("truncate") else "mask",
    }


def recompute(value: Any, foreign: Foreign) -> Ours:
    return {"actor.recompute_logprobs": truth(value) or truth(foreign.get("actor.use_decoupled_loss"))}


def proximal(value: Any, foreign: Foreign) -> Ours:
    name = str(value)
    if name not in ("recompute", "loglinear", "metrics"):
        return foreign.lose("actor.prox_logp_method", f"{name!r} is not there: recompute")
    if not truth(foreign.get("actor.use_decoupled_loss")):
        return {}
    return {"actor.prox_logp_method": "loglinear" if name == "loglinear" else "recompute"}


def kl(value: Any, foreign: Foreign) -> Ours:
    if not number(value):
        return {}
    if not has(foreign, "ref."):
        return foreign.lose("actor.kl_ctl", "no ref: AReaL loads no reference model either")
    kind = str(foreign.get("actor.kl_estimator"))
    if kind != "k1":
        foreign.lose("actor.kl_estimator", f"{kind!r} in the reward has the wrong gradient: k1 takes its place")
    return {"actor.kl_ctl": number(value), "actor.kl_estimator": "k1", "actor.kl_in": "reward"}


def truncated(value: Any, foreign: Foreign) -> Ours:
    """AReaL sets the reward to 0 after bias, scaling and norm: to no advantage. Here "zero" comes before them."""
    if not truth(value):
        return {}
    is_plain = not has(foreign, NORM) and not number(foreign.get("actor.reward_bias", 0.0))
    if is_plain and not truth(foreign.get("actor.overlong_reward_penalty", False)):
        return {"actor.truncated_samples": "zero"}
    foreign.notes["actor.truncated_samples"] = "zero after the norms there: no advantage, which is mask here"
    return {"actor.truncated_samples": "mask"}


def overlong(value: Any, foreign: Foreign) -> Ours:
    """AReaL's penalty comes before the scaling, here it comes after it."""
    if not truth(value):
        return {}
    factor, length = number(foreign.get("actor.overlong_penalty_factor", 1.0)), foreign.get("actor.overlong_tokens")
    if length is None:
        return foreign.lose("actor.overlong_reward_penalty", "its overlong_tokens is missing")
    scaling = number(foreign.get("actor.reward_scaling", 1.0))
    if scaling != 1:
        foreign.notes["actor.overlong_penalty_factor"] = f"x {scaling:g}: the penalty is scaled there, not here"
    return {"actor.overlong_tokens": whole(length), "actor.overlong_penalty_factor": factor * scaling}


def is_unfiltered(value: Any, foreign: Foreign) -> bool:
    """Whether top_p or top_k keeps all tokens."""
    return not value or number(value) == 1.0 or number(value) >= ALL_TOKENS


def top_k(value: Any, foreign: Foreign) -> Ours:
    return {"gconfig.top_k": whole(value)} if 0 < whole(value) < ALL_TOKENS else {}


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


def every_passes(section: str) -> Any:
    """An interval in passes through the data, as updates: of a given number of rows. The shorter interval counts."""
    sections = ["evaluator"] if section == "evaluator" else ["recover", "saver"]
    ours = "evaluate.every_steps" if section == "evaluator" else "checkpoint.every_steps"

    def read(value: Any, foreign: Foreign) -> Ours:
        if whole(value) < 1:
            return {}
        if foreign.n_rows is None:
            return foreign.lose(f"{section}.freq_epochs", f"set {ours}, or convert with --rows N")
        batch = whole(foreign.get("train_dataset.batch_size"))
        steps = [whole(foreign.get(f"{one}.freq_steps", 0)) for one in sections]
        passes = [whole(foreign.get(f"{one}.freq_epochs", 0)) for one in sections]
        found = [*steps, *(max(1, n * foreign.n_rows // batch) for n in passes if n > 0)]
        return {ours: min(n for n in found if n > 0)}

    return read
