"""Loads settings from a TOML file, the environment and --set into one checked Config.

Precedence, lowest first: what actor.algorithm, workflow and task stand for, the files that a file `extends`, the file,
AREAL_BUS_SECTION__KEY, --set section.key. pydantic-settings merges the files. It does not read the environment: its
EnvSettingsSource drops unknown sections, parses JSON instead of TOML, and raises errors without key and value.
"""

import difflib
import json
import locale
import os
import tomllib
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, TomlConfigSettingsSource

from areal_bus.config import removed
from areal_bus.config.extends import KEY as EXTENDS
from areal_bus.config.extends import bases, files_of, read_table
from areal_bus.config.names import named_tasks, packaged, workflows
from areal_bus.config.names.packaged import FOLDER
from areal_bus.config.names.synonyms import by_meaning, is_foreign
from areal_bus.config.sections import Config
from areal_bus.config.validation import check
from areal_bus.errors import ConfigError

PREFIX = "AREAL_BUS_"
LIKE = 0.6  # similarity of a section's name to that of a table within a section
NEARER = 0.9  # similarity of a typo; below it, names of other systems are tried first


@dataclass(frozen=True, slots=True)
class Given:
    """Settings as given: tables, and the origin of each value by dotted key: a file, a variable or an option."""

    tree: dict[str, Any]
    origins: dict[str, str]
    path: str  # the file that errors name
    n_files: int = 1  # on the command line


def load(
    path: Path | str | Sequence[Path], overrides: Sequence[str] = (), environ: Mapping[str, str] = os.environ
) -> Config:
    """The checked settings of a file, or of several: a later one wins. Raises ConfigError with one sentence."""
    return checked(read([path] if isinstance(path, Path | str) else path, overrides, environ))


def resolve(
    tree: dict[str, Any], path: str, overrides: Sequence[str] = (), environ: Mapping[str, str] = os.environ
) -> Config:
    """`load` for tables that were already read from the file at `path`."""
    return checked(override(Given(tree, dict.fromkeys(leaves(tree), path), path), overrides, environ))


def read(paths: Sequence[Path | str], overrides: Sequence[str] = (), environ: Mapping[str, str] = os.environ) -> Given:
    """The settings of these files and what they extend, environment and options, with the keys that names stand for."""
    files = files_of([Path(path) for path in paths])
    try:
        origins = {key: str(file) for file in files for key in leaves(read_table(file)) if key != EXTENDS}
        given = Given(merged(files), origins, str(paths[-1]) if paths else "the options", len(paths))
        return override(given, overrides, environ)
    except RecursionError:
        raise ConfigError(f"lists or tables are nested too deep in {', '.join(map(str, files))}") from None


def override(given: Given, overrides: Sequence[str], environ: Mapping[str, str]) -> Given:
    """Put environment and options over the files; then set what actor.algorithm, workflow and task stand for."""
    tree, origins = given.tree, given.origins
    for origin, key, text in [*from_environment(environ), *from_options(overrides)]:
        raw = as_utf8(key, text)
        put(tree, key, plain_value(key, raw, origin), origin)
        origins[key] = origin
    removed.refuse(tree, origins)
    defaults = fields()
    is_below = partial(is_below_algorithm, origins=origins)
    named = packaged.fill_algorithm(tree, lambda key: defaults[key].default, is_below)
    origins |= dict.fromkeys(named, named_by(tree, "actor.algorithm"))
    for key, fill in (("workflow.function", workflows.fill), ("data.task", named_tasks.fill)):
        fill(tree)
        origins = dict.fromkeys(leaves(tree), named_by(tree, key)) | origins
    return Given(tree, origins, given.path, given.n_files)


def named_by(tree: Mapping[str, Any], key: str) -> str:
    """The origin of values that a name stands for: the key that has the name."""
    section, _, name = key.partition(".")
    table = tree.get(section)
    value = table.get(name) if isinstance(table, dict) else None
    return f"{key} = {json.dumps(value)}" if value else f"{section} tables"


def is_below_algorithm(key: str, origins: Mapping[str, str]) -> bool:
    """Whether actor.algorithm wins over a value: one of an installed config that did not name the algorithm itself."""
    origin = origins.get(key, "")
    return origin != origins.get("actor.algorithm") and Path(origin).resolve().is_relative_to(FOLDER)


def checked(given: Given) -> Config:
    """Raises ConfigError."""
    tree = given.tree
    model = tree.get("model", {})
    if isinstance(model, dict) and not model.get("path") and "scratch" not in model:
        check_is_no_base(Path(given.path), is_alone=given.n_files == 1)
    try:
        # JSON: its strict mode accepts a string as a path, but not as a number
        config = Config.model_validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        raise ConfigError(sentence(error, given.origins, given.path)) from None
    check(config)
    return config


def check_is_no_base(path: Path, *, is_alone: bool) -> None:
    """Raises ConfigError for a file without a model that is a part of others."""
    if over := extending(path):
        raise ConfigError(f"{path} is a base for others and names no model: start one of {', '.join(over)}")
    if is_alone and path.resolve().parent == packaged.ALGORITHMS:
        remedy = f"name it after a config, as in configs/tiny.toml {path}, or in one (extends, or actor.algorithm)"
        raise ConfigError(f"model.path is missing: {path} is an algorithm alone; {remedy}")


