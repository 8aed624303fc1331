"""The journal of one process, line by line, over all its files. A torn last line is skipped; gaps are findings."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_bus.storage.journal_segments import raw_lines
from tools.audit.findings import Findings
from tools.breakdown.incarnations import Incarnation, add_line

Line = dict[str, Any]
Handler = Callable[[Line], None]

STILL_S = 5.0  # a process labels its time every second: one that writes nothing for longer is stopped, or hangs
LABELS = frozenset({"start", "spans", "end", "failed"})
_decode = json.JSONDecoder().raw_decode


@dataclass(slots=True)
class JournalFile:
    """Where the reading is: `where()` names the line for a finding. Line numbers count over all files, from 1."""

    path: Path
    findings: Findings
    number: int = 0
    torn: bool = False
    lives: list[Incarnation] = field(default_factory=list)  # seconds by label, for I12
    last_t: float = 0.0
    still_s: float = 0.0  # in which its process wrote nothing at all, though it was there before and after

    @property
    def name(self) -> str:
        """The process: generator-0.1."""
        return self.path.name.removesuffix(".jsonl")

    def where(self) -> str:
        return f"{self.path.name}:{self.number}"

    def add(self, invariant: str, text: str, **ids: int | str) -> None:
        """A finding at the line just read."""
        self.findings.add(invariant, self.where(), text, **ids)

    def lines(self) -> Iterator[Line]:
        expected = 0
        broken = 0
        for number, raw in enumerate(raw_lines(self.path), start=1):
            if broken:
                self.number = broken
                self.add("journal", "only the last line may be torn: this one is broken and others follow")
                broken = 0
            text = raw.decode(errors="surrogateescape")
            line = parse(text)
            if line is None:
                broken = number if text.strip() else 0
                continue
            self.number = number
            seq = line["seq"]
            if seq != expected and line["event"] != "start":
                self.add("journal", f"seq counts without gaps: {seq} follows {expected - 1}", seq=seq)
            expected = seq + 1
            yield line
        self.torn = bool(broken)

    def drive(self, handlers: dict[str, Handler], each: Handler = lambda line: None) -> int:
        """Hand each line to `each` and to the handler of its event. Returns how many lines there are."""
        n = 0
        for line in self.lines():
            n += 1
            event = line["event"]
            handler = handlers.get(event)
            try:
                self._pass(float(line["t"]), event)
                each(line)
                if event in LABELS:
                    self._label(line)
                if handler is not None:
                    handler(line)
            except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
                self.add("journal", f"a line has the fields of docs/journal.md: {event}: {error!r}")
        return n

    def _pass(self, t: float, event: str) -> None:
        """Time has gone by."""
        gap_s = t - self.last_t
        if gap_s > STILL_S and self.last_t and event != "start":
            self.still_s += gap_s
        self.last_t = t

    def _label(self, line: Line) -> None:
        if line["event"] == "start" or not self.lives:
            self.lives.append(Incarnation(self.name, began=line["t"], marked=line["t"]))
        add_line(self.lives[-1], line)


def find(path: Path, event: str) -> Iterator[Line]:
    """Whole lines of one event, without a look at the others."""
    wanted = f'"event":"{event}"'.encode()
    for raw in raw_lines(path):
        if wanted in raw and (line := parse(raw.decode(errors="surrogateescape"))) is not None:
            yield line


def parse(text: str) -> Line | None:
    """The JSON object of a whole line with what every line has; None for anything else."""
    if not text.endswith("\n"):
        return None
    try:
        value, end = _decode(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or text[end:] != "\n":
        return None
    whole = isinstance(value.get("seq"), int) and isinstance(value.get("event"), str) and "t" in value
    return value if whole else None
