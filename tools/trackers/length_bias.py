"""Length bias up to each version: mean trained tokens of a sample over mean sampled ones, of all and of each source.

As in the report (`tools/report/facts/length_bias.py`), but only of samples with a verdict, whose prompt is decided.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from tools.audit.figures import TrainedSample, read, trained_tokens
from tools.audit.run_settings import RunSettings
from tools.run import Line

AT_END = ("end_of_run", "end_of_data")  # refunds of prompts that nothing decided

Sums = dict[str, tuple[float, int]]  # by source, "" for all: tokens, samples


def added(sums: Sums, source: str, tokens: float, samples: int) -> None:
    for name in {"", source}:
        before = sums.get(name, (0.0, 0))
        sums[name] = before[0] + tokens, before[1] + samples


@dataclass(slots=True)
class LengthBiasReader:
    """Takes `admit`, `scored`, `refund`, `trajectory` and `term` lines, and the first line of each update."""

    setup: RunSettings
    _sources: dict[int, str] = field(default_factory=dict)  # of prompts, in runs with several
    _open: dict[int, tuple[int, int]] = field(default_factory=lambda: defaultdict(lambda: (0, 0)))  # tokens, samples
    _batches: dict[int, list[TrainedSample]] = field(default_factory=dict)  # by step
    _sampled: Sums = field(default_factory=dict)
    _trained: dict[int, Sums] = field(default_factory=lambda: {0: {}})  # by version

    def take(self, line: Line) -> None:
        match line["event"]:
            case "admit" if line.get("source"):
                self._sources[line["uid"]] = line["source"]
            case "scored" if not line.get("evaluation"):
                tokens, samples = self._open[line["uid"]]
                self._open[line["uid"]] = tokens + line["n_tokens"], samples + 1
            case "refund":
                self._decide(line["uid"], counts=line["reason"] not in AT_END)
            case "trajectory":
                self._batches.setdefault(line["step"], []).append(read(line))
            case "term":
                self._go_back(line["version"], line["next_uid"])

    def values(self, version: int, line: Line) -> Iterator[tuple[str, float]]:
        """The series of a version, whose update has this line: of all, and of each of several sources."""
        batch, trained = self._batches.pop(version - 1, []), dict(self._trained[max(self._trained)])
        for one, tokens in zip(batch, trained_tokens(batch, line, self.setup), strict=True):
            added(trained, self._sources.get(one.uid, ""), tokens, tokens > 0)
        for uid in {one.uid for one in batch}:
            self._decide(uid, counts=True)
        self._trained[version] = trained
        for name, (tokens, samples) in trained.items() if len(trained) > 2 else [("", trained.get("", (0.0, 0)))]:
            sampled, n_sampled = self._sampled.get(name, (0.0, 0))
            if tokens and sampled:
                yield f"rollout/length_bias{f'/{name}' * bool(name)}", tokens / samples / (sampled / n_sampled)

    def _decide(self, uid: int, *, counts: bool) -> None:
        tokens, samples = self._open.pop(uid, (0, 0))
        if counts:
            added(self._sampled, self._sources.get(uid, ""), tokens, samples)

    def _go_back(self, version: int, next_uid: int) -> None:
        """A term began: later updates are undone, and prompts from `next_uid` on erased; both were sampled."""
        self._trained = {v: sums for v, sums in self._trained.items() if v <= version}
        self._batches.clear()
        for uid in [uid for uid in self._open if uid >= next_uid]:
            self._decide(uid, counts=True)
