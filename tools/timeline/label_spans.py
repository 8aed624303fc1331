"""The labelled seconds of one process as spans, from its `spans` lines. Their sums are those of `tools.breakdown`.

Spans of 20 ms or more are at their place. Shorter ones, and all of a journal without their times, fill the rest of
their window: one span a label in each gap, with the label's part of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tools.run import Line

EPSILON_S = 1e-9  # what rounding leaves


@dataclass(frozen=True, slots=True)
class LabelSpan:
    """Time with one label."""

    label: str  # LABEL or LABEL:CAUSE
    begin: float  # seconds on the clock of the process
    end: float
    is_merged: bool  # the sum of short spans, not one span


def label_spans(line: Line, after: float) -> Iterator[LabelSpan]:
    """The spans of one window, in order, without overlap. `after`: end of the window before."""
    short = _seconds(line)
    begin = at = max(after, line["t"] - sum(short.values()))
    timed = []
    for label, offset, length in _timed(line):
        seconds = min(length, short.get(label, 0.0))
        if seconds > 0:
            short[label] -= seconds
            timed.append((label, begin + offset, seconds))
    for label, starts, seconds in timed:
        for span in _merged(_take(short, max(0.0, starts - at)), at):
            yield span
            at = span.end
        yield LabelSpan(label, at, at + seconds, is_merged=False)
        at += seconds
    yield from _merged(short, at)


def parts_of(line: Line) -> dict[str, list[tuple[str, float]]]:
    """Label -> its parts (prefill of generate), each with its share of the label in this window."""
    found: dict[str, list[tuple[str, float]]] = {}
    for key, seconds in line.items():
        if key.startswith("p_"):
            label, _, part = key[2:].partition(":")
            whole = float(line.get(f"s_{label}", 0.0))
            if whole > 0:
                found.setdefault(label, []).append((part, min(float(seconds) / whole, 1.0)))
    return found


def _seconds(line: Line) -> dict[str, float]:
    """Seconds by label; of a label with causes, by LABEL:CAUSE and the rest."""
    found = {key[2:]: float(value) for key, value in line.items() if key.startswith("s_")}
    for key, value in line.items():
        if key.startswith("w_"):
            label = key[2:].partition(":")[0]
            part = min(float(value), found.get(label, 0.0))
            found[label] = found.get(label, 0.0) - part
            found[key[2:]] = part
    return {label: seconds for label, seconds in found.items() if seconds > 0}


def _timed(line: Line) -> list[tuple[str, float, float]]:
    """(label, begin within the window, length) of the timed spans, by begin."""
    found = []
    for key, times in line.items():
        if key.startswith("at_"):
            found += [(key[3:], a / 1e6, n / 1e6) for a, n in zip(times[::2], times[1::2], strict=False)]
    return sorted(found, key=lambda one: one[1])


def _take(short: dict[str, float], seconds: float) -> dict[str, float]:
    """Take up to so many seconds of short spans, each label by its part."""
    total = sum(short.values())
    part = min(1.0, seconds / total) if total > 0 else 0.0
    taken = {label: part * left for label, left in short.items()}
    for label, left in taken.items():
        short[label] -= left
    return taken


def _merged(parts: dict[str, float], at: float) -> Iterator[LabelSpan]:
    """One span a label, longest first."""
    for label, seconds in sorted(parts.items(), key=lambda item: -item[1]):
        if seconds > EPSILON_S:
            yield LabelSpan(label, at, at + seconds, is_merged=True)
            at += seconds
