"""`--explain KEY`: type, default, limits and meaning of a setting."""

from typing import Any

from pydantic_core import PydanticUndefined

from areal_bus.config.loader import Given, bounds, fields, kind, unknown
from areal_bus.errors import ConfigError
from launch.plan.settings_text import toml_value

MISSING = object()


def explain(key: str, given: Given | None = None) -> str:
    """Type, default, limits and meaning of a key or section; with `given` value and origin. Raises ConfigError."""
    known = fields()
    chosen = {name: field for name, field in known.items() if name == key or name.startswith(f"{key}.")}
    if not chosen:
        raise ConfigError(unknown(key))
    return "\n".join(
        f"{name}: {shape(field)}\n    {field.description or ''}{value_line(name, given)}"
        for name, field in chosen.items()
    )


def value_line(key: str, given: Given | None) -> str:
    """The value of a key and the file, option or variable that it comes from; "" without files."""
    if given is None:
        return ""
    value: Any = given.tree
    *sections, last = key.split(".")
    for n, part in enumerate((*sections, last)):
        if not isinstance(value, dict):
            section = ".".join(sections[:n])
            raise ConfigError(f"{section} must be a section: it is {toml_value(value)} ({origin(section, given)})")
        value = value.get(part, MISSING)
        if value is MISSING:
            return "\n    here: the default"
    return f"\n    here: {toml_value(value)} ({origin(key, given)})"


def origin(key: str, given: Given) -> str:
    """A value of a table of the user's own has the origin of its first key."""
    inside = (where for name, where in given.origins.items() if name.startswith(f"{key}."))
    return given.origins.get(key) or next(inside, given.path)


def shape(field: Any) -> str:
    limits = bounds(field)
    return f"{kind(field.annotation)}{', ' + limits if limits else ''}; default {default(field)}"


def default(field: Any) -> str:
    if field.default is PydanticUndefined:
        return "none (required)"
    return toml_value(field.default)
