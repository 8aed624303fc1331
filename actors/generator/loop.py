"""The generator's loop: between the bus and the engine; knows no model, no learner and no reward's verdict.

It keeps each trajectory until the head has its scored form. New weights arrive in a side thread while it decodes, and
are swapped in between two decode steps. At a new term it ends what lost weights made; while the head is silent it goes
on with what it has, and offers that to the next one.
"""

import time
from collections.abc import Iterable

from loguru import logger

from actors.engines.protocol import Engine
from actors.generator.delivery import Delivery
from actors.generator.rollout_runner import Outcome, RolloutRunner
from actors.generator.weight_updates import BrokenPush, ReceivedWeights, WeightUpdates
from actors.runtime.context import HeartbeatState
from actors.runtime.head_session import HEAD, HeadSession
from areal_bus.core.events import Event
from areal_bus.core.partial_rollouts import SampleOffers
from areal_bus.core.terms import TermHistory
from areal_bus.errors import EngineError, Evicted
from areal_bus.journal import Journal
from areal_bus.messages import (
    Ack,
    Cancel,
    Evict,
    HeadHeartbeat,
    LeaveRequest,
    Message,
    Partial,
    PeerList,
    Prompt,
    PushBegin,
    PushBroken,
    PushDone,
    Refund,
    Rejoin,
    Sampled,
    SampleFailed,
    Stop,
    Term,
    Trajectory,
)
from areal_bus.transport.bus import Bus

IDLE_S = 0.5  # longest wait for a message when there is nothing to decode
TOGETHER_BYTES = 1 << 20  # of trajectories sent at once


