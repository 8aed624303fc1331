"""Reads a settings file of another system: YAML, JSON or a list of overrides, flat by dotted key.

Interpolations (`${a.b}`) are resolved.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from areal_bus.errors import ConfigError
from areal_convert.mapping import Unresolved

REFERENCE = re.compile(r"\$\{([^${}]+)\}")
OVERRIDE = re.compile(r"~|[^=]+=")
SCIENTIFIC = re.compile(r"[+-]?(\d+(?:\.\d*)?|\.\d+)[eE][+-]?\d+")  # YAML reads 1e-6 as text
DEPTH = 10  # of references to references

Flat = dict[str, Any]


def read_foreign(path: Path) -> Flat:
    """The settings by dotted key. Raises ConfigError with one sentence."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the file must be readable UTF-8 text: {path}: {error}") from None
    try:
        tree = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        kind = "JSON" if path.suffix == ".json" else "YAML"
        raise ConfigError(f"invalid {kind}: {path}: {reason[:200]}") from None
    if isinstance(tree, list) and tree and all(isinstance(one, str) and OVERRIDE.match(one) for one in tree):
        tree = dict(map(override, tree))
    if not isinstance(tree, dict) or not tree:
        raise ConfigError(
            f"the file must hold settings by name: {path} holds {'nothing' if not tree else 'no mapping'}"
        )
    flat = with_sections(dict(leaves(tree)))
    return {key: resolve(value, flat, key) for key, value in flat.items()}


def override(text: str) -> tuple[str, Any]:
    """ "+a.b=1", as .hydra/overrides.yaml lists them; "~a.b" takes a key out."""
    key, _, value = text.partition("=")
    is_set = value.strip() and not text.startswith("~")
    return key.strip().lstrip("+~"), yaml.safe_load(value) if is_set else None


def leaves(tree: Mapping[Any, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            found += leaves(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", plain(value)))
    return found


def with_sections(flat: Flat) -> Flat:
    """A reference to a section (`critic.optimizer: ${actor.optimizer}`) as the keys of that section."""
    found: Flat = {}
    for key, value in flat.items():
        whole = REFERENCE.fullmatch(value) if isinstance(value, str) else None
        base = f"{whole[1]}." if whole and whole[1] not in flat else ""
        below = [name for name in flat if base and name.startswith(base)]
        found |= {f"{key}.{name.removeprefix(base)}": flat[name] for name in below} if below else {key: value}
    return found


def plain(value: Any) -> Any:
    if isinstance(value, str) and SCIENTIFIC.fullmatch(value.strip()):
        return float(value)
    return [plain(one) for one in value] if isinstance(value, list) else value


def resolve(value: Any, flat: Flat, key: str, depth: int = 0) -> Any:
    """The value with ${...} replaced, or Unresolved. Raises ConfigError for endless references."""
    if isinstance(value, list):
        items = [resolve(one, flat, key, depth) for one in value]
        return next((one for one in items if isinstance(one, Unresolved)), items)
    if not isinstance(value, str) or isinstance(value, Unresolved) or not (found := REFERENCE.search(value)):
        return None if value == "???" else value
    if depth > DEPTH:
        raise ConfigError(f"endless reference: {key} = {value!r}")
    referred = resolve(lookup(found[1], flat, key), flat, key, depth + 1)
    if isinstance(referred, Unresolved):
        return Unresolved(value)
    if found[0] == value:
        return referred
    return resolve(value.replace(found[0], str(referred)), flat, key, depth + 1)


def lookup(reference: str, flat: Flat, key: str) -> Any:
    """ "a.b", ".b" (beside the key), "..b" (one level up) or "oc.select:a.b,default"."""
    kind, colon, rest = reference.partition(":")
    name, _, default = (rest if colon else reference).partition(",")
    if colon and kind not in ("oc.select", "oc.env"):
        return Unresolved(f"${{{reference}}}")
    if colon and kind == "oc.env":
        return plain(yaml.safe_load(default)) if default else Unresolved(f"${{{reference}}}")
    name = name.strip()
    if name.startswith("."):
        n_up = len(name) - len(name.lstrip("."))
        name = ".".join([*key.split(".")[:-n_up], name.lstrip(".")])
    if name not in flat and not colon:
        return Unresolved(f"${{{reference}}}")
    value = flat.get(name)
    return plain(yaml.safe_load(default)) if value is None and default else value
