"""Translates the settings of another system by a table of its keys. Pure.

A system is a list of Keys. `convert` applies them to the settings of a file. Each key of the file then has one fate:
mapped to settings of this project, lost (with the reason), or left out (placement, or without effect).
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from areal_bus.errors import ConfigError

Ours = dict[str, Any]  # section.key -> value
PLACEMENT = "placement, memory, logging"
NO_EFFECT = "off, unset, or the same here"


class Unresolved(str):
    """A value with a ${...} that the file alone does not answer: an environment variable, a computation."""


class Foreign:
    """The settings of a file by dotted key, and what became of them."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any], n_rows: int | None) -> None:
        self.unresolved = {key: value for key, value in values.items() if isinstance(value, Unresolved)}
        self.values, self.defaults = {**values, **dict.fromkeys(self.unresolved)}, dict(defaults)
        self.n_rows = n_rows  # of the training data
        self.asked: dict[str, None] = {}  # keys whose values the current reader took, in order
        self.parts: dict[str, list[str]] = {}  # our key -> the keys of theirs that it is made of
        self.lost: dict[str, str] = {}  # key -> why its value has no counterpart
        self.removed: dict[str, str] = {}  # key -> why its setting does not go with the others
        self.warmup: tuple[str, float] | None = None  # key of a warm-up, as a share of the run
        self.notes: dict[str, str] = {}  # our key -> how its meaning differs
        self.to_set: dict[str, str] = {}  # our key -> why the user must set it
        self.latest = ""  # the key that was asked last

    def get(self, key: str, otherwise: Any = None) -> Any:
        """The value in the file, else the default of the system, else `otherwise`."""
        self.asked[key] = None
        self.latest = key
        value = self.values.get(key)
        if value is None:
            value = self.defaults.get(key)
        return otherwise if value is None else value

    def section(self, prefix: str) -> dict[str, Any]:
        """The keys below a prefix ("a.b.") that have a value, by the rest of their names."""
        found = {key: value for key, value in self.values.items() if key.startswith(prefix) and value is not None}
        self.asked |= dict.fromkeys(found)
        return {key.removeprefix(prefix): value for key, value in found.items()}

    def lose(self, key: str, why: str) -> Ours:
        """The value of this key has no counterpart; a default of the system is not worth a line."""
        if key in self.values:
            self.lost[key] = why
        return {}

    def put(self, ours: Ours, settings: Ours, *theirs: str) -> None:
        """Add settings that come from these keys."""
        ours |= settings
        self.parts |= {name: list(theirs) for name in settings}

    def remove(self, ours: Ours, why: str, *prefixes: str) -> None:
        """Remove settings that do not go with the others; keys that give nothing else are lost."""
        for name in [name for name in ours if name.startswith(prefixes)]:
            del ours[name]
            self.removed |= dict.fromkeys(self.parts.pop(name, ()), why)

    def unset(self, ours: Ours, *prefixes: str) -> None:
        """Remove settings of something that is off."""
        for name in [name for name in ours if name.startswith(prefixes)]:
            del ours[name]
            self.parts.pop(name, None)


@dataclass(frozen=True, slots=True)
class Key:
    """A setting of another system. "a.b.*" is a section: its value is a mapping."""

    theirs: str
    ours: str  # section.key, or several with commas
    note: str = ""
    default: Any = None  # theirs, where a file without the key means another value than ours
    read: Callable[[Any, Foreign], Ours] | None = None  # None: the same value


def is_off(value: Any, foreign: Foreign) -> bool:
    """Whether a value switches something off, which no counterpart is missed for."""
    return value in (None, False, 0, "", [], {})


@dataclass(frozen=True, slots=True)
class Absent:
    """Keys without a counterpart; `*` stands for any text."""

    pattern: str
    why: str = ""  # "": placement, memory, logging: nothing of it changes what is learned
    off: Callable[[Any, Foreign], bool] = is_off  # whether the value has no effect


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
    """Settings of ours, each with its origin, and the fate of each key of theirs: it is in one of three lists."""

    ours: Ours = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)  # our key -> theirs
    mapped: dict[str, list[str]] = field(default_factory=dict)  # their key -> ours
    lost: dict[str, str] = field(default_factory=dict)  # their key -> why
    left_out: dict[str, str] = field(default_factory=dict)  # their key -> why
    notes: dict[str, str] = field(default_factory=dict)  # our key -> how its meaning differs
    to_set: dict[str, str] = field(default_factory=dict)  # our key -> why the user must set it


