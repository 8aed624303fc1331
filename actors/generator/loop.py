"""The generator's loop: receives messages, swaps weights, runs decode steps, sends trajectories to rewards.

Weights arrive on a thread and are swapped in between two steps. It continues without a head, and offers it its samples.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass

from loguru import logger

from actors.engines.protocol import Engine
from actors.generator.delivery import Delivery
from actors.generator.rollout_runner import Outcome, RolloutRunner
from actors.generator.weight_updates import BrokenPush, ReceivedWeights, WeightUpdates
from actors.runtime.context import journal_pushed
from actors.runtime.head_session import HEAD, ActorRuntime
from areal_bus import messages as m
from areal_bus.core.events import Event
from areal_bus.core.parts.partial_rollouts import SampleOffers
from areal_bus.core.parts.terms import TermHistory
from areal_bus.errors import EngineError, Evicted, EvictedForGood, Restart

IDLE_S = 0.5  # longest wait for a message when there is nothing to decode
SEND_BYTES = 1 << 20  # of trajectories in one send


@dataclass(frozen=True, slots=True)
class LoopRules:
    """Settings of the loop."""

    n_slots: int = 0  # while more samples than this are live, trajectories are sent in groups; 0: never
    report_tokens: int = 0  # after a swap, samples with this many new tokens are reported to the head; 0: none
    drains: bool = False  # a swap waits until the live samples have finished, and no sample starts meanwhile
    holds_versions: bool = False  # a swap waits only where the engine has no room for another version


class Generator:
    """One `turn` takes messages, swaps weights, decodes and sends finished trajectories."""

    def __init__(
        self,
        runtime: ActorRuntime,
        engine: Engine,
        runner: RolloutRunner,
        weight_updates: WeightUpdates,
        delivery: Delivery,
        rules: LoopRules | None = None,
    ) -> None:
        self.stopped: str | None = None  # the reason, once the head has sent Stop
        self._bus, self._session = runtime.bus, runtime.session
        self._journal, self._heartbeat = runtime.journal, runtime.heartbeat
        self._engine, self._runner = engine, runner
        self._weight_updates, self._delivery = weight_updates, delivery
        self._rules = rules or LoopRules()
        self._arrived: ReceivedWeights | None = None  # weights that wait for the swap
        self._terms = TermHistory()
        self._offers = SampleOffers()
        self._weights_are_lost = False  # the weights belong to a lost timeline: no decoding with them
        self._expects_more = False  # more prompts of the same share follow (eta = 0)
        self._is_leaving = False
        self._prefill_s = 0.0  # of the engine, when last counted

    def turn(self) -> None:
        """One iteration; waits for a message when there is nothing to decode."""
        self._engine.check()
        self._take_messages()
        self._take_weights()
        self._handle(self._runner.go_on())
        if self._can_decode:
            self._journal.mark("generate")
            self._handle(self._runner.step())
            self._count_prefill()
        self._journal.mark("bus")
        self._deliver(coalesce=self._is_full)
        self._heartbeat.progress = self._engine.n_tokens
        self._heartbeat.note = self._session.with_silence(self._status())

    def _count_prefill(self) -> None:
        """Count the prefill of this step as a part of `generate`, for an engine that measures it."""
        total_s = float(getattr(self._engine, "prefill_s", 0.0))
        self._journal.count_part("generate", "prefill", total_s - self._prefill_s)
        self._prefill_s = total_s

    def leave(self) -> None:
        """Ask the head to stop leasing prompts to this generator. HeadSession repeats it to a restarted head."""
        if not self._is_leaving:
            self._is_leaving = True
            self._session.send(m.LeaveRequest())

    @property
    def _has_weights(self) -> bool:
        return self._engine.version is not None and not self._weights_are_lost

    @property
    def _can_decode(self) -> bool:
        return self._has_weights and self._engine.n_live > 0 and not self._expects_more

    @property
    def _is_full(self) -> bool:
        """More samples wait than there are slots: a free slot is no news. False while new weights wait."""
        return 0 < self._rules.n_slots < self._runner.n_live and self._can_decode and self._arrived is None

    @property
    def _cause(self) -> str:
        """What an idle generator waits for, as docs/journal.md names it."""
        if not self._has_weights:
            return "weights"
        return "episode" if self._runner.n_live and not self._expects_more else "prompt"

    def _status(self) -> str:
        if not self._has_weights:
            return "waits for weights"
        if self._runner.n_live:
            return f"samples {self._runner.n_live}"
        return f"waits for {self._delivery.n_pending} scores" if self._delivery.n_pending else "waits for a prompt"

    # messages

    def _take_messages(self) -> None:
        """Take all waiting messages; waits for the first one when there is nothing to decode."""
        patience_s = 0.0 if self._can_decode or self._runner.can_go_on else IDLE_S
        while self.stopped is None:
            if patience_s:
                self._journal.mark(f"idle:{self._cause}")
            received = self._bus.receive(patience_s)
            self._journal.mark("bus")
            if received is None:
                return
            if self._session.observe(*received):
                self._rejoin()
            self._on(received[1])
            patience_s = 0.0

    def _on(self, message: m.Message) -> None:
        match message:
            case m.Prompt():
                self._expects_more = message.more
                self._handle(self._runner.begin(message))
            case m.Partial():
                if self._has_weights:
                    self._runner.add_partial(message)
            case m.PushBegin():
                self._begin_term(message.term, message.base)
                self._offer(message.term, message.base)
                if message.term == self._terms.term:
                    self._weight_updates.begin(message)
            case m.Term():
                self._begin_term(message.term, message.version)
                self._offer(message.term, message.version)
            case m.Ack():
                if self._delivery.ack((message.evaluation, message.uid, message.attempt, message.sample)):
                    self._heartbeat.report_progress()
            case m.Cancel():  # never arrives within a share
                self._expects_more = False
                self._drop(message.evaluation, message.uid, message.attempt)
            case m.PeerList():
                self._update_rewards(message)
            case m.Stop():
                self.stopped = message.reason
            case m.Evict():
                raise (EvictedForGood if message.for_good else Evicted)(message.reason)
            case m.Reassign():
                raise Restart(f"the split of ranks has changed: {message.reason}")
            case m.HeadHeartbeat() | m.Rejoin():
                pass  # handled by `HeadSession`; pushes carry the published version, too

    def _begin_term(self, term: int, base: int) -> None:
        """Begin a term: drop groups that have tokens of lost versions. Other groups continue."""
        if not self._terms.begin(term, base):
            return
        self._journal.term = self._runner.term = term
        self._weight_updates.drop()
        self._arrived = None
        self._runner.clear_partials()
        self._expects_more = False
        keeps = self._terms.keeps
        for evaluation, uid, attempt in sorted(self._runner.lost(keeps) | self._delivery.lost(keeps)):
            self._drop(evaluation, uid, attempt)
            error = f"term {term} began at version {base}, before some of its tokens"
            self._bus.send(HEAD, m.SampleFailed(uid, attempt, evaluation, str(m.Refund.LOST_TIMELINE), error))
        if not keeps(self._engine.version):
            self._invalidate_weights()

    def _rejoin(self) -> None:
        """Join a restarted head, which holds no lease of this generator: cancel all samples and offer them to it."""
        logger.warning("{}: the head restarted: joining again, current samples are cancelled", self._bus.name)
        if self._rules.report_tokens:
            begun = self._runner.partials(at_least=1, anew=True)
            self._offers.keep([*self._delivery.as_partials(), *begun], self._terms)
        self._terms = TermHistory()
        self._weight_updates.drop()
        self._arrived = None
        self._expects_more = False
        self._runner.clear_partials()
        self._runner.cancel_all()
        self._delivery.drop_all()
        self._invalidate_weights()
        self._session.resend()

    def _offer(self, term: int, base: int) -> None:
        """Offer unfinished samples to the head of this term, which may lease them again."""
        self._bus.send_all((HEAD, partial) for partial in self._offers.take(term, base))

    def _invalidate_weights(self) -> None:
        """Stop decoding until the next weights are swapped in; requests wait."""
        self._weights_are_lost = True
        self._engine.pause()
        self._heartbeat.version = None

    def _drop(self, evaluation: str, uid: int, attempt: int) -> None:
        self._runner.cancel(evaluation, uid, attempt)
        self._delivery.drop(evaluation, uid, attempt)

    def _update_rewards(self, peers: m.PeerList) -> None:
        new, gone = self._delivery.update_rewards(peers)
        for name in gone:
            self._bus.disconnect(name)
        for name, endpoint in new.items():
            self._bus.connect(name, endpoint)

    # samples

    def _handle(self, outcomes: Iterable[Outcome]) -> None:
        """Queue trajectories for delivery, and report failed samples to the head."""
        for outcome in outcomes:
            if isinstance(outcome, m.Trajectory):
                self._delivery.add(outcome)
            else:
                self._delivery.drop(outcome.evaluation, outcome.uid, outcome.attempt)
                self._bus.send(HEAD, outcome)

    def _deliver(self, *, coalesce: bool) -> None:
        """Send trajectories to rewards. The first send of each is reported to the head (Sampled): a slot is free."""
        now = time.monotonic()
        if coalesce and self._delivery.should_wait(now):
            return
        messages: list[tuple[str, m.Message]] = []
        n_bytes = 0
        for reward, t, is_first in self._delivery.due(now, self._bus.n_waiting):
            messages.append((reward, t))
            n_bytes += (
                len(t.ids) + len(t.logps) + len(t.prompt_text) + len(t.text) + len(t.row) + len(t.turns) + len(t.fields)
            )
            if is_first:
                messages.append((HEAD, m.Sampled(t.uid, t.sample, t.attempt, t.evaluation, n_tokens=len(t.logps) // 4)))
            if n_bytes >= SEND_BYTES:  # the choice of the next reward depends on the send queues
                self._bus.send_all(messages)
                messages, n_bytes = [], 0
        if messages:
            self._bus.send_all(messages)

    # weights

    def _take_weights(self) -> None:
        """Swap in received weights between two decode steps, or report a broken push."""
        outcome = self._weight_updates.take()
        if isinstance(outcome, ReceivedWeights):
            self._arrived = outcome
        elif isinstance(outcome, BrokenPush):
            self._report_broken(outcome.begin, outcome.error)
        if self._arrived is not None and not self._must_drain:
            arrived, self._arrived = self._arrived, None
            self._swap(arrived)

    @property
    def _must_drain(self) -> bool:
        """Live samples must finish with their current weights first."""
        if not self._has_weights or not (self._rules.drains or self._rules.holds_versions):
            return False
        return self._engine.hold() or (self._rules.drains and self._runner.is_midway)

    def _swap(self, received: ReceivedWeights) -> None:
        self._deliver(coalesce=False)  # before the swap, which may recompute the KV cache for a while
        begin, started = received.begin, time.monotonic()
        try:
            with self._journal.span("swap"):
                spare = self._engine.update(begin.version, received.tensors, term=begin.term)
        except EngineError as error:  # the engine is unchanged
            self._report_broken(begin, str(error))
            return
        stall_s = time.monotonic() - started
        self._weight_updates.swapped(received, spare)
        self._weights_are_lost = False
        self._heartbeat.version = begin.version
        done = m.PushDone(
            begin.push,
            begin.version,
            received.digest,
            received.receive_s,
            stall_s,
            received.sent_bytes,
            received.delta_from,
        )
        journal_pushed(self._journal, done)
        self._bus.send(HEAD, done)
        if self._rules.report_tokens:
            partials = self._runner.partials(at_least=self._rules.report_tokens)
            self._bus.send_all((HEAD, partial) for partial in partials)

    def _report_broken(self, begin: m.PushBegin, error: str) -> None:
        self._journal.write(Event.PUSH_BROKEN, push=begin.push, version=begin.version, error=error[:500])
        self._bus.send(HEAD, m.PushBroken(begin.push, begin.version, error))
