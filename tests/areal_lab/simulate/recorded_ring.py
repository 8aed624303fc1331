"""A ring of the planner that writes the journal of a real ring, so that a calibration can be held against the truth."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_bus.config.sections import Config
from areal_lab.simulate.cores import of_share
from areal_lab.simulate.generator import CompletedSample, PlannedGenerator, PlannedSample
from areal_lab.simulate.ring import RingModel
from areal_lab.simulate.schedule import Schedule

LABELS = {
    "generator": ("s_generate", "s_idle"),
    "learner": ("s_backward", "s_wait_batch"),
    "head": ("s_decide", "s_wait"),
    "reward": ("s_score", "s_idle"),
}  # role -> (busy, idle)


@dataclass(slots=True)
class ActorTime:
    """One actor since its last spans line. `wants` cores while it is busy, at a share of its speed."""

    is_busy: bool = False
    speed: float = 1.0
    wants: float = 1.0
    seconds: Counter[str] = field(default_factory=Counter)


class RecordedRing(RingModel):
    """Head and rewards are one process here."""

    def __init__(self, schedule: Schedule, *, seed: int = 0) -> None:
        super().__init__(schedule, seed=seed)
        self.lines: dict[str, list[dict[str, Any]]] = {}
        names = [*(f"generator-{g.index}" for g in self.generators), "learner-0", "head-0", "reward-0"]
        self._actors = {name: ActorTime() for name in names}
        self._last = self._flushed = 0.0
        self._index: dict[int, int] = {}  # id of a sample -> its place in its group
        self._leased: list[PlannedSample] = []  # keeps their ids unique
        self._n_scored = Counter[int]()
        for name in names:
            self._add(name, "start", host="here", cores=2)
        for generator in self.generators:
            self._watch(generator)

    def write(self, folder: Path, config: Config) -> Path:
        """A run's folder."""
        (folder / "journal").mkdir(parents=True)
        for name, lines in self.lines.items():
            text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
            (folder / "journal" / f"{name}.0.jsonl").write_text(text)
        (folder / "config.json").write_text(config.model_dump_json())
        return folder

    def _add(self, name: str, event: str, **fields: Any) -> None:
        self.lines.setdefault(name, []).append({"event": event, "t": self.now, "wall": self.now, **fields})

    def _watch(self, generator: PlannedGenerator) -> None:
        """Write a line for each sample that a generator gets and completes."""
        name, lease, collect = f"generator-{generator.index}", generator.lease, generator.collect

        def leased(samples: list[PlannedSample]) -> None:
            for index, sample in enumerate(samples):
                self._leased.append(sample)
                self._index[id(sample)] = index
                self._add(name, "request", uid=sample.uid, sample=index, attempt=0)
            lease(samples)

        def collected() -> list[CompletedSample]:
            ended = collect()
            for one in ended:
                ids = {"uid": one.sample.uid, "sample": self._index[id(one.sample)], "attempt": 0}
                self._add(name, "completion", **ids, n_tokens=one.sample.length, finish="stop")
            return ended

        generator.lease, generator.collect = leased, collected  # type: ignore[method-assign]

    def _count_score(self, uid: int) -> bool:
        self._add("head-0", "scored", uid=uid, sample=self._n_scored[uid], attempt=0)
        self._n_scored[uid] += 1
        return super()._count_score(uid)

    def _take(self) -> None:
        before = self.gate.w
        super()._take()
        if self.gate.w > before:
            n_groups = self.schedule.batch_size
            self._add(
                "head-0", "batch", step=before, n_groups=n_groups, n_trajectories=n_groups * self.schedule.n_samples
            )

    def _finish_update(self) -> None:
        super()._finish_update()
        batch = self.batches[-1]
        trained = batch.n_tokens - batch.n_masked
        lag = {"n_tokens_trained": trained, "lag_mean": batch.n_lag / max(1, trained)}
        self._add("head-0", "update", version=self.gate.u, n_tokens=batch.n_tokens, **lag)

    def _receive_weights(self) -> set[PlannedGenerator]:
        for generator in self.generators:
            self._add(f"generator-{generator.index}", "pushed", version=self._pushing, stall_s=0.0)
        return super()._receive_weights()

    def _apply_transitions(self, touched: set[PlannedGenerator]) -> None:
        self._pass_time()
        published, pushing = self.gate.v, self._pushing
        if pushing is None and published:
            self._add("head-0", "publish", version=published)
        super()._apply_transitions(touched)
        if self._pushing != pushing:
            self._add("head-0", "push", version=self._pushing)
        self._note_speeds()

    def _note_speeds(self) -> None:
        cores = self.schedule.cores
        assert cores is not None
        busy = {f"generator-{g.index}": g.is_busy for g in self.generators}
        busy |= {"learner-0": self._training is not None, "head-0": self._background_event >= 0, "reward-0": False}
        wants = {name: {"generator": cores.generator, "learner": cores.learner}.get(name[:-2], 1.0) for name in busy}
        share = cores.share([wants[name] for name, is_busy in busy.items() if is_busy])
        for name, actor in self._actors.items():
            actor.is_busy, actor.wants, actor.speed = busy[name], wants[name], of_share(share, wants[name])

    def _pass_time(self) -> None:
        """Count the time since the last event; a spans line a second."""
        lasted, self._last = self.now - self._last, self.now
        for name, actor in self._actors.items():
            busy, idle = LABELS[name[:-2]]
            actor.seconds[busy if actor.is_busy else idle] += lasted
            if actor.is_busy:
                actor.seconds["cpu_wait_s"] += lasted * (1 - actor.speed)
                actor.seconds["cpu_s"] += lasted * actor.speed * actor.wants
        if self.now - self._flushed >= 1.0:
            self._flushed = self.now
            for name, actor in self._actors.items():
                self._add(name, "spans", **{"cpu_s": 0.0, "cpu_wait_s": 0.0} | actor.seconds)
                actor.seconds.clear()
