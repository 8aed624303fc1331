"""actor.algorithm: named groups of keys (the files of configs/algorithms), and keys that follow from others."""

import difflib
import tomllib
from collections.abc import Callable, Mapping
from typing import Any

from areal_bus.config.names.packaged import FOLDER
from areal_bus.errors import ConfigError

FILES = FOLDER / "algorithms"
OVERLONG = 5  # DAPO's penalty begins 4,096 tokens before the end of 20,480


def names() -> list[str]:
    return sorted(path.stem for path in FILES.glob("*.toml"))


def fill(tree: dict[str, Any], defaults: Callable[[str], Any], is_below: Callable[[str], bool]) -> list[str]:
    """Set the keys of actor.algorithm that the tree does not set, or whose value there `is_below` the algorithm's.
    Returns the keys that were set.

    `defaults`: of a key that neither sets.

    Raises ConfigError for an unknown name.
    """
    actor = tree.get("actor")
    name = actor.get("algorithm") if isinstance(actor, dict) else None
    if not name or not isinstance(name, str):
        return []
    file = FILES / f"{name}.toml"
    if name not in names():
        near = difflib.get_close_matches(name.lower().replace("_", "-"), names(), 1, 0.5)
        hint = f"; the nearest is {near[0]}" if near else ""
        raise ConfigError(f"unknown actor.algorithm {name!r}: it is one of {', '.join(names())}{hint}")
    found = []
    for section, keys in tomllib.loads(file.read_text(encoding="utf-8")).items():
        found += _fill(tree, section, keys, is_below)
    for (section, key), value in derived(name, tree, defaults).items():
        found += _fill(tree, section, {key: value}, is_below)
    return found


def _fill(tree: dict[str, Any], section: str, keys: Mapping[str, Any], is_below: Callable[[str], bool]) -> list[str]:
    """The keys that were set. A value that is no section is the schema's to refuse."""
    table = tree.setdefault(section, {})
    if not isinstance(table, dict):
        return []
    chosen = [key for key in keys if key not in table or (key != "algorithm" and is_below(f"{section}.{key}"))]
    table |= {key: keys[key] for key in chosen}
    return [f"{section}.{key}" for key in chosen]


def derived(name: str, tree: Mapping[str, Any], defaults: Callable[[str], Any]) -> dict[tuple[str, str], Any]:
    """Keys of an algorithm that follow from lengths and sizes of the run."""

    def value(section: str, key: str) -> int:
        table = tree.get(section)
        found = table.get(key) if isinstance(table, dict) else None
        return found if isinstance(found, int) else int(defaults(f"{section}.{key}"))

    if name == "dapo":
        return {
            ("actor", "overlong_tokens"): max(value("gconfig", "max_new_tokens") // OVERLONG, 1),
            ("data", "max_refill"): value("data", "batch_size"),
        }
    if name == "dr-grpo":
        return {("actor", "aggregation_length"): value("gconfig", "max_new_tokens")}
    return {}
