"""Feeds the planner with what the head records, and carries out its decisions between two updates. Pure: no I/O.

Eta changes at once, through the gate; the slots in force, through the scheduler. Another split of ranks is only wanted
here: `split_changes.py` brings it about.
"""

from collections.abc import Callable, Mapping
from typing import Any

from areal_bus.core.effects import Effects
from areal_bus.core.events import Event
from areal_bus.core.planner.ring_model import RingFigures
from areal_bus.core.planner.ring_observer import RingObserver
from areal_bus.core.planner.split_planner import OperatingPoint, SplitPlanner
from areal_bus.core.state import HeadState

Fields = Mapping[str, Any]  # of a journal line


class Adaptation:
    """The head sets `now` before it handles an event. A restarted head measures anew."""

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
        figures, learners = self.observer.figures, self.state.split.learners
        prediction = self.planner.decide(version, figures, learners)
        if prediction is None:
            return None
        found = self.planner.predictions(figures, learners) if figures is not None else []
        by_learners = {str(each.learners): round(each.updates_per_s, 6) for each in found}
        self.effects.record(Event.ADAPT, version=version, wanted_learners=prediction.learners, predicted=by_learners)
        return prediction.learners

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
        is_next_ready = len(self.state.ledger.ready) >= self.state.rules.batch_size
        self.observer.updated(version, self._n_tokens, self.now, is_next_ready=is_next_ready)
        figures = self.observer.figures
        self.planner.measured(version, figures, split.learners, self.observer.interval_s)
        self._choose_eta(version, figures)
        self._choose_slots(version, figures)

    def _choose_eta(self, version: int, figures: RingFigures | None) -> None:
        gate = self.state.gate
        before, eta = gate.eta_in_force, self.planner.choose_eta(version, figures, self._operating_point)
        if eta != before:
            gate.set_eta(eta)
            self.effects.record(Event.ADAPT, version=version, eta=eta, before=before)
            text = f"eta {before} becomes {eta} at version {version}: the smallest with nearly the best throughput"
            self.effects.progress("note", name="head", text=text)

    def _choose_slots(self, version: int, figures: RingFigures | None) -> None:
        before = self.state.slots
        slots = self.planner.choose_slots(version, figures, self._operating_point)
        if before is not None and slots != before:
            self.state.slots = slots
            self.effects.record(Event.ADAPT, version=version, slots=slots, before=before)
            text = f"slots {before} become {slots} at version {version}: the fewest with nearly the best throughput"
            self.effects.progress("note", name="head", text=text)

    @property
    def _operating_point(self) -> OperatingPoint:
        split, slots = self.state.split, self.state.slots
        if slots is None:
            slots = self.planner.rules.slots
        eta, waits = self.state.gate.eta_in_force, self.observer.wait_share
        return OperatingPoint(split.learners, split.generators, eta, slots, waits)

    def _on_split(self, line: Fields) -> None:
        if line["why"] == "change":
            self._changing_since = self._updated_s if self._updated_s is not None else self.now
