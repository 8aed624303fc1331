"""The reward actor: consumes trajectories, waits for one, unblocked by generators, produces scored trajectories.

It keeps no state but the scores under way: whatever is lost with it is sent again by its generator, and the head
drops what it has already. Imports without torch.
"""

import time

from loguru import logger

from actors.rewards.pool import Verdict, WorkerPool
from actors.runtime.context import Context, HeartbeatState, collect_seldom, note_refusals, open_bus
from actors.runtime.head_session import HEAD, HeadSession
from actors.runtime.user_failures import Failures, Prints
from areal_bus.config.sections import Config, RewardConfig
from areal_bus.core.events import Event
from areal_bus.journal import Journal
from areal_bus.messages import (
    Cancel,
    Failure,
    HeadHeartbeat,
    Message,
    PeerList,
    Ready,
    Rejoin,
    Scored,
    Stop,
    Trajectory,
    VerdictStatus,
)
from areal_bus.transport.bus import Bus
from areal_bus.transport.send_queue import ROOM_BYTES

IDLE_S = 0.5  # longest wait for a message when nothing is being scored
BUSY_S = 0.01  # longest wait for a verdict before messages are looked at
TELL_S = 0.02  # verdicts are gathered for so long, and BUSY_S more at most, to be written and told together
BACKLOG_BYTES = 64 << 20  # trajectories held here; beyond it they wait in the bus, and then at their senders (I9)

Key = tuple[str, int, int, int]  # (evaluation, uid, sample, attempt)


def run(context: Context) -> None:
    """Score trajectories until the head says Stop. Raises ConfigError when the reward function does not load."""
    config = context.config()
    journal = context.journal(config)
    pulse = HeartbeatState()
    bus = open_bus(context, config, pulse, listen=listen_endpoint(context))
    collect_seldom()
    try:
        reason = score_until_stop(context, config, journal, pulse, bus)
    except Exception as error:
        journal.write(Event.FAILED, error=f"{type(error).__name__}: {error}")
        bus.send(HEAD, Failure(error=f"{type(error).__name__}: {error}"))
        raise
    else:
        journal.close(reason=reason)
    finally:
        bus.close()


def score_until_stop(context: Context, config: Config, journal: Journal, pulse: HeartbeatState, bus: Bus) -> str:
    reward = config.reward
    logs, what = context.folder / "logs", f"reward.function {reward.function!r}"
    prints = Prints(logs, context.name, what)
    with WorkerPool(
        reward.function,
        context.config_folder,
        n_workers=reward.workers,
        timeout_s=reward.timeout_s,
        prints=prints.file,
    ) as pool:
        presence = HeadSession(bus, silent_s=config.bus.silent_s)
        presence.join(context, bus.endpoint)
        loop = RewardLoop(
            bus,
            presence,
            pool,
            journal,
            pulse,
            capacity=reward.workers,
            failures=Failures(logs, context.name, what, ends=context.incarnation == 0 and not may_fail(reward)),
            prints=prints,
        )
        while loop.stopped is None:
            loop.turn()
        return loop.stopped


def may_fail(reward: RewardConfig) -> bool:
    """Answers that break the function are declared to be normal: the first ones, often the shortest, prove nothing."""
    return reward.on_error != "refund" or reward.partial_groups


def listen_endpoint(context: Context) -> str:
    """Beside the head's socket file on one host; a free port of the named interface between hosts."""
    if context.head.startswith("ipc://"):
        return f"{context.head.rpartition('/')[0]}/{context.name}"
    return f"tcp://{context.address}:0"


