"""Documentation of the settings: `--explain KEY`, and docs/config.md by `python -m launch.commands.settings_help`."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from areal_bus.config.loader import bounds, fields, kind, nearest, section_of
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError
from launch.plan.settings_text import toml_value

HEADER = """# Settings

Generated from `areal_bus/config/` by `python -m launch.commands.settings_help`; do not edit.

Precedence, highest first: `--set actor.lr=1e-5`, the environment (`AREAL_BUS_ACTOR__LR=1e-5`), the TOML file, and the
file it names with `extends = "base.toml"` (one level). The resolved settings are saved with the run as `config.json`.
`--explain KEY` prints one entry of this page.
"""


def explain(key: str) -> str:
    """Type, default, limits and meaning of a key, or of all keys of a section. Raises ConfigError for unknown keys."""
    known = fields()
    chosen = {name: field for name, field in known.items() if name == key or name.startswith(f"{key}.")}
    if not chosen:
        raise ConfigError(f"unknown key {key}{nearest(key)}")
    return "\n".join(f"{name}: {shape(field)}\n    {field.description or ''}" for name, field in chosen.items())


def shape(field: Any) -> str:
    limits = bounds(field)
    return f"{kind(field.annotation)}{', ' + limits if limits else ''}; default {default(field)}"


def default(field: Any) -> str:
    if field.default is PydanticUndefined:
        return "none (required)"
    return toml_value(field.default)


def page() -> str:
    """The text of docs/config.md."""
    parts = [HEADER]
    for name, field in Config.model_fields.items():
        section = section_of(field.annotation)
        if section is not None:
            parts.append(table(name, section))
    return "\n".join(parts)


def table(name: str, section: type[BaseModel]) -> str:
    lines = [f"## [{name}]", "", "| key | type | default | what |", "|---|---|---|---|"]
    for key, field in fields(section).items():
        limits = bounds(field)
        types = f"{kind(field.annotation)}{', ' + limits if limits else ''}"
        cells = (f"`{key}`", types, f"`{default(field)}`", " ".join((field.description or "").split()))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


DOC = Path(__file__).resolve().parents[2] / "docs" / "config.md"

if __name__ == "__main__":
    DOC.write_text(page(), encoding="utf-8")
    print(f"wrote {DOC}")
