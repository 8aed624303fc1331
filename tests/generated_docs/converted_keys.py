"""The tables of docs/from-verl.md, from-trl.md and from-areal.md: their keys, ours, and what has no counterpart."""

from areal_convert.mapping import System


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
