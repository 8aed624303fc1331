"""Which files make up a config, in the order in which they are merged. Standard library only: a fork start reads it."""

import stat
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_bus.config.names.packaged import find_installed, nearest
from areal_bus.errors import ConfigError

KEY = "extends"
MOST_LEVELS = 50


def files_of(given: Sequence[Path]) -> list[Path]:
    """Lowest precedence first: the files that each file extends, then the file itself. A file counts once, where it is
    reached first. Raises ConfigError for a missing file, a wrong `extends` and a cycle.
    """
    found: dict[Path, Path] = {}
    for path in given:
        _add(path, [], found)
    return list(found.values())


def _add(path: Path, above: list[Path], found: dict[Path, Path]) -> None:
    """Add the file and what it extends. `above`: the files that led to it."""
    names = bases(path, read_table(path))
    if path.resolve() in (resolved := [one.resolve() for one in above]):
        cycle = [*above[resolved.index(path.resolve()) :], path]
        raise ConfigError(f"cycle of extends: {' extends '.join(map(str, cycle))}; remove one of them")
    if len(above) > MOST_LEVELS:
        raise ConfigError(f"too many levels of extends: more than {MOST_LEVELS} from {above[0]} to {path}")
    if path.resolve() in found:
        return
    for name in names:
        _add(base_path(name, path), [*above, path], found)
    found.setdefault(path.resolve(), path)


def bases(path: Path, table: Mapping[str, Any]) -> list[str]:
    """The names after `extends` in the file."""
    value = table.get(KEY, [])
    names = value if isinstance(value, list) else [value]
    if not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"{KEY} must be the name of a TOML file, or a list of names: in {path} it is {value!r}")
    return names


def base_path(name: str, path: Path) -> Path:
    """The file that `path` means by a name: relative to its folder, else an installed config. Raises ConfigError."""
    beside = path.parent / name
    why = why_no_file(beside)
    found = beside if not why else find_installed(name)
    if found is None:
        raise ConfigError(
            f"{KEY} must name an existing TOML file: {path} extends {name!r}, which {why}{near(beside, name, path)}"
        )
    return found


def read_table(path: Path) -> dict[str, Any]:
    """The tables of one file. Raises ConfigError."""
    if why := why_no_file(path):
        raise ConfigError(f"the config must be an existing TOML file: {path} {why}{near(path)}")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the config must be valid TOML: {path}: {error}") from None
    except RecursionError:
        raise ConfigError(f"lists or tables are nested too deep in {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config must be a readable TOML file: {path}: {error}") from None
    except ValueError as error:  # a number of more digits than Python reads
        raise ConfigError(f"the config must be valid TOML: {path}: {error}") from None


def why_no_file(path: Path) -> str:
    """What is wrong with a path, in words; "" for a file."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "is not there"
    except (OSError, ValueError) as error:  # a name that is too long, a folder that is closed to us, a null byte
        return f"cannot be opened ({getattr(error, 'strerror', None) or error})"
    return "" if stat.S_ISREG(mode) else "is a folder" if stat.S_ISDIR(mode) else "is no regular file"


def near(path: Path, name: str = "", apart: Path | None = None) -> str:
    found = nearest(path, name or str(path), apart)
    return f"; did you mean {found}?" if found else ""