def read_file(path: Path) -> dict[str, Any]:
    """The merged tables of a file and what it extends."""
    return merged(files_of([path]))


class TomlFiles(TomlConfigSettingsSource):
    """TOML files, which may begin with a byte-order mark."""

    def _read_file(self, file_path: Any) -> dict[str, Any]:
        return read_table(file_path)


def merged(files: Sequence[Path]) -> dict[str, Any]:
    """Tables of the files, deeply merged; values of a later file win."""
    tree = dict(TomlFiles(BaseSettings, list(files), deep_merge=True).toml_data)
    tree.pop(EXTENDS, None)
    return tree


def extending(path: Path) -> list[str]:
    """Files in the same folder that extend this one."""
    found = []
    for other in sorted(path.parent.glob("*.toml")) if path.is_file() else []:
        with suppress(ConfigError):
            if path.name in bases(other, read_table(other)):
                found.append(str(other))
    return found


def leaves(tree: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of all values."""
    found: list[str] = []
    for key, value in tree.items():
        found += leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"]
    return found


def from_environment(environ: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """(origin, dotted key, raw value) of each AREAL_BUS_SECTION__KEY. Raises ConfigError for a single underscore."""
    meant = {f"{PREFIX}{key.replace('.', '_').upper()}": key for key in fields()}
    for name in sorted(meant.keys() & environ.keys()):
        proper = f"{PREFIX}{meant[name].replace('.', '__').upper()}"
        raise ConfigError(f"a key in the environment has two underscores after its section: {name} is {proper}")
    names = sorted(name for name in environ if name.startswith(PREFIX) and "__" in name)
    return [(name, name.removeprefix(PREFIX).lower().replace("__", "."), environ[name]) for name in names]


def from_options(overrides: Sequence[str]) -> list[tuple[str, str, str]]:
    """(origin, dotted key, raw value) of each --set."""
    found = []
    for option in overrides:
        key, equals, raw = option.partition("=")
        if not equals or "." not in key:
            raise ConfigError(f"--set takes section.key=value, for example --set actor.lr=1e-5: got {option!r}")
        found.append((f"--set {option}", key.strip(), raw.strip()))
    return found


def as_utf8(key: str, given: str) -> str:
    """The text of bytes from the command line or the environment. Raises ConfigError where they are not UTF-8."""
    try:
        return os.fsencode(given).decode()
    except UnicodeError:
        read = f"the locale ({locale.getencoding()}) reads its value as {given!a}"
        remedy = "set LC_ALL=C.UTF-8, or write the value into the TOML file"
        raise ConfigError(f"{key} must be UTF-8 text: {read}; {remedy}") from None


def plain_value(key: str, raw: str, origin: str) -> Any:
    """Parse a TOML value. For keys of type string, a bare word is the string itself."""
    field = fields().get(key) or table_with(key)
    if field is None and not removed.why(key):
        if any(one.startswith(f"{key}.") for one in fields()):
            raise ConfigError(f"{key} is a section, not a value: set its keys, each as {key}.NAME ({origin})")
        raise ConfigError(unknown(key, origin))
    takes_text = field is not None and bool({str, Path} & set(alternatives(field.annotation)))
    try:
        value: Any = tomllib.loads(f"value = {raw}")["value"]
    except ValueError:  # no TOML, or a number of more digits than Python reads
        return raw
    return raw if takes_text and not isinstance(value, str) else value


def table_with(key: str) -> FieldInfo | None:
    """The table whose keys are the user's own (workflow.arguments), if this is a key of one."""
    field = fields().get(key.rpartition(".")[0])
    is_table = field is not None and any(get_origin(one) is dict for one in alternatives(field.annotation))
    return field if is_table else None


def put(tree: dict[str, Any], key: str, value: Any, origin: str) -> None:
    *sections, last = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{section} is a section, not a value: the file sets it to {tree!r} ({origin})")
    tree[last] = value


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """Members of a union, or the type itself, without annotations."""
    return tuple(get_args(one)[0] if get_origin(one) is Annotated else one for one in members_of(annotation))


def members_of(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def section_of(annotation: Any) -> type[BaseModel] | None:
    for one in alternatives(annotation):
        if isinstance(one, type) and issubclass(one, BaseModel):
            return one
    return None


def fields(section: type[BaseModel] = Config, prefix: str = "") -> dict[str, FieldInfo]:
    """All keys by dotted name, in order, without the sections themselves."""
    found: dict[str, FieldInfo] = {}
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        found |= fields(inner, f"{prefix}{name}.") if inner else {f"{prefix}{name}": field}
    return found


def unknown(key: str, origin: str = "") -> str:
    """Error text for an unknown key, with the nearest known key; for a former key, why it is gone."""
    where = f" ({origin})" if origin else ""
    if why := removed.why(key):
        return f"{key} no longer exists{where}: {why}"
    return f"unknown key {key}{where}{nearest(key)}"


def nearest(key: str) -> str:
    keys = list(fields())
    section, _, last_part = key.rpartition(".")
    alike = {k: likeness(k.rpartition(".")[0], section) for k in keys if k.rpartition(".")[2] == last_part}
    if same := max(alike, key=alike.__getitem__, default=""):  # the right name in the wrong section
        if alike[same] > LIKE:
            return f": the nearest is {same}"
        if not is_foreign(last_part) and (same := next((k for k in alike if k.count(".") == 1), "")):
            return f": the nearest is {same}"
    if (meaning := by_meaning(key, set(keys))) and not difflib.get_close_matches(key, keys, 1, NEARER):
        return meaning
    sections = sorted({part for k in keys for part in [k.rpartition(".")[0]]})
    near = difflib.get_close_matches(key, keys + sections, 1, 0.7)
    if not near:  # a typo in the wrong section
        last = {k.rpartition(".")[2]: k for k in reversed(keys)}
        near = [last[n] for n in difflib.get_close_matches(key.rpartition(".")[2], last, 1, 0.7)]
    if not near:
        near = difflib.get_close_matches(key, keys + sections, 1, 0.5)
    return f": the nearest is {near[0]}" if near else f": sections are {', '.join(Config.model_fields)}"


def likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def sentence(error: ValidationError, source: Mapping[str, str], path: str) -> str:
    """Error text of the first fault: rule, value and origin, and the number of further faults."""
    faults = error.errors(include_url=False)
    fault = faults[0]
    key = key_at(fault["loc"])
    origin = source.get(key, path)
    n_others = len({key_at(other["loc"]) for other in faults}) - 1
    more = f" (and {n_others} more)" if n_others else ""
    if inner := in_item(key, fault["loc"]):
        what = "unknown key" if fault["type"] == "extra_forbidden" else str(fault["msg"]).lower() + ":"
        return f"{what} {inner} ({origin}): it is {json.dumps(fault['input'])}{more}"
    if fault["type"] == "extra_forbidden":
        inside = [f"{key}.{name}" for name in leaves(fault["input"])] if isinstance(fault["input"], dict) else []
        key = inside[0] if inside else key
        return unknown(key, source.get(key, origin)) + more
    return f"{key} must be {rule(key, fault)}: it is {json.dumps(fault['input'])} ({origin}){more}"


def in_item(key: str, place: Sequence[int | str]) -> str:
    """Name of a fault within a table of a list: "run.stage[0].gconfig.top_p". Empty for a fault elsewhere."""
    index, *names = [*place[key.count(".") + 1 :], ""]
    return f"{key}[{index}].{'.'.join(map(str, names[:-1]))}" if isinstance(index, int) and len(names) > 1 else ""


def key_at(place: Sequence[int | str]) -> str:
    """Dotted key of a fault, without the union member that pydantic appends."""
    names = [str(part) for part in place]
    shortened = (".".join(names[:n]) for n in range(len(names), 0, -1))
    return next((name for name in shortened if name in fields()), ".".join(names))


def rule(key: str, fault: Any) -> str:
    field = fields().get(key)
    if field is None:
        return "a section" if fault["type"] == "model_type" else str(fault["msg"])
    limits = bounds(field)
    return kind(field.annotation) + (f", {limits}" if limits else "")


def kind(annotation: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", Path: "a path (string)"}
    words = []
    for one in alternatives(annotation):
        if get_origin(one) is Literal:
            words.append("one of " + ", ".join(json.dumps(value) for value in get_args(one)))
        elif get_origin(one) is dict:
            words.append(f"a table, each value {limited(get_args(one)[1])}")
        elif get_origin(one) is tuple:
            items = [limited(item) for item in get_args(one) if item is not ...]
            words.append(f"a list of {' and '.join(items)}" if len(items) > 1 else f"a list, each item {items[0]}")
        elif isinstance(one, type) and issubclass(one, BaseModel):
            words.append(f"a table with {', '.join(one.model_fields)}")
        elif one is not type(None):
            words.append(names.get(one, str(one)))
    return " or ".join(words)


def limited(annotation: Any) -> str:
    """`kind` of a part of a list or table, each member of a union with its limits."""
    words = []
    for one in members_of(annotation):
        limits = in_words(limits_of(one))
        words.append(kind(one) + (f", {limits}" if limits else ""))
    return " or ".join(words)


def bounds(field: FieldInfo) -> str:
    """Limits of the field in words; empty if it has none. A pattern has its words in the field's extra "form"."""
    if isinstance(field.json_schema_extra, dict) and "form" in field.json_schema_extra:
        return str(field.json_schema_extra["form"])
    return in_words([*field.metadata, *(item for one in get_args(field.annotation) for item in limits_of(one))])


def in_words(items: Sequence[Any]) -> str:
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below", "min_length": "of length at least"}
    found = ((text, getattr(item, name, None)) for item in items for name, text in words.items())
    return " and ".join(f"{text} {value}" for text, value in found if value is not None)


def limits_of(member: Any) -> list[Any]:
    """Limits of an annotated union member."""
    infos = get_args(member)[1:] if get_origin(member) is Annotated else ()
    return [limit for info in infos for limit in getattr(info, "metadata", [info])]
