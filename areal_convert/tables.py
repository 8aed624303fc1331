"""Writes the tables of docs/from-verl.md, from-trl.md and from-areal.md: `python -m areal_convert.tables`."""

from pathlib import Path

from areal_convert.areal import AREAL
from areal_convert.mapping import System
from areal_convert.trl import TRL
from areal_convert.verl import VERL

DOCS = Path(__file__).parents[1] / "docs"
BEGIN, END = "<!-- keys: python -m areal_convert.tables -->", "<!-- end of keys -->"


def table_of(system: System) -> str:
    """Theirs, ours, note; then keys without a counterpart."""
    rows = [f"| {system.title} | here | note |", "|---|---|---|"]
    rows += [
        f"| `{key.theirs}` | {names(key.ours)} | {note(key.note, key.default)} |" for key in system.keys if key.ours
    ]
    lost = [f"| `{key.theirs}` | {key.note} |" for key in system.keys if not key.ours]
    lost += [f"| `{rule.pattern}` | {rule.why} |" for rule in system.absent if rule.why]
    return "\n".join([*rows, "", "Without a counterpart:", "", f"| {system.title} | instead |", "|---|---|", *lost])


def names(ours: str) -> str:
    return ", ".join(f"`{name}`" for name in ours.split(", "))


def note(text: str, default: object) -> str:
    shown = "" if default is None else f"default {str(default).lower() if isinstance(default, bool) else default}"
    return "; ".join(filter(None, [text.replace("|", "\\|"), shown]))


def page(system: System) -> Path:
    return DOCS / f"from-{system.name}.md"


def with_table(text: str, system: System) -> str:
    """The page with its table between the marks."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table_of(system)}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    for system in (VERL, TRL, AREAL):
        path = page(system)
        path.write_text(with_table(path.read_text(encoding="utf-8"), system), encoding="utf-8")


if __name__ == "__main__":
    main()
