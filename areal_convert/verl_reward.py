"""The reward of verl's settings, which have had three places: top level, reward_model, and reward."""

from typing import Any

from areal_convert.fitting import UNKNOWN_REWARD
from areal_convert.mapping import Foreign, Ours
from areal_convert.values import in_module, number, truth, whole

FUNCTIONS = ("reward.custom_reward_function.", "custom_reward_function.")
MODELS = ("reward.reward_model.enable", "reward_model.enable")
SANDBOXES = ("reward.sandbox_fusion.", "reward_model.sandbox_fusion.", "sandbox_fusion.")
MANAGERS = ("reward.reward_manager.name", "reward_manager.name", "reward_model.reward_manager")
MANAGER_FILES = (
    "reward.reward_manager.module.path",
    "reward_manager.module.path",
    "reward_model.reward_loop_module_path",
)
OVERLONG = (
    "reward.reward_kwargs.overlong_buffer_cfg.",
    "reward_model.reward_kwargs.overlong_buffer_cfg.",
    "reward_model.overlong_buffer.",
)
PLAIN = ("naive", "batch", "dapo", "prime", "limited", "rate_limited")  # managers that call the function
UNSET = "reward.function"


def reward(ours: Ours, foreign: Foreign) -> None:
    """The function that is named; where something else is named, a placeholder that a start refuses."""
    overlong(ours, foreign)
    unknown = [*models(foreign), *managers(foreign)]
    for base in FUNCTIONS:
        path = foreign.get(f"{base}path")
        if path and "reward.function" not in ours:
            name = str(foreign.get(f"{base}name", "compute_score"))
            foreign.put(ours, {"reward.function": in_module(str(path), name)}, f"{base}path", f"{base}name")
            foreign.notes["reward.function"] = "put the file beside the TOML"
    sandbox(ours, foreign)
    if "reward.function" in ours:
        return
    if unknown:
        ours["reward.function"] = UNKNOWN_REWARD
        foreign.to_set["reward.function"] = f"{unknown[0]} has no counterpart"
    else:
        ours["reward.function"] = "math"
        foreign.to_set["reward.function"] = "verl chooses by the rows' data_source; math is for texts with an answer"


def models(foreign: Foreign) -> list[str]:
    """Reward models that are switched on."""
    found = [key for key in MODELS if truth(foreign.get(key, False))]
    for key in found:
        foreign.lose(
            key, 'set reward.function = "model" and reward.model.path (a classifier), or "judge" (behind a URL)'
        )
    return found


def managers(foreign: Foreign) -> list[str]:
    """Classes of the user's, or of verl, that compute the reward themselves."""
    found = [key for key in MANAGERS if str(foreign.get(key, "naive")) not in PLAIN]
    found += [key for key in MANAGER_FILES if foreign.get(key)]
    for key in found:
        foreign.lose(key, 'a class of its own computes the reward: set reward.function = "module:function"')
    return found


def sandbox(ours: Ours, foreign: Foreign) -> None:
    """Programs run in a sandbox of this host instead of a server's."""
    for base in SANDBOXES:
        if not foreign.get(f"{base}url"):
            continue
        if "reward.function" in ours:
            foreign.lose(f"{base}url", 'no sandbox server here: reward.function = "code" runs programs on this host')
            continue
        foreign.put(ours, {"reward.function": "code"}, f"{base}url")
        limit = foreign.get(f"{base}memory_limit_mb")
        if limit is not None:
            foreign.put(ours, {"reward.code.memory_mib": max(64, whole(limit))}, f"{base}memory_limit_mb")


def overlong(ours: Ours, foreign: Foreign) -> None:
    for base in OVERLONG:
        if not truth(foreign.get(f"{base}enable", False)):
            continue
        length, factor = foreign.get(f"{base}len"), number(foreign.get(f"{base}penalty_factor", 1.0))
        if length is None:
            foreign.lose(f"{base}enable", "its len is missing")
            continue
        foreign.put(ours, {"actor.overlong_tokens": whole(length)}, f"{base}enable", f"{base}len")
        foreign.put(ours, {"actor.overlong_penalty_factor": factor}, f"{base}enable", f"{base}penalty_factor")


def longest(value: Any, foreign: Foreign) -> bool:
    """Whether max_resp_len is the limit of the answers, which counts here."""
    return whole(value) == whole(foreign.get("data.max_response_length"))
