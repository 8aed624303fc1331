"""Writes the settings of verl, TRL or AReaL as TOML for this system, and lists what has no counterpart.

The file is YAML or JSON. Its system is recognised by its keys. The TOML is checked by the loader of a start; each line
names its origin in a comment.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_bus.config.loader import resolve
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError
from areal_bus.process.commands import as_here
from areal_convert.areal import AREAL
from areal_convert.mapping import NO_EFFECT, PLACEMENT, Converted, System, convert
from areal_convert.reading import read_foreign
from areal_convert.trl import TRL
from areal_convert.verl import VERL
from tools import terminal

SYSTEMS = {system.name: system for system in (VERL, TRL, AREAL)}
EPILOG = """\
The tables are in docs/from-verl.md, docs/from-trl.md and docs/from-areal.md.

examples:
  python -m areal_convert verl.yaml --to mine/mine.toml
  python -m areal_convert grpo.json --from trl"""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        as_here("python -m areal_convert"),
        description="Convert the settings of verl, TRL or AReaL.",
        epilog=as_here(EPILOG),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "file", type=Path, metavar="FILE", help="their settings (.yaml, .yml, .json), or a list of overrides"
    )
    p.add_argument("--from", choices=sorted(SYSTEMS), dest="system", help="whose they are (recognised by their keys)")
    p.add_argument("--all", action="store_true", help="list also what is mapped, and the keys without effect here")
    p.add_argument("--rows", type=int, metavar="N", help="rows of the training data: steps of a run that counts passes")
    p.add_argument("--to", type=Path, metavar="TOML", help="the file to write (standard output)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    values = read_foreign(args.file)
    system = SYSTEMS[args.system] if args.system else recognise(values, args.file)
    if args.rows is not None and args.rows < 1:
        raise ConfigError(f"--rows must be at least 1: it is {args.rows}")
    found = convert(system, values, args.rows)
    if not set(values) & {key.theirs for key in system.keys} | set(found.mapped):
        raise ConfigError(f"the file must hold settings of {system.title}: no key of {args.file} is one")
    check(found, args.to or Path(f"{args.file.stem}.toml"), system)
    text = toml_of(found, system, args.file)
    if args.to is None:
        print(text, end="")
    else:
        write(args.to, text)
    for line in report(found, system, args.to, with_all=args.all):
        print(line, file=sys.stderr if args.to is None else sys.stdout)
    return 0


def recognise(values: Mapping[str, Any], path: Path) -> System:
    """The system whose keys the file has. Raises ConfigError for none or several."""
    first = {key.partition(".")[0] for key in values}
    scores = {name: sum(sign in first for sign in system.signs) for name, system in SYSTEMS.items()}
    best = max(scores.values())
    named = [name for name, score in scores.items() if score == best]
    if best == 0 or len(named) > 1:
        shown = ", ".join(sorted(first)[:6])
        raise ConfigError(f"unknown origin of {path} (keys {shown}): give --from verl, trl or areal")
    return SYSTEMS[named[0]]


def check(found: Converted, path: Path, system: System) -> None:
    """Raises ConfigError when the loader refuses the settings."""
    try:
        resolve(tree_of(found), str(path), environ={})
    except ConfigError as error:
        raise ConfigError(f"these settings of {system.title} do not go together here: {error}") from None


def write(path: Path, text: str) -> None:
    if path.exists():
        raise ConfigError(f"--to must name a new file: {path} exists")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--to must name a writable file: {path}: {error.strerror}") from None


def report(found: Converted, system: System, path: Path | None, *, with_all: bool) -> list[str]:
    lines = [f"{len(found.ours)} settings from {system.title}" + (f", in {path}" if path else "")]
    lines += [f"set {key} yourself: {why}" for key, why in found.to_set.items()]
    if found.notes:
        lines += ["notes:", *(f"  {key}: {text}" for key, text in found.notes.items())]
    if found.lost:
        lines += ["no counterpart:", *(f"  {key}: {why}" for key, why in found.lost.items())]
    for why in (NO_EFFECT, PLACEMENT):
        keys = [key for key, reason in found.left_out.items() if reason == why]
        if keys:
            lines += [f"left out ({why}): {len(keys)} keys{'' if with_all else ', --all lists them'}"]
            lines += [f"  {key}" for key in keys if with_all]
    if with_all:
        lines += ["mapped:", *(f"  {key}: {', '.join(names)}" for key, names in found.mapped.items())]
    return lines


COLUMN = 58  # of the comments


def toml_of(found: Converted, system: System, path: Path) -> str:
    lines = [
        f"# From {path.name} ({system.title}) by python -m areal_convert; each line names the key that it comes from."
    ]
    for section in Config.model_fields:
        keys = [key for key in found.ours if key.partition(".")[0] == section]
        if keys:
            lines += ["", f"[{section}]", *(line_of(found, key) for key in keys)]
    if found.lost:
        lines += ["", "# No counterpart:", *(f"#   {key}: {why}" for key, why in found.lost.items())]
    return "\n".join(lines) + "\n"


def line_of(found: Converted, key: str) -> str:
    line = f"{key.partition('.')[2]} = {value_text(found.ours[key])}"
    origin = found.origins.get(key, "")
    return f"{line.ljust(COLUMN)}  # {origin}" if origin else line


def value_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(str(name))} = {value_text(one)}" for name, one in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(value_text, value)) + "]"
    return json.dumps(value)


def tree_of(found: Converted) -> dict[str, Any]:
    """The settings as tables."""
    tree: dict[str, Any] = {}
    for key, value in found.ours.items():
        *sections, last = key.split(".")
        at = tree
        for section in sections:
            at = at.setdefault(section, {})
        at[last] = value
    return tree


if __name__ == "__main__":
    terminal.end(main)
