"""Time by step: the wait for each batch with its cause, the update and the push, from the head's lines."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tools import run, terminal
from tools.run import Line, Run

EVENTS = ("start", "split", "term", "admit", "sampled", "scored", "ready", "batch", "update", "push", "publish")
N_SLOWEST = 3
QUANTILES = (("median", 0.5), ("90 %", 0.9), ("longest", 1.0))


@dataclass(slots=True)
class Step:
    """One step of the surviving history. Times of one clock, the head's; None where the journal has no such line."""

    version: int  # that the update made
    taken: float  # monotonic: the head took the batch
    asked: float | None = None  # monotonic: the previous update was finished
    admitted: float | None = None  # monotonic: its last group was admitted
    reward_s: float = 0.0  # of its last group: from the end of its last sampling to the verdict
    updated: float | None = None
    pushed_s: float | None = None  # from the begin of the push to its publish
    n_tokens: float = 0.0  # trained
    n_computed: float | None = None  # tokens computed with a gradient, prompts included
    n_forward: float = 0.0  # tokens of passes without a gradient
    split: Line | None = None  # line of the split in force; None: the split of the run cannot change

    @property
    def wait_s(self) -> float | None:
        return None if self.asked is None else max(self.taken - self.asked, 0.0)

    @property
    def wait_reward_s(self) -> float | None:
        """The part of the wait in which the last group was sampled and not scored."""
        return None if self.wait_s is None else min(self.wait_s, self.reward_s)

    @property
    def wait_push_s(self) -> float | None:
        """The part of the wait before the last group was admitted: the gate was shut until a publish."""
        if self.asked is None or self.wait_s is None or self.wait_reward_s is None:
            return None
        shut_s = 0.0 if self.admitted is None else max(self.admitted - self.asked, 0.0)
        return min(shut_s, self.wait_s - self.wait_reward_s)

    @property
    def wait_sampling_s(self) -> float | None:
        """The rest of the wait."""
        if self.wait_s is None or self.wait_reward_s is None or self.wait_push_s is None:
            return None
        return self.wait_s - self.wait_reward_s - self.wait_push_s

    @property
    def update_s(self) -> float | None:
        return None if self.updated is None else self.updated - self.taken

    @property
    def step_s(self) -> float | None:
        """Seconds from the request for its batch to its update."""
        return None if self.updated is None or self.asked is None else self.updated - self.asked


@dataclass(slots=True)
class _Reader:
    """State while the head's lines are read."""

    steps: dict[int, Step] = field(default_factory=dict)  # by version
    push_began: dict[int, float] = field(default_factory=dict)  # version -> t
    admitted: dict[int, float] = field(default_factory=dict)  # uid -> t
    sampled: dict[tuple[int, int], float] = field(default_factory=dict)  # uid, sample -> t
    scoring_s: dict[int, float] = field(default_factory=dict)  # uid -> reward seconds of its last verdict
    last_ready: int | None = None
    last_update: float | None = None
    split: Line | None = None

    def on(self, line: Line) -> None:
        """Take one line."""
        getattr(self, f"on_{line['event']}")(line)

    def on_start(self, line: Line) -> None:
        """Another start of the head may have another clock."""
        self.last_update = None
        self.push_began, self.admitted, self.sampled, self.scoring_s = {}, {}, {}, {}
        self.split = None  # a split that may change has a line of its own

    def on_split(self, line: Line) -> None:
        self.split = line

    def on_term(self, line: Line) -> None:
        """Later versions are undone."""
        self.steps = {version: step for version, step in self.steps.items() if version <= line["version"]}
        self.last_update = None

    def on_admit(self, line: Line) -> None:
        self.admitted[line["uid"]] = line["t"]

    def on_sampled(self, line: Line) -> None:
        self.sampled[line["uid"], line["sample"]] = line["t"]

    def on_scored(self, line: Line) -> None:
        if not line.get("evaluation"):
            began = self.sampled.pop((line["uid"], line["sample"]), line["t"])
            self.scoring_s[line["uid"]] = max(line["t"] - began, 0.0)

    def on_ready(self, line: Line) -> None:
        self.last_ready = line["uid"]

    def on_batch(self, line: Line) -> None:
        step = Step(line["clock"] + 1, taken=line["t"], asked=self.last_update, split=self.split)
        if self.last_ready is not None:
            step.admitted = self.admitted.get(self.last_ready)
            step.reward_s = self.scoring_s.get(self.last_ready, 0.0)
        self.steps[step.version] = step
        self.last_ready = None

    def on_update(self, line: Line) -> None:
        self.last_update = line["t"]
        step = self.steps.get(line["version"])
        if step is not None:
            step.updated, step.n_tokens = line["t"], float(line.get("n_tokens_trained", 0.0))
            computed = line.get("n_tokens_computed")
            step.n_computed = None if computed is None else float(computed)
            step.n_forward = float(line.get("n_tokens_forward", 0.0))

    def on_push(self, line: Line) -> None:
        if not line["catch_up"]:
            self.push_began[line["version"]] = line["t"]

    def on_publish(self, line: Line) -> None:
        step, began = self.steps.get(line["version"]), self.push_began.pop(line["version"], None)
        if step is not None and began is not None:
            step.pushed_s = line["t"] - began