def convert(system: System, values: Mapping[str, Any], n_rows: int | None = None) -> Converted:
    """Raises ConfigError for a value that its key cannot have."""
    defaults = {key.theirs: key.default for key in system.keys if key.default is not None}
    foreign, ours = Foreign(values, defaults, n_rows), Ours()
    for key in system.keys:
        foreign.asked = {}
        value = section_of(key, foreign) if key.theirs.endswith(".*") else foreign.get(key.theirs)
        if value is not None:
            foreign.put(ours, read(system, key, value, foreign), *foreign.asked)
    finish(system, ours, foreign)
    found = Converted(ours, notes={key: text for key, text in foreign.notes.items() if key in ours})
    found.to_set = foreign.to_set | require(ours)
    found.origins = {name: origin(name, foreign, found, system) for name in ours}
    sort(system, foreign, found)
    return found


def section_of(key: Key, foreign: Foreign) -> Any:
    return foreign.section(key.theirs[:-1]) or None


INVALID = (TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError)


def read(system: System, key: Key, value: Any, foreign: Foreign) -> Ours:
    try:
        return {key.ours: value} if key.read is None else key.read(value, foreign)
    except INVALID:
        wrong = invalid_key(key, value, foreign)
        given = value if wrong == key.theirs else foreign.values[wrong]
        raise ConfigError(f"{wrong} is no value that {system.title} accepts: it is {given!r}") from None


def invalid_key(key: Key, value: Any, foreign: Foreign) -> str:
    """Of the keys that a reader asked, the one without whose value it succeeds; else its own."""
    others = [other for other in foreign.asked if other in foreign.values and other != key.theirs]
    return next((other for other in others if succeeds_without(other, key, value, foreign)), key.theirs)


def succeeds_without(other: str, key: Key, value: Any, foreign: Foreign) -> bool:
    kept = foreign.values.pop(other)
    try:
        return key.read is None or key.read(value, foreign) is not None
    except INVALID:
        return False
    finally:
        foreign.values[other] = kept


def finish(system: System, ours: Ours, foreign: Foreign) -> None:
    try:
        system.finish(ours, foreign)
    except (TypeError, ValueError, ZeroDivisionError):
        key = foreign.latest
        raise ConfigError(f"{key} is no value that {system.title} accepts: it is {foreign.get(key)!r}") from None


def origin(name: str, foreign: Foreign, found: Converted, system: System) -> str:
    """The comment of a line of the TOML."""
    if name in found.to_set:
        return f"SET THIS: {found.to_set[name]}"
    parts = foreign.parts.get(name, [])
    given = [key for key in parts if foreign.values.get(key) is not None]
    by_default = [f"{system.title}'s default of {key}" for key in parts if key in foreign.defaults]
    return "; ".join(filter(None, [", ".join(given or by_default[:1]), foreign.notes.get(name, "")]))


def sort(system: System, foreign: Foreign, found: Converted) -> None:
    """Put each key of the file into one list."""
    for name in foreign.parts.keys() & found.ours.keys():
        for key in foreign.parts[name]:
            found.mapped.setdefault(key, []).append(name)
    known = {key.theirs for key in system.keys}
    known |= {key.removesuffix(".*") for key in known}  # a section without a key
    sections = {".".join(key.split(".")[:n]) for key in known for n in range(1, key.count(".") + 1)}
    found.mapped = {
        key: sorted(names)
        for key, names in sorted(found.mapped.items())
        if foreign.values.get(key) is not None and key not in foreign.lost
    }
    for key, value in sorted(foreign.values.items()):
        if key in foreign.lost:
            found.lost[key] = foreign.lost[key]
        elif key in foreign.removed and key not in found.mapped:
            found.lost[key] = foreign.removed[key]
        elif key not in found.mapped:
            is_empty = value in (None, {}, []) and key in sections
            without_counterpart(system, key, value, foreign, found, is_known=key in known or is_empty)


def without_counterpart(
    system: System, key: str, value: Any, foreign: Foreign, found: Converted, *, is_known: bool
) -> None:
    rule = next((rule for rule in system.absent if fnmatchcase(key, rule.pattern)), None)
    if key in foreign.unresolved and (is_known or rule is None or rule.why):
        found.lost[key] = f"the file does not say what {foreign.unresolved[key]} is: set it yourself"
    elif is_known:
        found.left_out[key] = NO_EFFECT
    elif rule is None:
        near = difflib.get_close_matches(key, [one.theirs for one in system.keys], 1, 0.9)
        found.lost[key] = f"unknown key; the nearest is {near[0]}" if near else "not known to this tool"
    elif not rule.why:
        found.left_out[key] = PLACEMENT
    elif rule.off(value, foreign):
        found.left_out[key] = NO_EFFECT
    else:
        found.lost[key] = rule.why


def require(ours: Ours) -> dict[str, str]:
    """Placeholders for what every run needs."""
    missing = {}
    for key, example in (("model.path", "MODEL"), ("data.path", "train.parquet")):
        if not ours.get(key) and not (key == "data.path" and "data.source" in ours):
            ours[key], missing[key] = example, "the file names none"
    return missing
