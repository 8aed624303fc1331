"""Device seconds of each sample: the `generate` of a generator's process, divided by time in flight."""

from dataclasses import dataclass, field

from tools.run import Line, is_number

EVENTS = frozenset({"spans", "request", "completion", "lease", "refund", "term"})
Sample = tuple[str, int, int, int]  # evaluation ("" in training), uid, sample, attempt
Process = tuple[int, int]  # rank and incarnation of a generator


@dataclass(slots=True)
class SamplingTime:
    """Takes lines of EVENTS of all processes. Generators write no line of what is cancelled: the head's lines tell."""

    _generate_s: dict[Process, float] = field(default_factory=dict)
    _last: dict[Process, float] = field(default_factory=dict)  # wall time of its last line
    _live: dict[tuple[str, int], dict[Sample, tuple[Process, float]]] = field(default_factory=dict)  # begin, by prompt
    _ended: dict[Sample, tuple[Process, float, float]] = field(default_factory=dict)  # begin, end

    def take(self, line: Line) -> None:
        event = line["event"]
        if line["role"] == "generator":
            self._take_own(line, (line["rank"], line["inc"]), float(line["wall"]))
        elif event == "term":
            for prompt in self._live.keys() - {("", uid) for uid in line["open"]}:
                self._cancel(prompt)
        elif event == "refund":
            self._cancel(("", line["uid"]))
        elif event == "lease":
            self._cancel(("", line["uid"]), before=line["attempt"])

    def _take_own(self, line: Line, process: Process, wall: float) -> None:
        self._last[process] = wall
        if line["event"] == "spans":
            seconds = line.get("s_generate", 0.0)
            self._generate_s[process] = self._generate_s.get(process, 0.0) + (seconds if is_number(seconds) else 0.0)
            return
        sample = (str(line.get("evaluation") or ""), line["uid"], line["sample"], line["attempt"])
        live = self._live.setdefault(sample[:2], {})
        if line["event"] == "request" and sample not in self._ended:  # one that ends at once has its completion first
            live[sample] = (process, wall)
        elif line["event"] == "completion":
            began = (live.pop(sample, None) or self._ended.get(sample) or (process, wall))[1]  # cancelled too late
            self._ended[sample] = (process, began, max(began, wall))

    def _cancel(self, prompt: tuple[str, int], *, before: int | None = None) -> None:
        """End the samples of a prompt, of attempts before this one, at the last lines of their processes."""
        live = self._live.pop(prompt, {})
        kept = {sample: began for sample, began in live.items() if before is not None and sample[3] >= before}
        for sample in live.keys() - kept.keys():
            process, began = live[sample]
            self._ended[sample] = (process, began, max(began, self._last[process]))
        if kept:
            self._live[prompt] = kept

    def seconds(self) -> tuple[dict[Sample, float], float]:
        """Of every sample that was begun; and seconds of processes without any."""
        for prompt in list(self._live):
            self._cancel(prompt)
        totals = dict.fromkeys(self._generate_s, 0.0)
        for process, began, end in self._ended.values():
            totals[process] = totals.get(process, 0.0) + end - began
        rates = {process: self._generate_s.get(process, 0.0) / s if s else 0.0 for process, s in totals.items()}
        rest = sum(s for process, s in self._generate_s.items() if not totals[process])
        return {key: (end - began) * rates[process] for key, (process, began, end) in self._ended.items()}, rest
