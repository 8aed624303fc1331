"""Finds logged samples whose training was rolled back by a later term, and the lag of trained tokens."""

from collections.abc import Iterable, Sequence

from tools import run
from tools.run import Line, Run

Spans = list[tuple[int, int]]  # (version, number of sampled tokens in a row), in order


def span_pairs(flat: Sequence[int]) -> Spans:
    """Spans from the journal's flat form [version, n, version, n, ...]. Raises ValueError on an odd length."""
    if len(flat) % 2:
        raise ValueError(f"invalid flat spans: {len(flat)} numbers, not pairs of version and count")
    return list(zip(flat[::2], flat[1::2], strict=True))


def trained_spans(spans: Iterable[Sequence[int]], n_masked: int) -> Spans:
    """The spans without their first n_masked tokens. Versions never decrease (I5), so the masked tokens come first."""
    left = n_masked
    rest = []
    for version, n in spans:
        masked = min(left, n)
        left -= masked
        if n > masked:
            rest.append((version, n - masked))
    return rest


def max_trained_lag(spans: Iterable[Sequence[int]], *, clock: int, n_masked: int) -> int | None:
    """Largest c - ver(t) over the trained tokens (I2); None without trained tokens."""
    return max((clock - version for version, _ in trained_spans(spans, n_masked)), default=None)


Key = tuple[int, int, int]  # uid, sample, attempt: unique in a job


def undone_places(where: Run, kept: Iterable[Line]) -> set[int]:
    """Line numbers, from 0, in samples.jsonl or tokens.jsonl whose training is undone."""
    survivors = surviving(where)
    if survivors is None:
        return set()
    places: dict[Key, int] = {}  # sample -> number of its last line
    out = set()
    for place, line in enumerate(kept):
        if line["evaluation"]:
            continue
        key = sample_key(line)
        if key in places:
            out.add(places[key])
        places[key] = place
    return out | {place for key, place in places.items() if key not in survivors}


def surviving(where: Run) -> set[Key] | None:
    """Samples trained in the surviving history; None when nothing was undone."""
    batches: dict[int, set[Key]] = {}
    n_terms = 0
    for path in where.journals("head"):
        for line in run.lines(path, "term", "trajectory"):
            if line["event"] == "trajectory":
                batches.setdefault(line["step"], set()).add(sample_key(line))
            else:
                n_terms += 1
                batches = {step: keys for step, keys in batches.items() if step < line["version"]}
    return set().union(*batches.values()) if n_terms > 1 else None


def sample_key(line: Line) -> Key:
    return line["uid"], line["sample"], line["attempt"]
