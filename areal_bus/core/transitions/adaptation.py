"""Feeds the planner of the split with what the head records, and asks it after an update. Pure: no I/O.

Another split of ranks is only wanted here: `split_changes.py` brings it about.
"""

from collections.abc import Callable, Mapping
from typing import Any

from areal_bus.core.effects import Effects
from areal_bus.core.events import Event
from areal_bus.core.planner.ring_observer import RingObserver
from areal_bus.core.planner.split_planner import SplitPlanner
from areal_bus.core.state import HeadState

Fields = Mapping[str, Any]  # of a journal line


class Adaptation:
    """The head sets `now` before it handles an event. A restarted head starts measuring from zero."""

    def __init__(self, state: HeadState, effects: Effects) -> None:
        """Raises ValueError for a head whose rules have no planner."""
        rules = state.rules
        if rules.planner is None:
            raise ValueError("an adaptation needs the rules of a planner")
        self.state, self.effects, self.now = state, effects, 0.0
        self.observer = RingObserver(batch_size=rules.batch_size, n_samples=rules.n_samples, slots=rules.planner.slots)
        self.planner = SplitPlanner(rules.planner, last_change=state.split.since)
        self._n_tokens = 0  # of the batch that is in training
        self._updated_s: float | None = None  # when the last update was finished
        self._changing_since: float | None = None  # the last update before a change of the split that is not over
        self._handlers: dict[Event, Callable[[Fields], None]] = {
            Event.LEASE: self._on_lease,
            Event.SAMPLED: self._on_sampled,
            Event.READY: lambda line: self.observer.ready(line["uid"], self.now),
            Event.REFUND: lambda line: self.observer.released(line["uid"], self.now),
            Event.BATCH: self._on_batch,
            Event.TRAJECTORY: self._on_trajectory,
            Event.UPDATE: self._on_update,
            Event.PUBLISH: lambda line: self.observer.published(line["version"], self.now),
            Event.TERM: lambda line: self.observer.interrupted(line["open"], self.now),
            Event.SPLIT: self._on_split,
        }
        effects.on_record = self._see

    def wanted_learners(self, version: int) -> int | None:
        """Learner ranks that the planner wants after this update; None: those that there are."""
        decision = self.planner.decide(version, self.observer.figures, self.state.split.learners)
        if decision.learners is not None:
            predicted = {str(n): round(speed, 6) for n, speed in decision.predicted.items()}
            self.effects.record(Event.ADAPT, version=version, wanted_learners=decision.learners, predicted=predicted)
        return decision.learners

    # events

    def _see(self, event: Event, line: Fields) -> None:
        handler = self._handlers.get(event)
        if handler is not None:
            handler(line)

    def _on_lease(self, line: Fields) -> None:
        self.observer.leased(line["uid"], line["holder"], line["n"], self.now)

    def _on_sampled(self, line: Fields) -> None:
        if not line.get("evaluation"):
            self.observer.sampled(line["uid"], line["n_tokens"], self.now)

    def _on_batch(self, line: Fields) -> None:
        self._n_tokens = 0
        self.observer.taken(self.state.split.learners, self.now)
        if self._changing_since is not None:
            self.planner.changed(line["step"], self.now - self._changing_since)
            self._changing_since = None

    def _on_trajectory(self, line: Fields) -> None:
        self._n_tokens += line["n_tokens"]

    def _on_update(self, line: Fields) -> None:
        version, split = line["version"], self.state.split
        self._updated_s = self.now
        self.observer.n_samples = self.state.rules.samples_at(version)
        self.observer.updated(version, self._n_tokens, self.now)
        self.planner.measured(version, self.observer.figures, split.learners, self.observer.interval_s)

    def _on_split(self, line: Fields) -> None:
        if line["why"] == "change":
            self._changing_since = self._updated_s if self._updated_s is not None else self.now
