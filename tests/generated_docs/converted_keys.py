"""The lists of docs/from-verl.md, from-trl.md and from-areal.md: the keys that are mapped, and ours.

Keys with the same counterpart and note share a line, and keys of the same name. `areal-bus convert` prints the keys of
a file that have no counterpart, each with its reason.
"""

from areal_convert.mapping import System


def list_of(system: System) -> str:
    """Theirs; ours with a note."""
    same = [key.theirs for key in system.keys if key.theirs == key.ours and not note(key.note, key.default)]
    mapped: dict[tuple[str, str], list[str]] = {}
    for key in system.keys:
        if key.ours and key.theirs not in same:
            mapped.setdefault((key.ours, note(key.note, key.default)), []).append(key.theirs)
    rows = [f"- {names(same)}: the same names"] if same else []
    for (ours, text), theirs in mapped.items():
        rows.append(f"- {names(theirs)}: {'; '.join(filter(None, [names(ours.split(', ')), text]))}")
    return "\n".join(rows)


def names(keys: list[str]) -> str:
    return ", ".join(f"`{key}`" for key in dict.fromkeys(keys))


def note(text: str, default: object) -> str:
    shown = "" if default is None else f"default {str(default).lower() if isinstance(default, bool) else default}"
    return "; ".join(filter(None, [text, shown]))