def read_steps(where: Run) -> list[Step]:
    """The steps of the surviving history, by version."""
    reader = _Reader()
    for path in where.journals("head"):
        for line in run.lines(path, *EVENTS):
            reader.on(line)
    return [step for _, step in sorted(reader.steps.items())]


COLUMNS = {  # heading -> attribute
    "step": "step_s",
    "wait: sampling": "wait_sampling_s",
    "wait: reward": "wait_reward_s",
    "wait: push": "wait_push_s",
    "update": "update_s",
    "push": "pushed_s",
}


def values(steps: Iterable[Step], attribute: str) -> list[float]:
    return [value for step in steps if (value := getattr(step, attribute)) is not None]


def quantile(numbers: Sequence[float], share: float) -> float:
    """The smallest value that is at least as large as this share of them."""
    return sorted(numbers)[max(0, math.ceil(round(share * len(numbers), 6)) - 1)]


def summary(steps: Sequence[Step]) -> dict[str, dict[str, float]]:
    """Figure -> its median, 90 % quantile, maximum, sum and count; figures without a value are left out."""
    out = {}
    for attribute in COLUMNS.values():
        numbers = values(steps, attribute)
        if numbers:
            out[attribute] = {
                "median": statistics.median(numbers),
                "p90": quantile(numbers, 0.9),
                "max": max(numbers),
                "sum": sum(numbers),
                "n": len(numbers),
            }
    return out


def step_lines(steps: Sequence[Step]) -> list[str]:
    """Quantiles over the steps, then the slowest steps, as lines."""
    if not steps:
        return ["no batch yet"]
    rows: list[tuple[str, ...]] = [(f"{len(steps)} steps, seconds", *COLUMNS, "trained tokens")]
    for name, share in QUANTILES:
        cells = [values(steps, attribute) for attribute in COLUMNS.values()]
        tokens = quantile([step.n_tokens for step in steps], share)
        rows.append((name, *(f"{quantile(cell, share):.3f}" if cell else "-" for cell in cells), f"{tokens:.0f}"))
    for step in sorted(steps, key=lambda step: -(step.step_s or 0.0))[:N_SLOWEST]:
        cells = [getattr(step, attribute) for attribute in COLUMNS.values()]
        shown = ("-" if value is None else f"{value:.3f}" for value in cells)
        rows.append((f"slowest: version {step.version}", *shown, f"{step.n_tokens:.0f}"))
    return terminal.columns(rows, right=frozenset(range(1, len(COLUMNS) + 2)))