class Generator:
    """A turn takes messages in, swaps weights, decodes and sends what is done."""

    def __init__(
        self,
        bus: Bus,
        presence: HeadSession,
        engine: Engine,
        sampling: RolloutRunner,
        receiving: WeightUpdates,
        delivery: Delivery,
        journal: Journal,
        pulse: HeartbeatState,
        *,
        n_slots: int = 0,
        report_tokens: int = 0,
        drains: bool = False,
    ) -> None:
        """Trajectories wait for others to go along while more than `n_slots` samples are under way (0: never).

        At new weights the head hears of samples with `report_tokens` new tokens (0: of none). `drains`: they wait
        until the samples under way have ended, and no other is begun meanwhile.
        """
        self.stopped: str | None = None  # why, once the head has said so
        self._bus, self._presence, self._engine, self._sampling = bus, presence, engine, sampling
        self._receiving, self._delivery = receiving, delivery
        self._journal, self._pulse = journal, pulse
        self._n_slots, self._report_tokens, self._drains = n_slots, report_tokens, drains
        self._arrived: ReceivedWeights | None = None  # weights that wait for the samples under way
        self._timeline = TermHistory()
        self._offers = SampleOffers()
        self._holds_void = False  # weights of a lost timeline: nothing is decoded with them
        self._awaits_more = False  # a share is not here as a whole (eta = 0)
        self._is_leaving = False

    def turn(self) -> None:
        """One round; waits for a message when there is nothing to decode."""
        self._engine.check()
        self._take_messages()
        self._take_weights()
        self._settle(self._sampling.go_on())
        if self._can_decode:
            self._journal.mark("generate")
            self._settle(self._sampling.step())
        self._journal.mark("bus")
        self._deliver(gathers=self._is_full)
        self._pulse.progress = self._engine.n_tokens
        self._pulse.note = self._presence.remark(self._say())

    def leave(self) -> None:
        """No further work is wanted; said once, and again to every new head."""
        if not self._is_leaving:
            self._is_leaving = True
            self._presence.say(LeaveRequest())

    @property
    def _has_weights(self) -> bool:
        return self._engine.version is not None and not self._holds_void

    @property
    def _can_decode(self) -> bool:
        return self._has_weights and self._engine.n_live > 0 and not self._awaits_more

    @property
    def _is_full(self) -> bool:
        """More samples are here than there are slots: the head need not hear at once that one is free.

        Not so while weights wait for the samples under way.
        """
        return 0 < self._n_slots < self._sampling.n_live and self._can_decode and self._arrived is None

    def _say(self) -> str:
        if not self._has_weights:
            return "waits for weights"
        if self._sampling.n_live:
            return f"samples {self._sampling.n_live}"
        return f"waits for {self._delivery.n_kept} scores" if self._delivery.n_kept else "waits for a prompt"

    # messages

    def _take_messages(self) -> None:
        """All that is there; waits for the first one when there is nothing else to do."""
        patience_s = 0.0 if self._can_decode else IDLE_S
        while self.stopped is None:
            if patience_s:
                self._journal.mark("idle")
            received = self._bus.receive(patience_s)
            self._journal.mark("bus")
            if received is None:
                return
            if self._presence.heard(*received):
                self._rejoin()
            self._on(received[1])
            patience_s = 0.0

    def _on(self, message: Message) -> None:
        match message:
            case Prompt():
                self._awaits_more = message.more
                self._settle(self._sampling.begin(message))
            case Partial():
                if self._has_weights:
                    self._sampling.go_on_from(message)
            case PushBegin():
                self._begin_term(message.term, message.base)
                self._offer(message.term, message.base)
                if message.term == self._timeline.term:
                    self._receiving.begin(message)
            case Term():
                self._begin_term(message.term, message.version)
                self._offer(message.term, message.version)
            case Ack():
                self._delivery.ack((message.evaluation, message.uid, message.attempt, message.sample))
            case Cancel():  # never comes within a share
                self._awaits_more = False
                self._drop(message.evaluation, message.uid, message.attempt)
            case PeerList():
                self._follow(message)
            case Stop():
                self.stopped = message.reason
            case Evict():
                raise Evicted(message.reason)
            case HeadHeartbeat() | Rejoin():
                pass  # `HeadSession` has heard them; what is published is told by pushes, too

    def _begin_term(self, term: int, base: int) -> None:
        """What later versions of older terms made ends here, whole groups of it; the rest goes on."""
        if not self._timeline.begin(term, base):
            return
        self._journal.term = self._sampling.term = term
        self._receiving.drop()
        self._arrived = None
        self._sampling.forget_begun()
        self._awaits_more = False
        keeps = self._timeline.keeps
        for evaluation, uid, attempt in sorted(self._sampling.lost(keeps) | self._delivery.lost(keeps)):
            self._drop(evaluation, uid, attempt)
            error = f"term {term} began at version {base}, before some of its tokens"
            self._bus.send(HEAD, SampleFailed(uid, attempt, evaluation, str(Refund.LOST_TIMELINE), error))
        if not keeps(self._engine.version):
            self._put_weights_away()

    def _rejoin(self) -> None:
        """A new head, which leased nothing to us: what is here ends, and is offered to it as work begun."""
        logger.warning("{}: a new head: joins it, the work of before ends", self._bus.name)
        if self._report_tokens:
            begun = self._sampling.partials(at_least=1, anew=True)
            self._offers.keep([*self._delivery.unfinished(), *begun], self._timeline)
        self._timeline = TermHistory()
        self._receiving.drop()
        self._arrived = None
        self._awaits_more = False
        self._sampling.forget_begun()
        self._sampling.cancel_all()
        self._delivery.forget_all()
        self._put_weights_away()
        self._presence.say_again()

    def _offer(self, term: int, base: int) -> None:
        """To the head of this term: what it may lease to somebody who goes on from there."""
        self._bus.send_all((HEAD, partial) for partial in self._offers.take(term, base))

    def _put_weights_away(self) -> None:
        """Nothing is decoded before the next ones are swapped in; requests wait for them."""
        self._holds_void = True
        self._engine.pause()
        self._pulse.version = None

    def _drop(self, evaluation: str, uid: int, attempt: int) -> None:
        """Nothing of this group is wanted any more."""
        self._sampling.cancel(evaluation, uid, attempt)
        self._delivery.forget(evaluation, uid, attempt)

    def _follow(self, directory: PeerList) -> None:
        new, gone = self._delivery.directory(directory)
        for name in gone:
            self._bus.disconnect(name)
        for name, endpoint in new.items():
            self._bus.connect(name, endpoint)

    # samples

    def _settle(self, outcomes: Iterable[Outcome]) -> None:
        """Keep what was sampled, and report what cannot be."""
        for outcome in outcomes:
            if isinstance(outcome, Trajectory):
                self._delivery.add(outcome)
            else:
                self._delivery.forget(outcome.evaluation, outcome.uid, outcome.attempt)
                self._bus.send(HEAD, outcome)

    def _deliver(self, *, gathers: bool) -> None:
        """Trajectories to rewards; the head hears when one leaves for the first time: its slot is free."""
        now = time.monotonic()
        if gathers and self._delivery.gathers(now):
            return
        letters: list[tuple[str, Message]] = []
        n_bytes = 0
        for reward, t, is_first in self._delivery.due(now, self._bus.n_waiting):
            letters.append((reward, t))
            n_bytes += len(t.ids) + len(t.logps) + len(t.prompt_text) + len(t.text) + len(t.row) + len(t.turns)
            if is_first:
                letters.append((HEAD, Sampled(t.uid, t.sample, t.attempt, t.evaluation, n_tokens=len(t.logps) // 4)))
            if n_bytes >= TOGETHER_BYTES:  # what is due next depends on what waits
                self._bus.send_all(letters)
                letters, n_bytes = [], 0
        if letters:
            self._bus.send_all(letters)

    # weights

    def _take_weights(self) -> None:
        """Swap in what has arrived, between two decode steps, or report what did not."""
        outcome = self._receiving.take()
        if isinstance(outcome, ReceivedWeights):
            self._arrived = outcome
        elif isinstance(outcome, BrokenPush):
            self._report_broken(outcome.begin, outcome.error)
        if self._arrived is not None and not self._must_drain:
            arrived, self._arrived = self._arrived, None
            self._swap(arrived)

    @property
    def _must_drain(self) -> bool:
        """Samples are under way that end with the weights they have."""
        return self._drains and self._has_weights and (self._engine.hold() or self._sampling.is_midway)

    def _swap(self, received: ReceivedWeights) -> None:
        self._deliver(gathers=False)  # computing keys anew takes a while
        begin, started = received.begin, time.monotonic()
        try:
            with self._journal.span("swap"):
                self._receiving.spare = self._engine.update(begin.version, received.tensors, term=begin.term)
        except EngineError as error:  # it has changed nothing
            self._report_broken(begin, str(error))
            return
        stall_s = time.monotonic() - started
        self._holds_void = False
        self._pulse.version = begin.version
        self._journal.write(
            Event.PUSHED,
            push=begin.push,
            version=begin.version,
            digest=received.digest,
            receive_s=round(received.receive_s, 6),
            stall_s=round(stall_s, 6),
        )
        self._bus.send(HEAD, PushDone(begin.push, begin.version, received.digest, received.receive_s, stall_s))
        if self._report_tokens:
            partials = self._sampling.partials(at_least=self._report_tokens)
            self._bus.send_all((HEAD, partial) for partial in partials)

    def _report_broken(self, begin: PushBegin, error: str) -> None:
        self._journal.write(Event.PUSH_BROKEN, push=begin.push, version=begin.version, error=error[:500])
        self._bus.send(HEAD, PushBroken(begin.push, begin.version, error))