class RewardLoop:
    """Between the bus and the pool: each turn takes messages in, scores, and sends verdicts out."""

    def __init__(
        self,
        bus: Bus,
        presence: HeadSession,
        pool: WorkerPool,
        journal: Journal,
        pulse: HeartbeatState,
        *,
        capacity: int,
        failures: Failures | None = None,
        prints: Prints | None = None,
    ) -> None:
        self.stopped: str | None = None  # why, once the head has said so
        self._bus = bus
        self._presence = presence
        self._pool = pool
        self._journal = journal
        self._pulse = pulse
        self._capacity = capacity
        self._failures, self._prints = failures, prints
        self._announced = False  # Ready was sent
        self._at_work: dict[Key, Trajectory] = {}
        self._n_bytes = 0  # of those
        self._untold: list[Scored] = []

    def turn(self) -> None:
        self._take_messages()
        self._journal.mark("score" if self._at_work else "idle")
        waits = self._at_work or not self._pool.ready or self._is_full
        until = time.monotonic() + TELL_S
        verdicts = self._pool.poll(BUSY_S if waits else 0.0)
        while verdicts:
            for verdict in verdicts:
                self._conclude(verdict)
            verdicts = self._pool.poll(BUSY_S) if self._at_work and time.monotonic() < until else []
        self._tell()
        if not self._announced and self._pool.ready:
            self._announced = True
            self._presence.say(Ready(capacity=self._capacity))
        self._pulse.note = self._presence.remark(self._say())
        note_refusals(self._bus, self._journal)

    @property
    def _is_full(self) -> bool:
        """It takes nothing in: for what it has to score, or because the head does not take its verdicts."""
        return self._n_bytes >= BACKLOG_BYTES or self._bus.n_waiting(HEAD) >= ROOM_BYTES

    def _say(self) -> str:
        if not self._announced:
            return "waits for its workers to load the reward function"
        return f"scores {len(self._at_work)}" if self._at_work else "waits for a trajectory"

    def _take_messages(self) -> None:
        """All that is there; waits for the first one when there is nothing else to do."""
        patience_s = IDLE_S if self._announced and not self._at_work else 0.0
        while not self._is_full and self.stopped is None:
            self._journal.mark("idle" if patience_s else "bus")
            received = self._bus.receive(patience_s)
            if received is None:
                return
            self._journal.mark("bus")
            if self._presence.heard(*received):
                self._rejoin()
            self._on(*received)
            patience_s = 0.0

    def _on(self, sender: str, message: Message) -> None:
        if isinstance(message, Trajectory):
            self._submit(message)
        elif isinstance(message, Cancel):
            self._forget(message)
        elif isinstance(message, Stop):
            self.stopped = message.reason
        elif not isinstance(message, HeadHeartbeat | PeerList | Rejoin):
            logger.debug("a reward has no use for {} from {}", type(message).__name__, sender)

    def _submit(self, trajectory: Trajectory) -> None:
        """Score it, unless that very one is being scored: a generator sends again what was not acknowledged."""
        key = (trajectory.evaluation, trajectory.uid, trajectory.sample, trajectory.attempt)
        if key in self._at_work:
            return
        self._at_work[key] = trajectory
        self._n_bytes += weight(trajectory)
        self._pool.submit(key, prompt=trajectory.prompt_text, completion=trajectory.text, row=trajectory.row)

    def _forget(self, cancel: Cancel) -> None:
        """The group is refunded: what waits of it needs no verdict (one of them may hang as the last one did)."""
        group = (cancel.evaluation, cancel.uid, cancel.attempt)
        unwanted = {key for key in self._at_work if (key[0], key[1], key[3]) == group}
        for key in unwanted.intersection(self._pool.forget(unwanted)):
            self._n_bytes -= weight(self._at_work.pop(key))

    def _rejoin(self) -> None:
        """A new head: nobody wants the scores under way."""
        logger.warning("{}: a new head: joins it without the work of before", self._bus.name)
        self._pool.clear()
        self._at_work.clear()
        self._n_bytes = 0
        self._presence.say_again()

    def _conclude(self, verdict: Verdict) -> None:
        trajectory = self._at_work.pop(verdict.key)
        self._n_bytes -= weight(trajectory)
        journal_score(self._journal, trajectory, verdict)
        self._watch(verdict)
        self._untold.append(scored(trajectory, verdict))
        self._pulse.progress += 1

    def _watch(self, verdict: Verdict) -> None:
        """Where the function failed and what it printed, for people. Raises UserCodeFailed when it never works."""
        if self._prints is not None:
            self._prints.look()
        if self._failures is None:
            return
        if verdict.status == VerdictStatus.VALUE:
            self._failures.work()
        elif verdict.place:
            evaluation, uid, sample, attempt = verdict.key
            of = f" of evaluation {evaluation!r}" if evaluation else ""
            self._failures.note(
                group=(evaluation, uid),
                about=f"uid {uid} sample {sample} attempt {attempt}{of}",
                place=verdict.place,
                error=verdict.error,
                trace=verdict.trace,
            )

    def _tell(self) -> None:
        if self._untold:
            self._journal.mark("bus")
            self._journal.flush()  # first: all that the head hears is written here
            self._bus.send_all((HEAD, one) for one in self._untold)
            self._untold.clear()


def weight(trajectory: Trajectory) -> int:
    """Bytes, nearly: text counts its characters."""
    return (
        len(trajectory.ids)
        + len(trajectory.logps)
        + len(trajectory.prompt_text)
        + len(trajectory.text)
        + len(trajectory.row)
        + len(trajectory.turns)
    )


def scored(trajectory: Trajectory, verdict: Verdict) -> Scored:
    return Scored(
        status=verdict.status,
        reward=verdict.reward,
        correct=verdict.correct,
        error=verdict.error,
        score_s=verdict.score_s,
        uid=trajectory.uid,
        sample=trajectory.sample,
        attempt=trajectory.attempt,
        evaluation=trajectory.evaluation,
        generator=trajectory.generator,
        finish=trajectory.finish,
        segments=trajectory.segments,
        spans=trajectory.spans,
        seconds=trajectory.seconds,
        term=trajectory.term,
        ids=trajectory.ids,
        logps=trajectory.logps,
        prompt_text=trajectory.prompt_text,
        text=trajectory.text,
        turns=trajectory.turns,
        lease=trajectory.lease,
    )


def journal_score(journal: Journal, trajectory: Trajectory, verdict: Verdict) -> None:
    """A line, kept; it has a reward or an error, never both (I10)."""
    outcome = {"reward": verdict.reward} if verdict.status == VerdictStatus.VALUE else {"error": verdict.error[:500]}
    journal.keep(
        Event.SCORE,
        uid=trajectory.uid,
        sample=trajectory.sample,
        attempt=trajectory.attempt,
        evaluation=trajectory.evaluation,
        status=str(verdict.status),
        score_s=round(verdict.score_s, 6),
        **outcome,
    )
