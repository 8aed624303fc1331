"""Keys that are gone: refused in new settings, left out of those that an older version saved with its run."""

import json
from collections.abc import Mapping
from typing import Any

from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError

REMOVED: Mapping[str, tuple[Any, str]] = {  # key: its default, which is ignored, and why the key is gone
    "rollout.exact_lag": (
        [],
        "the lag of a ring follows from its timing; train with a given lag in one process by "
        "`python -m areal_lab.loops.exact_lag CONFIG.toml --out FOLDER`",
    ),
    "virtual_time.seconds": (
        None,
        "a ring runs in real time; train in virtual time in one process by "
        "`python -m areal_lab.loops.virtual_time CONFIG.toml --out FOLDER`",
    ),
    "learner.helpers": (
        0,
        "its threads shortened an update by a tenth, only for very small models, and sums differed from run to run",
    ),
    "topology.adapt.eta_min": (
        None,
        "an eta that the head lowered by itself saved 0.3 of a version of lag and cost 2 % of the throughput; set the "
        "eta itself, rollout.max_head_offpolicyness",
    ),
    "topology.adapt.slots_min": (
        None,
        "slots that the head lowered by itself saved 0.1 of a version of lag and cost 1 % of the throughput; set the "
        "slots themselves, rollout.max_concurrent_rollouts",
    ),
}
OF_LABORATORY = {"virtual_time": "virtual_time.seconds", "exact_lag": "rollout.exact_lag"}
"""Tables of areal_lab, and the former key that says so; older rings saved the first, too."""


def why(key: str) -> str:
    """Why a former key is gone; "" for another."""
    return REMOVED.get(OF_LABORATORY.get(key.partition(".")[0], key), (None, ""))[1]


def refuse(tree: dict[str, Any], origins: Mapping[str, str]) -> None:
    """Delete keys that are gone. Raises ConfigError for a value other than the former default."""
    for key, (default, reason) in REMOVED.items():
        *sections, name = key.split(".")
        table = _table(tree, sections)
        if name in table and (value := table.pop(name)) != default:
            raise ConfigError(
                f"{key} no longer exists: {reason}; remove it (it is {json.dumps(value)}; {origins[key]})"
            )


def left_out(tree: dict[str, Any]) -> dict[str, Any]:
    """These saved settings without the keys that are gone, whatever their values. They are deleted in place."""
    for key in (*REMOVED, *OF_LABORATORY):
        *sections, name = key.split(".")
        _table(tree, sections).pop(name, None)
    return tree


def saved(text: str) -> Config:
    """The settings in the config.json of a run, also of an older version. Raises ValueError."""
    tree = json.loads(text)
    return Config.model_validate_json(json.dumps(left_out(tree)) if isinstance(tree, dict) else text)


def _table(tree: dict[str, Any], sections: list[str]) -> dict[str, Any]:
    """The table at this place; an empty one if there is none."""
    table: Any = tree
    for section in sections:
        table = table.get(section) if isinstance(table, dict) else None
    return table if isinstance(table, dict) else {}
