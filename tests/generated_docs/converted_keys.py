"""The lists of docs/from-verl.md, from-trl.md and from-areal.md: the keys that are mapped, and ours.

Keys with the same counterpart and note share a line, and keys of the same name. Defaults are left out: the converter
writes those that differ from ours. It prints the keys of a file that have no counterpart, each with its reason.
"""

from areal_convert.mapping import System


def list_of(system: System) -> str:
    """Theirs, and ours with a note."""
    same = [key.theirs for key in system.keys if key.theirs == key.ours and not key.note]
    mapped: dict[tuple[str, str], list[str]] = {}
    for key in system.keys:
        if key.ours and key.theirs not in same:
            mapped.setdefault((key.ours, key.note), []).append(key.theirs)
    rows = [f"- {names(same)}: the same names"] if same else []
    for (ours, text), theirs in mapped.items():
        rows.append(f"- {names(theirs)}: {'; '.join(filter(None, [names(ours.split(', ')), text]))}")
    return "\n".join(rows)


def names(keys: list[str]) -> str:
    return ", ".join(f"`{key}`" for key in dict.fromkeys(keys))
