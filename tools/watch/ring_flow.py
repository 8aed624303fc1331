"""Counts the prompts at each stage of the ring from the head's journal lines. Pure: lines in, counts out."""

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum

from tools.run import Line, skips_incomplete

EVENTS = (
    *("admit", "batch", "lease", "member", "publish", "ready", "refund", "sampled", "start", "term", "trajectory"),
    "unsampled",
)


class Stage(StrEnum):
    """The stages in the order of the ring."""

    WAITING = "waiting"  # admitted, no generator has it
    GENERATORS = "in generators"
    REWARDS = "in rewards"  # every sample has left its generator
    READY = "ready"  # every sample has its verdict
    TRAINING = "in training"
    TRAINED = "trained"


@dataclass(slots=True)
class _Prompt:
    """A live prompt."""

    holder: str = ""
    attempt: int = -1
    n_left: int = 0  # samples of the lease
    sampled: set[int] = field(default_factory=set)  # of the lease
    is_ready: bool = False

    @property
    def stage(self) -> Stage:
        if self.is_ready:
            return Stage.READY
        if not self.holder:
            return Stage.WAITING
        return Stage.REWARDS if len(self.sampled) >= self.n_left else Stage.GENERATORS


@dataclass(slots=True)
class RingFlow:
    """Takes the head's lines of EVENTS in order; lines of others and broken ones change nothing."""

    _live: dict[int, _Prompt] = field(default_factory=dict)  # by uid
    _batches: dict[int, set[int]] = field(default_factory=dict)  # step -> uids, until published
    _n_trained: dict[int, int] = field(default_factory=dict)  # step -> prompts

    def counts(self) -> dict[Stage, int]:
        found = dict.fromkeys(Stage, 0)
        for prompt in self._live.values():
            found[prompt.stage] += 1
        found[Stage.TRAINING] = sum(len(uids) for uids in self._batches.values())
        found[Stage.TRAINED] = sum(self._n_trained.values())
        return found

    @skips_incomplete
    def take(self, line: Line) -> None:
        """Take one line. A line of another role, or without the fields of its event, is ignored."""
        if line.get("role") != "head":
            return
        event = line["event"]
        if event == "admit":
            self._live[line["uid"]] = _Prompt()
        elif event in ("lease", "sampled", "ready", "unsampled") and line["uid"] in self._live:
            self._on_prompt(self._live[line["uid"]], line)
        elif event == "refund":
            self._live.pop(line["uid"], None)
        elif event == "batch":
            self._batches[int(line["step"])] = set()
        elif event == "trajectory":
            self._live.pop(line["uid"], None)
            self._batches.setdefault(int(line["step"]), set()).add(line["uid"])
        elif event == "publish":
            self._publish(int(line["version"]))
        elif event == "member" and line["state"] in ("dead", "left"):
            self._release([line["name"]])
        elif event == "start":
            self._release({prompt.holder for prompt in self._live.values()})
        elif event == "term":
            self._begin_term(line)

    @staticmethod
    def _on_prompt(prompt: _Prompt, line: Line) -> None:
        if line["event"] == "ready":
            prompt.is_ready = True
        elif line["event"] == "unsampled":
            prompt.holder = ""
        elif line["event"] == "lease":
            prompt.holder, prompt.attempt = str(line["holder"]), int(line["attempt"])
            prompt.n_left, prompt.sampled = int(line["n"]), set()
        elif line["attempt"] == prompt.attempt:
            prompt.sampled.add(int(line["sample"]))

    def _publish(self, version: int) -> None:
        for step in [step for step in self._batches if step < version]:
            self._n_trained[step] = len(self._batches.pop(step))

    def _release(self, holders: Collection[str]) -> None:
        for prompt in self._live.values():
            if prompt.holder in holders:
                prompt.holder = ""

    def _begin_term(self, line: Line) -> None:
        """The ledger is that of the `term` line; a prompt keeps its lease if the line left it open."""
        version = int(line["version"])
        n_kept = {uid: len(kept) for uid, kept in zip(line["open"], line["kept"], strict=True)}
        before = self._live
        self._live = {uid: before.get(uid, _Prompt()) for uid in line["open"]}
        for uid, prompt in self._live.items():
            came_back = uid not in before  # from a batch that is undone: all its verdicts are kept
            prompt.is_ready = n_kept[uid] > 0 and (came_back or prompt.is_ready)
        self._publish(version)
        self._batches = {}
        self._n_trained = {step: n for step, n in self._n_trained.items() if step < version}
