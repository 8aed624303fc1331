"""The lines of one process as slices: its labels, and its samples, scores, updates or pushes on lanes.

Spans of 20 ms or more are at their place; the others fill the rest of their window, one a label.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

from tools.run import Line
from tools.timeline.story import Key

EVENTS = ("start", "spans", "request", "completion", "score", "step", "pushed", "failed", "end", "checkpoint")


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


@dataclass(slots=True)
class Work:
    """One slice of work: a sample, a score, an update or the receiving of a push."""

    kind: str  # sample, score, update, receive
    begin: float
    end: float
    key: Key | None = None  # of a training trajectory
    version: int | None = None
    name: str = ""
    args: Line = field(default_factory=dict)


@dataclass(slots=True)
class ActorStory:
    """One process on the head's clock."""

    name: str
    labels: list[LabelSpan] = field(default_factory=list)
    parts: list[LabelSpan] = field(default_factory=list)  # within labels, at their begins
    work: list[Work] = field(default_factory=list)  # by begin, once read
    swaps: list[tuple[float, int]] = field(default_factory=list)  # (time, version) of complete pushes
    memory: list[tuple[float, int]] = field(default_factory=list)  # (time, bytes)
    tokens: list[tuple[float, int]] = field(default_factory=list)  # (time, tokens of a completion)
    starts: list[float] = field(default_factory=list)
    _open: dict[tuple[str, int, int, int], float] = field(default_factory=dict)
    _marked: float = 0.0

    def on(self, line: Line, offset: float) -> None:
        """Take one line; `offset` is added to its times."""
        at = line["t"] + offset
        event = line["event"]
        if event == "start":
            self.starts.append(at)
            self._marked = line["t"]
        elif event == "spans":
            self._on_spans(line, at, offset)
        elif event == "request":
            self._open[_sample(line)] = at
        elif event == "completion":
            self._on_completion(line, at)
        elif event == "score":
            key = None if line.get("evaluation") else _sample(line)[1:]
            args = {"status": line["status"], "reward": line.get("reward")}
            name = f"score {line['uid']}.{line['sample']}"
            self.work.append(Work("score", at - line["score_s"], at, key, name=name, args=args))
        elif event == "step":
            begin = at - float(line.get("update_s", 0.0))
            self.work.append(Work("update", begin, at, version=line["version"], name=f"update {line['version']}"))
        elif event == "pushed":
            self._on_pushed(line, at)

    def _on_spans(self, line: Line, at: float, offset: float) -> None:
        parts = parts_of(line)
        for span in label_spans(line, self._marked):
            self.labels.append(LabelSpan(span.label, span.begin + offset, span.end + offset, span.is_merged))
            self._marked = span.end
            begin = span.begin + offset
            for part, share in parts.get(span.label, ()):
                end = begin + share * (span.end - span.begin)
                self.parts.append(LabelSpan(part, begin, end, is_merged=True))
                begin = end
        if "rss_bytes" in line:
            self.memory.append((at, line["rss_bytes"]))

    def _on_completion(self, line: Line, at: float) -> None:
        sample = _sample(line)
        begin = self._open.pop(sample, at)
        name = f"sample {line['uid']}.{line['sample']}" + (f" ({sample[0]})" if sample[0] else "")
        args = {"n_tokens": line["n_tokens"], "finish": line["finish"], "versions": line["versions"]}
        self.work.append(Work("sample", begin, at, None if sample[0] else sample[1:], name=name, args=args))
        self.tokens.append((at, line["n_tokens"]))

    def _on_pushed(self, line: Line, at: float) -> None:
        end = at - line["stall_s"]
        name = f"push {line['push']}: version {line['version']}"
        name += f", a delta from {line['delta_from']}" if "delta_from" in line else ""
        self.work.append(Work("receive", end - line["receive_s"], end, version=line["version"], name=name))
        self.swaps.append((at, line["version"]))

    def finish(self) -> None:
        """Sort after the last line."""
        self.work.sort(key=lambda work: work.begin)

    def first_sample_with(self, version: int, after: float) -> Work | None:
        """The first sample that began after this process held the version or a newer one."""
        held = next((at for at, held in self.swaps if held >= version and at >= after), None)
        if held is None:
            return None
        first = bisect_left(self.work, held, key=lambda work: work.begin)
        return next((work for work in self.work[first:] if work.kind == "sample"), None)

    def tokens_per_second(self) -> Iterator[tuple[float, float]]:
        """(begin of a second, tokens of the samples that ended in it), with a 0 after each busy second."""
        bins: dict[int, int] = {}
        for at, n in self.tokens:
            bins[int(at)] = bins.get(int(at), 0) + n
        for second in sorted({*bins, *(second + 1 for second in bins)}):
            yield float(second), float(bins.get(second, 0))


def _sample(line: Line) -> tuple[str, int, int, int]:
    return str(line.get("evaluation") or ""), line["uid"], line["sample"], line["attempt"]
