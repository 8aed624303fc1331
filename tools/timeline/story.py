"""The head's lines as one story, in one pass: batches, pushes, counters, trajectories. Seconds of its clock."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from tools.run import Line

Key = tuple[int, int, int]  # uid, sample, attempt
Part = tuple[int, int]  # pid, tid


@dataclass(slots=True)
class BatchStory:
    """One batch: taken, trained, published."""

    version: int  # that its update makes
    taken: float
    updated: float | None = None
    push: "PushStory | None" = None


@dataclass(slots=True)
class PushStory:
    """One push."""

    number: int
    version: int
    began: float
    ended: float | None = None  # published
    is_catch_up: bool = False


@dataclass(slots=True)
class TrajectoryStory:
    """One sample that was scored."""

    admitted: float
    scored: float
    batch: BatchStory | None = None


@dataclass(slots=True)
class Story:
    """What the head decided, in order."""

    began: float | None = None
    ended: float = 0.0
    admits: list[tuple[float, int]] = field(default_factory=list)
    batches: list[BatchStory] = field(default_factory=list)
    pushes: list[PushStory] = field(default_factory=list)
    trajectories: dict[Key, TrajectoryStory] = field(default_factory=dict)
    counters: list[tuple[str, float, float]] = field(default_factory=list)  # name, time, value
    instants: list[tuple[str, float, Line]] = field(default_factory=list)
    _admitted: dict[int, float] = field(default_factory=dict)
    _ready: set[int] = field(default_factory=set)
    _by_version: dict[int, BatchStory] = field(default_factory=dict)

    EVENTS = (
        *("admit", "scored", "ready", "batch", "trajectory", "update", "push", "publish", "refund"),
        *("member", "stall", "push_broken", "term", "failed", "evaluation", "joined"),
    )

    def read(self, lines: Iterable[Line], offset: float) -> None:
        """Take the lines of one start of the head."""
        for line in lines:
            at = line["t"] + offset
            self.began = at if self.began is None else self.began
            self.ended = max(self.ended, at)
            take = getattr(self, f"_on_{line['event']}", None)
            if take is not None:
                take(line, at)

    def _on_admit(self, line: Line, at: float) -> None:
        self._admitted[line["uid"]] = at
        self.admits.append((at, line["uid"]))
        self.counters += [("live prompts", at, line["live"]), ("in training", at, line["in_training"])]

    def _on_scored(self, line: Line, at: float) -> None:
        if not line.get("evaluation"):
            key = (line["uid"], line["sample"], line["attempt"])
            self.trajectories[key] = TrajectoryStory(self._admitted.get(line["uid"], at), at)

    def _on_ready(self, line: Line, at: float) -> None:
        self._ready.add(line["uid"])
        self._count_ready(at)

    def _count_ready(self, at: float, less: int = 0) -> None:
        self.counters.append(("ready groups", at, len(self._ready) - less))

    def _on_batch(self, line: Line, at: float) -> None:
        self.batches.append(BatchStory(line["clock"] + 1, at))
        self._by_version[line["clock"] + 1] = self.batches[-1]
        self._count_ready(at, less=line["n_groups"])

    def _on_trajectory(self, line: Line, _: float) -> None:
        self._ready.discard(line["uid"])
        known = self.trajectories.get((line["uid"], line["sample"], line["attempt"]))
        if known is not None and self.batches:
            known.batch = self.batches[-1]

    def _on_update(self, line: Line, at: float) -> None:
        if line["version"] in self._by_version:
            self._by_version[line["version"]].updated = at
        for name in ("lag_mean", "lag_max"):
            if name in line:
                self.counters.append((f"lag ({name.removeprefix('lag_')})", at, line[name]))

    def _on_push(self, line: Line, at: float) -> None:
        push = PushStory(line["push"], line["version"], at, is_catch_up=line["catch_up"])
        self.pushes.append(push)
        batch = self._by_version.get(line["version"])
        if batch is not None and not push.is_catch_up:
            batch.push = push

    def _on_publish(self, line: Line, at: float) -> None:
        for push in reversed(self.pushes[-8:]):
            if push.version == line["version"] and push.ended is None and not push.is_catch_up:
                push.ended = at
                return

    def _on_refund(self, line: Line, at: float) -> None:
        if line["uid"] in self._ready:
            self._ready.discard(line["uid"])
            self._count_ready(at)
        self.instants.append((f"refund: {line['reason']}", at, {"uid": line["uid"], "error": line.get("error", "")}))

    def _on_member(self, line: Line, at: float) -> None:
        if line["state"] in ("dead", "left"):
            self.instants.append((f"{line['state']}: {line['name']}", at, {"why": line["why"]}))

    def _on_joined(self, line: Line, at: float) -> None:
        self.instants.append((f"joined: {line['name']}", at, {"host": line["host"]}))

    def _on_term(self, line: Line, at: float) -> None:
        self._ready.clear()
        self._count_ready(at)
        self.instants.append((f"term {line.get('term', '')}: version {line['version']}", at, {}))

    def _on_stall(self, line: Line, at: float) -> None:
        self.instants.append((f"stall: {line['action']}", at, {"verdict": line["verdict"]}))

    def _on_push_broken(self, line: Line, at: float) -> None:
        self.instants.append((f"push broken: {line.get('name', '')}", at, {"error": line["error"]}))

    def _on_failed(self, line: Line, at: float) -> None:
        self.instants.append((f"failed: {line.get('name', 'head')}", at, {"error": line["error"]}))

    def _on_evaluation(self, line: Line, at: float) -> None:
        self.instants.append((f"evaluation {line['name']}", at, {"accuracy": line.get("accuracy")}))
