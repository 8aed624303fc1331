"""Documentation of the settings: `--explain KEY`, and docs/config.md by `python -m launch.commands.settings_help`."""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from areal_bus.config.loader import bounds, fields, kind, nearest, section_of
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError

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


def toml_value(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, BaseModel):
        pairs = [f"{key} = {toml_value(item)}" for key, item in value if item is not None and not is_empty(item)]
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, dict):
        pairs = [f"{json.dumps(str(key))} = {toml_value(item)}" for key, item in value.items()]
        return f"{{ {', '.join(pairs)} }}" if pairs else "{}"
    return json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)


def is_empty(value: Any) -> bool:
    """Whether it is a section without a value other than its defaults."""
    return isinstance(value, BaseModel) and not value.model_dump(exclude_defaults=True)


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


def as_toml(config: Config, *, changed_only: bool = False) -> str:
    """The Config as TOML: all keys (unset ones as comments), or only those that differ from the defaults."""
    lines: list[str] = []
    for name in Config.model_fields:
        section = getattr(config, name)
        found = section_lines(name, section, type(section)() if changed_only else None)
        lines += [*found, ""] if found else []
    return "\n".join(lines).rstrip() + "\n"


def section_lines(name: str, section: BaseModel, default: BaseModel | None, *, is_added: bool = False) -> list[str]:
    """Lines of one section; with `default` only the differences. `is_added`: print the heading also without any."""
    lines, inner = [], []
    for key in type(section).model_fields:
        value = getattr(section, key)
        usual = getattr(default, key) if default is not None else None
        if isinstance(value, BaseModel):
            of = None if default is None else usual or type(value)()
            inner += section_lines(f"{name}.{key}", value, of, is_added=usual is None)
        elif default is None or value != usual:
            lines.append(f"# {key} is unset" if value is None else f"{key} = {toml_value(value)}")
    return [*([f"[{name}]"] if lines or is_added or default is None else []), *lines, *inner]


DOC = Path(__file__).resolve().parents[2] / "docs" / "config.md"

if __name__ == "__main__":
    DOC.write_text(page(), encoding="utf-8")
    print(f"wrote {DOC}")
