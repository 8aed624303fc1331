"""The history that counts: kept samples whose training no later term rolled back, and their age.

A sample that is trained is written down at once, in the head's journal and beside it, and once more if its batch is
undone and it is trained again. So of the lines about one sample the last counts, if its batch was not undone.
"""

from collections.abc import Iterable, Sequence

from tools import run
from tools.run import Line, Run

Spans = list[tuple[int, int]]  # (version, number of sampled tokens in a row), in order


def pairs(flat: Sequence[int]) -> Spans:
    """Spans from the journal's flat form [version, n, version, n, ...]. Raises ValueError on an odd length."""
    if len(flat) % 2:
        raise ValueError(f"flat spans are pairs of version and count: {len(flat)} numbers")
    return list(zip(flat[::2], flat[1::2], strict=True))


def trained(spans: Iterable[Sequence[int]], n_masked: int) -> Spans:
    """The spans without their first n_masked tokens: versions never decrease (I5), so the masked ones come first."""
    left = n_masked
    rest = []
    for version, n in spans:
        masked = min(left, n)
        left -= masked
        if n > masked:
            rest.append((version, n - masked))
    return rest


def max_trained_lag(spans: Iterable[Sequence[int]], *, clock: int, n_masked: int) -> int | None:
    """Largest c - ver(t) over the tokens that were trained (I2); None when none was."""
    return max((clock - version for version, _ in trained(spans, n_masked)), default=None)


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
