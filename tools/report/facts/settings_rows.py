"""The settings of a run beside their defaults, and the settings in which runs differ."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from areal_bus.config.loader import fields
from tools.run import Line

OF_THE_PLACE = ("run.name", "run.folder", "run.resume", "journal.dir")  # no settings of the training
SEED = "run.seed"
UNKNOWN = "this version of the program has no such key"


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One key of a resolved config."""

    key: str
    value: str
    default: str  # "" for a key without one
    meaning: str
    is_changed: bool


def setting_rows(config: Line) -> list[SettingRow]:
    """All keys of the config in its order. A key that this version does not know counts as changed."""
    known, rows = fields(), []
    for key, value in flat(config, known).items():
        field = known.get(key)
        if field is None:
            rows.append(SettingRow(key, shown(value), "", UNKNOWN, is_changed=True))
            continue
        is_required, default = field.default is PydanticUndefined, default_of(field)
        meaning = " ".join((field.description or "").split())
        usual = "" if is_required else shown(default)
        rows.append(SettingRow(key, shown(value), usual, meaning, is_required or value != default))
    return rows


def default_of(field: FieldInfo | None) -> Any:
    """The default as a JSON value; None without one."""
    return None if field is None or field.default is PydanticUndefined else to_jsonable_python(field.default)


def flat(tree: Mapping[str, Any], known: Mapping[str, object], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key; a table that is a key's value stays whole; unset sections have no row."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and key not in known:
            found |= flat(value, known, f"{key}.")
        elif value is not None or key in known or not any(other.startswith(f"{key}.") for other in known):
            found[key] = value
    return found


def shown(value: Any) -> str:
    """A JSON value as in TOML; an unset one is "unset"."""
    return "unset" if value is None else json.dumps(value, ensure_ascii=False)


def differences(configs: Sequence[Line]) -> dict[str, list[str]]:
    """Key -> its value in each config, for keys that differ (not names, folders, seeds); a missing one: default."""
    known = fields()
    each = [flat(config, known) for config in configs]
    keys = dict.fromkeys(key for one in each for key in one if key not in (*OF_THE_PLACE, SEED))
    found = {key: [shown(one.get(key, default_of(known.get(key)))) for one in each] for key in keys}
    return {key: values for key, values in found.items() if len(set(values)) > 1}


def identity(config: Line) -> str:
    """Equal for configs that differ in names, folders and the seed only."""
    known = fields()
    whole = {key: default_of(field) for key, field in known.items()} | flat(config, known)
    return json.dumps({key: value for key, value in whole.items() if key not in (*OF_THE_PLACE, SEED)}, sort_keys=True)
