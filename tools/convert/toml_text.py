"""Writes settings as TOML, each with its origin as a comment."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_bus.config.sections import Config
from tools.convert.mapping import Converted, System

COLUMN = 58  # of the comments


def toml_of(found: Converted, system: System, path: Path) -> str:
    lines = [
        f"# From {path.name} ({system.title}) by python -m tools.convert; each line names the key that it comes from."
    ]
    for section in Config.model_fields:
        keys = [key for key in found.ours if key.partition(".")[0] == section]
        if keys:
            lines += ["", f"[{section}]", *(line_of(found, key) for key in keys)]
    if found.absent:
        lines += ["", "# No counterpart:", *(f"#   {key}: {why}" for key, why in found.absent.items())]
    return "\n".join(lines) + "\n"


def line_of(found: Converted, key: str) -> str:
    line = f"{key.partition('.')[2]} = {value_text(found.ours[key])}"
    origin = found.origins.get(key, "")
    return f"{line.ljust(COLUMN)}  # {origin}" if origin else line


def value_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(str(name))} = {value_text(one)}" for name, one in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(value_text, value)) + "]"
    return json.dumps(value)


def tree_of(found: Converted) -> dict[str, Any]:
    """The settings as tables."""
    tree: dict[str, Any] = {}
    for key, value in found.ours.items():
        *sections, last = key.split(".")
        at = tree
        for section in sections:
            at = at.setdefault(section, {})
        at[last] = value
    return tree
