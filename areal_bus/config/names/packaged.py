"""The configs that are installed with the packages, found by name from any folder."""

import difflib
import os
import shlex
import sys
from pathlib import Path

from areal_bus.errors import ConfigError

FOLDER = Path(__file__).resolve().parents[3] / "configs"  # beside the package, in a checkout and when installed


def find_config(name: str) -> Path:
    """The file of that name, else the packaged config (`configs/tiny.toml`, `tiny.toml` or `tiny`).

    Raises ConfigError with the nearest name when there is neither.
    """
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
    """The packaged config of that name, if there is one."""
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
