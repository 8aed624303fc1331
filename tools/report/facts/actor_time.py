"""Seconds of each actor by label and step, and samples in flight by generator. Pure: lines in, sums out."""

from dataclasses import dataclass, field

from tools.report.facts.curves import StepBins, VersionClock
from tools.run import Line, is_number, skips_incomplete

EVENTS = ("spans", "start", "request", "completion", "step", "update", "term")
Sample = tuple[str, int, int, int]  # evaluation, uid, sample, attempt


@dataclass(slots=True)
class _InFlight:
    """The samples that a generator has begun and not finished."""

    since: float  # wall time up to which they are counted
    samples: set[Sample] = field(default_factory=set)


@dataclass(slots=True)
class ActorTime:
    """Takes lines of EVENTS. An actor is a place in the ring, as generator-1: all its incarnations."""

    clock: VersionClock = field(default_factory=VersionClock)
    labels: dict[str, StepBins] = field(default_factory=dict)  # actor -> LABEL or LABEL:CAUSE, seconds
    in_flight: dict[str, StepBins] = field(default_factory=dict)  # generator -> "samples" and "seconds"
    n_prompt: int = 0  # tokens of prompts, of every turn of finished samples
    n_reused: int = 0  # of these the engine had keys
    _open: dict[str, _InFlight] = field(default_factory=dict)
    _version: int = 0

    @skips_incomplete
    def take(self, line: Line) -> None:
        """Take one line. A line without the fields of its event is ignored."""
        event = line["event"]
        if event == "spans":
            self._add_spans(line)
        elif event in ("step", "update"):
            self._make(float(line["wall"]), int(line["version"]))
        elif event == "term":
            self._begin_term(line)
        elif line["role"] == "generator":
            self._on_generator(line)

    def _make(self, wall: float, version: int) -> None:
        """A version was made: the learner's `step` line comes first, the head's `update` repeats it."""
        if version > self._version:
            self._version = version
            self.clock.update(wall, version)

    def _begin_term(self, line: Line) -> None:
        """All samples in flight are void, and versions continue from that of the term."""
        if int(line["version"]) != self._version:
            self._version = int(line["version"])
            self.clock.update(float(line["wall"]), self._version)
        for name in self._open:
            self._count(name, float(line["wall"])).samples.clear()

    def _add_spans(self, line: Line) -> None:
        name = f"{line['role']}-{line['rank']}"
        bins = self.labels.setdefault(name, StepBins())
        seconds = seconds_by_label(line)
        length = sum(seconds.values())
        if length <= 0:
            return
        wall = float(line["wall"])
        for version, part_s in self.clock.split(wall - length, wall):
            for label, value in seconds.items():
                bins.add(label, version, value * part_s / length)

    def _on_generator(self, line: Line) -> None:
        name = f"generator-{line['rank']}"
        held = self._count(name, float(line["wall"]))
        if line["event"] == "start":
            held.samples.clear()
            return
        if line["event"] == "completion" and "n_reused" in line:
            self.n_prompt += int(line["n_prompt"])
            self.n_reused += int(line["n_reused"])
        key = (str(line.get("evaluation") or ""), line["uid"], line["sample"], line["attempt"])
        (held.samples.add if line["event"] == "request" else held.samples.discard)(key)

    def _count(self, name: str, wall: float) -> _InFlight:
        """Add the time since the last change of a generator's samples in flight."""
        held = self._open.setdefault(name, _InFlight(wall))
        bins = self.in_flight.setdefault(name, StepBins())
        if wall > held.since:
            for version, part_s in self.clock.split(held.since, wall):
                bins.add("seconds", version, part_s)
                bins.add("samples", version, len(held.samples) * part_s)
            held.since = wall
        return held

    def finish(self, wall: float) -> None:
        """Count the samples that are in flight at the last line of the journal."""
        for name in self._open:
            self._count(name, wall)


def seconds_by_label(line: Line) -> dict[str, float]:
    """Seconds by label of a `spans` line; a label with causes by LABEL:CAUSE, the rest under LABEL."""
    found = {key[2:]: float(value) for key, value in line.items() if key.startswith("s_") and is_number(value)}
    for key, value in line.items():
        if key.startswith("w_") and is_number(value):
            label = key[2:].partition(":")[0]
            part = min(float(value), found.get(label, 0.0))
            found[label] = found.get(label, 0.0) - part
            found[key[2:]] = found.get(key[2:], 0.0) + part
    return {label: seconds for label, seconds in found.items() if seconds > 1e-9}
