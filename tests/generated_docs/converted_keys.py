"""The tables of docs/from-verl.md, from-trl.md and from-areal.md: their keys, ours, and what has no counterpart.

Keys with the same counterpart and note share a row.
"""

from areal_convert.mapping import System


def table_of(system: System) -> str:
    """Theirs, ours, note; then keys without a counterpart."""
    mapped: dict[tuple[str, str], list[str]] = {}
    for key in system.keys:
        if key.ours:
            mapped.setdefault((key.ours, note(key.note, key.default)), []).append(key.theirs)
    lost: dict[str, list[str]] = {}
    for pattern, why in [(key.theirs, key.note) for key in system.keys if not key.ours] + [
        (rule.pattern, rule.why) for rule in system.absent if rule.why
    ]:
        lost.setdefault(why, []).append(pattern)
    rows = [f"| {system.title} | here | note |", "|---|---|---|"]
    rows += [f"| {names(theirs)} | {names(ours.split(', '))} | {text} |" for (ours, text), theirs in mapped.items()]
    rows += ["", "Without a counterpart:", "", f"| {system.title} | instead |", "|---|---|"]
    rows += [f"| {names(patterns)} | {why} |" for why, patterns in lost.items()]
    return "\n".join(rows)


def names(keys: list[str]) -> str:
    return ", ".join(f"`{key}`" for key in dict.fromkeys(keys))


def note(text: str, default: object) -> str:
    shown = "" if default is None else f"default {str(default).lower() if isinstance(default, bool) else default}"
    return "; ".join(filter(None, [text.replace("|", "\\|"), shown]))
