"""Which kept samples were trained in steps that a later term went back behind; knows the head's lines and no text.

A sample that is trained is written down at once, in the head's journal and beside it, and once more if its batch is
undone and it is trained again. So of the lines about one sample the last counts, if its batch was not undone.
"""

from collections.abc import Iterable

from tools import run
from tools.run import Line, Run

Key = tuple[int, int, int]  # uid, sample, attempt: no two samples of a job share one


def undone(where: Run, kept: Iterable[Line]) -> set[int]:
    """Places, from 0, of the lines (of samples.jsonl, or of tokens.jsonl) whose training is undone."""
    survivors = surviving(where)
    if survivors is None:
        return set()
    places: dict[Key, int] = {}  # of the last line about a sample
    out = set()
    for place, line in enumerate(kept):
        if line["evaluation"]:
            continue
        key = _key(line)
        if key in places:
            out.add(places[key])
        places[key] = place
    return out | {place for key, place in places.items() if key not in survivors}


def surviving(where: Run) -> set[Key] | None:
    """The samples trained in the surviving history; None when nothing was undone."""
    batches: dict[int, set[Key]] = {}
    n_terms = 0
    for path in where.journals("head"):
        for line in run.lines(path, "term", "trajectory"):
            if line["event"] == "trajectory":
                batches.setdefault(line["step"], set()).add(_key(line))
            else:
                n_terms += 1
                batches = {step: keys for step, keys in batches.items() if step < line["version"]}
    return set().union(*batches.values()) if n_terms > 1 else None


def _key(line: Line) -> Key:
    return line["uid"], line["sample"], line["attempt"]
