"""Settings as TOML: one value, one section, or the whole config, also only what differs from the defaults."""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from areal_bus.config.sections import Config


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
