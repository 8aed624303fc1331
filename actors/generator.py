"""The generator actor: consumes prompts, versions and weights; waits for a prompt or a free slot; unblocked by the head
(gate open); produces trajectories.

It keeps each trajectory until the head has its scored form. New weights arrive in a side thread while it decodes, and
are swapped in between two decode steps.
"""

import os
import socket
import time
from collections.abc import Iterable
from typing import Any

from actors.context import Context, Pulse, open_bus
from actors.delivery import Delivery
from actors.engines.builtin import BuiltinEngine
from actors.engines.protocol import Engine
from actors.models.loading import empty_model, load_tokenizer, stop_ids
from actors.receiving import Broken, Received, Receiving
from actors.sampling import Outcome, Sampling
from actors.workflows.loading import load_workflow
from areal_bus.bus import Bus
from areal_bus.config import Config
from areal_bus.journal import Event, Journal
from areal_bus.messages import (
    Ack,
    Cancel,
    Directory,
    Failure,
    HeadBeat,
    Join,
    Message,
    Prompt,
    PushBegin,
    PushBroken,
    PushDone,
    Ready,
    Sampled,
    Stop,
    Trajectory,
)
from areal_bus.weights import Member, forms_of

IDLE_S = 0.5  # longest wait for a message when there is nothing to decode
HEAD = "head"


def run(context: Context) -> None:
    """Sample until the head says Stop. Raises ConfigError when model, tokenizer or workflow do not load."""
    config = context.config()
    journal = context.journal(config)
    pulse = Pulse()
    bus = open_bus(context, config, pulse)
    try:
        bus.send(HEAD, join(context))
        reason = sample_until_stop(context, config, journal, pulse, bus)
    except Exception as error:
        journal.write(Event.FAILED, error=f"{type(error).__name__}: {error}")
        bus.send(HEAD, Failure(error=f"{type(error).__name__}: {error}"))
        raise
    else:
        journal.close(reason=reason)
    finally:
        bus.close()


def sample_until_stop(context: Context, config: Config, journal: Journal, pulse: Pulse, bus: Bus) -> str:
    """Load, say Ready, and turn until Stop: its reason."""
    journal.mark("load")
    pulse.note = f"loads {context.model_folder}"
    tokenizer = load_tokenizer(context.model_folder)
    workflow = load_workflow(config)
    engine = make_engine(context, config, tokenizer)
    sampling = Sampling(engine, workflow, tokenizer, config, name=context.name, journal=journal)
    member = Member(
        context.name,
        address=context.address,
        interface=context.interface,
        device=context.device,
        staging=config.weights.staging,
    )
    receiving = Receiving(member, forms_of(engine.parameters()), bus.wake)
    generator = Generator(bus, engine, sampling, receiving, Delivery(config.bus.resend_s), journal, pulse)
    bus.send(HEAD, Ready(capacity=config.rollout.max_concurrent_rollouts))
    try:
        while generator.stopped is None:
            generator.turn()
    finally:
        receiving.close()
    return generator.stopped


def make_engine(context: Context, config: Config, tokenizer: Any) -> BuiltinEngine:
    """The builtin engine without weights: all of them come by push."""
    model = empty_model(context.model_folder, config.model.dtype, context.device)
    return BuiltinEngine(
        model,
        stop_ids=stop_ids(model, tokenizer),
        n_slots=config.rollout.max_concurrent_rollouts,
        on_update=config.rollout.on_update,
    )


def join(context: Context) -> Join:
    return Join(
        name=context.name,
        role=context.role,
        index=context.index,
        incarnation=context.incarnation,
        endpoint="",
        pid=os.getpid(),
        host=socket.gethostname(),
    )


class Generator:
    """Between the bus and the engine: a turn takes messages in, swaps weights, decodes and sends what is done."""

    def __init__(
        self,
        bus: Bus,
        engine: Engine,
        sampling: Sampling,
        receiving: Receiving,
        delivery: Delivery,
        journal: Journal,
        pulse: Pulse,
    ) -> None:
        self.stopped: str | None = None  # why, once the head has said so
        self._bus, self._engine, self._sampling = bus, engine, sampling
        self._receiving, self._delivery = receiving, delivery
        self._journal, self._pulse = journal, pulse
        self._awaits_more = False  # a share is not here as a whole (eta = 0)

    def turn(self) -> None:
        """One round; waits for a message when there is nothing to decode."""
        self._take_messages()
        self._take_weights()
        if self._can_decode:
            self._journal.mark("generate")
            self._settle(self._sampling.step())
        self._journal.mark("bus")
        self._deliver()
        self._pulse.progress = self._engine.n_tokens
        self._pulse.note = self._say()

    @property
    def _can_decode(self) -> bool:
        return self._engine.version is not None and self._engine.n_live > 0 and not self._awaits_more

    def _say(self) -> str:
        if self._engine.version is None:
            return "waits for weights"
        if self._sampling.n_live:
            return f"samples {self._sampling.n_live}"
        return f"waits for {self._delivery.n_kept} scores" if self._delivery.n_kept else "waits for a prompt"

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
            self._on(received[1])
            patience_s = 0.0

    def _on(self, message: Message) -> None:
        match message:
            case Prompt():
                self._awaits_more = message.more
                self._settle(self._sampling.begin(message))
            case PushBegin():
                self._receiving.begin(message)
            case Ack():
                self._delivery.ack((message.evaluation, message.uid, message.attempt, message.sample))
            case Cancel():  # never comes within a share
                self._awaits_more = False
                self._sampling.cancel("", message.uid, message.attempt)
                self._delivery.forget("", message.uid, message.attempt)
            case Directory():
                self._follow(message)
            case Stop():
                self.stopped = message.reason
            case HeadBeat():
                pass  # what is published is told by pushes, too

    def _settle(self, outcomes: Iterable[Outcome]) -> None:
        """Keep what was sampled, and report what cannot be."""
        for outcome in outcomes:
            if isinstance(outcome, Trajectory):
                self._delivery.add(outcome)
            else:
                self._delivery.forget(outcome.evaluation, outcome.uid, outcome.attempt)
                self._bus.send(HEAD, outcome)

    def _follow(self, directory: Directory) -> None:
        new, gone = self._delivery.directory(directory)
        for name in gone:
            self._bus.disconnect(name)
        for name, endpoint in new.items():
            self._bus.connect(name, endpoint)

    def _deliver(self) -> None:
        """Trajectories to rewards; the head hears when one leaves for the first time: its slot is free."""
        for reward, t, is_first in self._delivery.due(time.monotonic()):
            self._bus.send(reward, t)
            if is_first:
                self._bus.send(HEAD, Sampled(t.uid, t.sample, t.attempt, t.evaluation, n_tokens=len(t.logps) // 4))

    def _take_weights(self) -> None:
        """Swap in what has arrived, between two decode steps."""
        outcome = self._receiving.take()
        if isinstance(outcome, Received):
            self._swap(outcome)
        elif isinstance(outcome, Broken):
            begin = outcome.begin
            self._journal.write(Event.PUSH_BROKEN, push=begin.push, version=begin.version, error=outcome.error[:500])
            self._bus.send(HEAD, PushBroken(begin.push, begin.version, outcome.error))

    def _swap(self, received: Received) -> None:
        begin, started = received.begin, time.monotonic()
        with self._journal.span("swap"):
            self._receiving.spare = self._engine.update(begin.version, received.tensors)
        stall_s = time.monotonic() - started
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
