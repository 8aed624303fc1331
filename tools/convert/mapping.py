"""Translates the settings of another system by a table of its keys. Pure.

A system is a list of Keys. `convert` applies them to the settings of a file: each key gives settings of this project,
and settings that no key reads are reported.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from areal_bus.errors import ConfigError

Ours = dict[str, Any]  # section.key -> value


class Foreign:
    """The settings of a file by dotted key, with the keys that were read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = dict(values)
        self.read: set[str] = set()
        self.defaults: dict[str, Any] = {}
        self.dropped: dict[str, str] = {}  # key -> why its value has no counterpart

    def get(self, key: str, otherwise: Any = None) -> Any:
        """The value in the file, else the default of the system, else `otherwise`; marks the key as read."""
        self.read.add(key)
        value = self.values.get(key)
        if value is None:
            value = self.defaults.get(key)
        return otherwise if value is None else value

    def drop(self, key: str, why: str) -> Ours:
        """The value of this key has no counterpart; a default of the system is not worth a line."""
        if key in self.values:
            self.dropped[key] = why
        return {}


@dataclass(frozen=True, slots=True)
class Key:
    """A setting of another system."""

    theirs: str
    ours: str  # section.key, or several with commas
    note: str = ""
    default: Any = None  # theirs, where a file without the key means another value than ours
    read: Callable[[Any, Foreign], Ours] | None = None  # None: the same value


@dataclass(frozen=True, slots=True)
class Absent:
    """Keys without a counterpart; `*` stands for any text."""

    pattern: str
    why: str = ""  # "": placement, memory, logging: nothing of it changes what is learned


@dataclass(frozen=True, slots=True)
class System:
    """Another system: its name, how a file of it is recognised, and its keys."""

    name: str
    title: str
    signs: Sequence[str]  # keys, or first parts of keys, that only its files have
    keys: Sequence[Key]
    absent: Sequence[Absent]
    finish: Callable[[Ours, Foreign], None]  # settings that depend on several keys


@dataclass(slots=True)
class Converted:
    """Settings of ours, each with its origin, and keys without a counterpart."""

    ours: Ours = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)  # our key -> theirs
    absent: dict[str, str] = field(default_factory=dict)  # their key -> why
    unimportant: list[str] = field(default_factory=list)  # their keys of placement, memory and logging
    to_set: list[str] = field(default_factory=list)  # our keys that the file does not name


def convert(system: System, values: Mapping[str, Any]) -> Converted:
    """Raises ConfigError for a value that its key cannot have."""
    foreign, found = Foreign(values), Converted()
    foreign.defaults = {key.theirs: key.default for key in system.keys if key.default is not None}
    for key in system.keys:
        value = foreign.get(key.theirs)
        if value is None:
            continue
        settings = read(system, key, value, foreign)
        is_default = foreign.values.get(key.theirs) is None
        origin = f"{system.title}'s default of {key.theirs}" if is_default else key.theirs
        found.ours |= settings
        found.origins |= dict.fromkeys(settings, origin)
    system.finish(found.ours, foreign)
    found.origins = {ours: found.origins.get(ours, "") for ours in found.ours}
    found.absent |= foreign.dropped
    for name in sorted(foreign.values.keys() - foreign.read):
        if foreign.values[name] is not None:
            sort(system, name, foreign.values[name], found)
    require(found)
    return found


def read(system: System, key: Key, value: Any, foreign: Foreign) -> Ours:
    try:
        return {key.ours: value} if key.read is None else key.read(value, foreign)
    except (TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError):
        raise ConfigError(f"{key.theirs} is no value that {system.title} accepts: it is {value!r}") from None


def found_off(value: Any) -> bool:
    """Whether a value switches something off, which no counterpart is missed for."""
    return value in (False, 0, "", [])


def sort(system: System, name: str, value: Any, found: Converted) -> None:
    """Put a key that nothing has read into the report."""
    rule = next((rule for rule in system.absent if fnmatchcase(name, rule.pattern)), None)
    if rule is not None and (not rule.why or found_off(value)):
        found.unimportant.append(name)
    elif rule is not None:
        found.absent[name] = rule.why
    else:
        near = difflib.get_close_matches(name, [key.theirs for key in system.keys], 1, 0.9)
        found.absent[name] = f"unknown key; the nearest is {near[0]}" if near else "not known to this tool"


def require(found: Converted) -> None:
    """Placeholders for what every run needs."""
    for key, example in (("model.path", "MODEL"), ("data.path", "train.parquet")):
        if not found.ours.get(key):
            found.ours[key] = example
            found.origins[key] = "SET THIS: the file names none"
            found.to_set.append(key)
