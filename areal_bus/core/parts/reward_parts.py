"""Parts of a reward: numbers by name that one score reports beside its reward ("reward:NAME" in the journal). Pure."""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, SupportsFloat

from areal_bus.errors import ImpossibleEvent
from areal_bus.messages import MAX_PARTS, Scored, VerdictStatus

NAME_CHARACTERS = 128
LARGEST = 1e100  # absolute value: sums and squares of parts are finite, too
PREFIX = "reward:"  # of journal fields
SINGLE = "single"  # with reward.group: the reward of reward.function
ROLE = "role/"  # begins the name of a part that is the reward of a role


def checked(parts: object) -> dict[str, float]:
    """The parts as numbers. Raises ValueError for anything but a few finite numbers by name."""
    if not isinstance(parts, Mapping) or len(parts) > MAX_PARTS:
        raise ValueError(f"the parts of a reward must be a mapping of at most {MAX_PARTS} names: {_short(parts)}")
    for name, value in parts.items():
        if not (isinstance(name, str) and 0 < len(name) <= NAME_CHARACTERS and name.isprintable()):
            raise ValueError(f"the name of a part has 1 to {NAME_CHARACTERS} printable characters: {_short(name)}")
        if not isinstance(value, SupportsFloat) or not abs(float(value)) <= LARGEST:
            rule = f"a finite number, at most {LARGEST:g} in absolute value"
            raise ValueError(f"the part {name!r} of a reward must be {rule}: it is {_short(value)}")
    return {name: float(value) for name, value in parts.items()}


def dumped(parts: Mapping[str, float]) -> str:
    return json.dumps(parts, ensure_ascii=False, separators=(",", ":")) if parts else ""


def parts_of(scored: Scored) -> dict[str, float]:
    """The parts that a verdict reports. Raises ImpossibleEvent for text that is none."""
    if not scored.parts or scored.status != VerdictStatus.VALUE:
        return {}
    try:
        return checked(json.loads(scored.parts))
    except (ValueError, RecursionError, OverflowError) as error:
        raise ImpossibleEvent(f"parts of a verdict must be a JSON object of numbers: {error}") from None


def with_group_reward(scored: Scored, reward: float) -> Scored:
    """The verdict with the reward that its group gave it; its own reward stays as the part "single"."""
    own = {name: value for name, value in parts_of(scored).items() if not name.startswith(ROLE)}
    parts = {SINGLE: scored.reward, **own}
    return replace(scored, reward=reward, parts=dumped(parts if len(parts) <= MAX_PARTS else own))


def of_roles(rewards: Mapping[str, float]) -> dict[str, float]:
    """The rewards of roles, as parts."""
    return {f"{ROLE}{role}": reward for role, reward in rewards.items()}


def broken_roles(roles: str, parts: Mapping[str, float]) -> str:
    """What is wrong with the rewards of an episode's roles; "" if all have one, or none has."""
    known = {name.removeprefix(ROLE) for name in parts if name.startswith(ROLE)}
    if known and not roles:
        return f"unknown roles {sorted(known)}: the workflow must name the role of each trajectory in Episode.roles"
    missing = sorted(set(roles.split()) - known) if known else []
    return f"missing reward of the role {missing[0]!r}: Score.role_rewards has {sorted(known)}" if missing else ""


def role_rewards(scored: Scored) -> list[tuple[str, float]]:
    """Role and reward of each trajectory: the role's own, else the episode's. Without roles, ("", reward) once."""
    parts = parts_of(scored) if scored.roles else {}
    return [(role, parts.get(f"{ROLE}{role}", scored.reward)) for role in scored.roles.split(" ")]


def role_fields(scored: Scored) -> dict[str, Any]:
    """Journal fields of a trained episode with roles: their names, and the reward of each trajectory."""
    rewards = [reward for _, reward in role_rewards(scored)]
    return {"roles": scored.roles, "rewards": rewards} if scored.roles else {}


def as_fields(parts: Mapping[str, float]) -> dict[str, float]:
    return {f"{PREFIX}{name}": value for name, value in parts.items()}


def mean_fields(verdicts: Iterable[Scored]) -> dict[str, float]:
    """Fields of a journal line: the mean of each part over the verdicts that report it."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for scored in verdicts:
        for name, value in parts_of(scored).items():
            found[name].append(value)
    return as_fields({name: math.fsum(values) / len(values) for name, values in found.items()})


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
