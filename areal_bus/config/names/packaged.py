"""The installed configs, found by name from any folder; actor.algorithm names one of configs/algorithms."""

import difflib
import os
import shlex
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from areal_bus.errors import ConfigError

FOLDER = Path(__file__).resolve().parents[3] / "configs"  # beside the package, in a checkout and when installed


def find_config(name: str) -> Path:
    """The file, else the packaged config (`tiny.toml`, `tiny`). Raises ConfigError with the nearest name."""
    given = Path(name)
    if os.path.isdir(given):  # False, not an error, for a name that is too long for a file
        raise ConfigError(why_a_folder(given))
    if os.path.exists(given) or given.is_absolute():
        return given
    if (file := find_installed(name)) is not None:
        return file
    if (near := nearest(given, name)) is not None:
        raise ConfigError(f"the config must be an existing TOML file: {name} is not there; did you mean {near}?")
    return given


def find_installed(name: str) -> Path | None:
    short = name.removeprefix("configs/")
    for file in (FOLDER / short, FOLDER / f"{short}.toml"):
        if file.suffix == ".toml" and os.path.isfile(file) and file.resolve().is_relative_to(FOLDER):
            return file
    return None


def why_a_folder(folder: Path) -> str:
    """The words that start what is in a folder."""
    if (folder / "config.json").is_file() and (folder / "origin.json").is_file():
        meant = f"to continue this run: --resume {shlex.quote(str(folder))}"
    else:
        files = sorted(str(path) for path in folder.glob("*.toml"))
        meant = f"did you mean {shlex.quote(files[0])}?" if files else "it has no TOML file"
    return f"the config must be a TOML file: {folder} is a folder; {meant}"


def nearest(given: Path, name: str, apart: Path | None = None) -> str | None:
    """The most similar name: beside the given file, then of a packaged config; never the file `apart`."""
    short, folder = name.removeprefix("configs/"), given.parent
    beside = {path.stem: str(path) for path in folder.glob("*.toml") if path != apart} if os.path.isdir(folder) else {}
    names = [str(path.relative_to(FOLDER).with_suffix("")) for path in FOLDER.rglob("*.toml")]
    packaged = {name: f"configs/{name}.toml" for name in names}
    for known, wanted in ((beside, given.stem), (packaged, short.removesuffix(".toml"))):
        if near := difflib.get_close_matches(wanted, known, 1, 0.6):
            return known[near[0]]
    return None


def announce(name: str, file: Path) -> None:
    """Say when a packaged config is used instead of a file."""
    if file != Path(name):
        print(f"{name} is not in this folder: using the installed {file}", file=sys.stderr, flush=True)


def find_and_announce(name: str) -> Path:
    """`find_config`, then `announce`."""
    file = find_config(name)
    announce(name, file)
    return file


ALGORITHMS = FOLDER / "algorithms"
OVERLONG = 5  # DAPO's penalty begins 4,096 tokens before the end of 20,480


def algorithm_names() -> list[str]:
    return sorted(path.stem for path in ALGORITHMS.glob("*.toml"))


def fill_algorithm(tree: dict[str, Any], defaults: Callable[[str], Any], is_below: Callable[[str], bool]) -> list[str]:
    """Set the keys of actor.algorithm that the tree lacks, or whose value `is_below` the algorithm's; returns those.
    `defaults`: of a key that neither sets. Raises ConfigError for an unknown name.
    """
    actor = tree.get("actor")
    name = actor.get("algorithm") if isinstance(actor, dict) else None
    if not name or not isinstance(name, str):
        return []
    file = ALGORITHMS / f"{name}.toml"
    if name not in algorithm_names():
        near = difflib.get_close_matches(name.lower().replace("_", "-"), algorithm_names(), 1, 0.5)
        hint = f"; the nearest is {near[0]}" if near else ""
        raise ConfigError(f"unknown actor.algorithm {name!r}: it is one of {', '.join(algorithm_names())}{hint}")
    found = []
    for section, keys in tomllib.loads(file.read_text(encoding="utf-8")).items():
        found += _fill_keys(tree, section, keys, is_below)
    for (section, key), value in derived_keys(name, tree, defaults).items():
        found += _fill_keys(tree, section, {key: value}, is_below)
    return found


def _fill_keys(
    tree: dict[str, Any], section: str, keys: Mapping[str, Any], is_below: Callable[[str], bool]
) -> list[str]:
    """The keys that were set. A value that is no section is the schema's to refuse."""
    table = tree.setdefault(section, {})
    if not isinstance(table, dict):
        return []
    chosen = [key for key in keys if key not in table or (key != "algorithm" and is_below(f"{section}.{key}"))]
    table |= {key: keys[key] for key in chosen}
    return [f"{section}.{key}" for key in chosen]


def derived_keys(name: str, tree: Mapping[str, Any], defaults: Callable[[str], Any]) -> dict[tuple[str, str], Any]:
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
