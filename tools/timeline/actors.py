"""The lines of one process as slices: its labels, and its samples, scores, updates or pushes on lanes."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

from tools.run import Line
from tools.timeline.label_spans import LabelSpan, label_spans, parts_of
from tools.timeline.story import Key

EVENTS = ("start", "spans", "request", "completion", "score", "step", "pushed", "failed", "end", "checkpoint")


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
