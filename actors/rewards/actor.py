"""The reward actor: scores trajectories. Its only state is the scores in progress; lost ones are sent again."""

import time
from collections import Counter
from collections.abc import Hashable
from dataclasses import replace
from typing import NamedTuple

from loguru import logger

from actors.rewards.loading import all_options, reward_name
from actors.rewards.pool import Verdict, WorkerOrder, WorkerPool
from actors.rewards.second_opinion import MOST_WAITING, CheckKey, is_chosen, journal_check
from actors.runtime.context import Context, HeartbeatState, collect_seldom, journal_rejections, open_bus
from actors.runtime.head_session import HEAD, ActorRuntime, HeadSession, run_until_stop
from actors.runtime.user_failures import Failures, Prints
from areal_bus import messages as m
from areal_bus.authorization import index_of
from areal_bus.config.rewards import RewardConfig
from areal_bus.config.sections import Config
from areal_bus.core.events import Event
from areal_bus.core.parts.reward_parts import as_fields, broken_roles, dumped
from areal_bus.storage.journal import Journal
from areal_bus.transport.bus import Bus
from areal_bus.transport.send_queue import ROOM_BYTES

IDLE_S = 0.5  # longest wait for a message while nothing is being scored
BUSY_S = 0.01  # longest wait for a verdict before messages are received again
COALESCE_S = 0.02  # verdicts of this time, and at most BUSY_S more, are written and sent together
BACKLOG_BYTES = (
    64 << 20
)  # in memory, of trajectories held here, in equal shares of the senders; more wait in the bus (I9)
RECORD_BYTES, PAIR_BYTES = 2048, 128  # of a trajectory beside its texts and arrays, and of a pair of its turns or spans


class Key(NamedTuple):
    """One sample. Generator and lease are part of it: what one generator sends replaces nothing of another."""

    generator: str
    lease: str
    evaluation: str
    uid: int
    sample: int
    attempt: int


class GroupKey(NamedTuple):
    """One group, for `reward.group`."""

    uid: int
    attempt: int


def run(context: Context) -> None:
    """Score trajectories until the head sends Stop. Raises ConfigError when the reward function does not load."""
    config = context.config()
    journal = context.journal(config)
    heartbeat = HeartbeatState()
    bus = open_bus(context, config, heartbeat, listen=listen_endpoint(context))
    collect_seldom()
    run_until_stop(journal, bus, lambda: score_until_stop(context, config, journal, heartbeat, bus))


def score_until_stop(context: Context, config: Config, journal: Journal, heartbeat: HeartbeatState, bus: Bus) -> str:
    reward = config.reward
    logs, what = context.folder / "logs", f"reward.function {reward.function!r}"
    prints = Prints(logs, context.name, what)
    with WorkerPool(
        WorkerOrder(
            reward_name(config),
            context.config_folder,
            prints=prints.file,
            options=all_options(config, context.config_folder, context.folder),
            fresh_process=reward.fresh_process,
            group=reward.group,
            check=reward.check.function,
        ),
        n_workers=reward.workers,
        timeout_s=reward.timeout_s,
    ) as pool:
        session = HeadSession(bus, silent_s=config.bus.silent_s)
        session.join(context, bus.endpoint)
        loop = RewardLoop(
            ActorRuntime(bus, session, journal, heartbeat),
            pool,
            capacity=reward.workers,
            n_generators=context.n_generators,
            failures=Failures(logs, context.name, what, ends=context.incarnation == 0 and not may_fail(reward)),
            prints=prints,
        )
        loop.check_share = reward.check.share if reward.check.function else 0.0
        while loop.stopped is None:
            loop.turn()
        return loop.stopped


def may_fail(reward: RewardConfig) -> bool:
    """Whether the config treats failed scores as normal: then early failures do not end the job."""
    return reward.on_error != "refund" or reward.partial_groups


def listen_endpoint(context: Context) -> str:
    """A socket file beside the head's on one host, else a free tcp port of the configured interface."""
    if context.head.startswith("ipc://"):
        return f"{context.head.rpartition('/')[0]}/{context.name}"
    return f"tcp://{context.address}:0"


class RewardLoop:
    """Each `turn` receives trajectories, polls the worker pool and sends scored trajectories to the head."""

    def __init__(
        self,
        runtime: ActorRuntime,
        pool: WorkerPool,
        *,
        capacity: int,
        n_generators: int,
        failures: Failures | None = None,
        prints: Prints | None = None,
    ) -> None:
        """`n_generators`: those of the job. Others are guests, whose rows may be the cause of a failure."""
        self.stopped: str | None = None  # the reason, once the head has sent Stop
        self._bus, self._session = runtime.bus, runtime.session
        self._journal, self._heartbeat = runtime.journal, runtime.heartbeat
        self._pool = pool
        self._capacity, self._n_generators = capacity, n_generators
        self._failures, self._prints = failures, prints
        self._announced = False  # Ready was sent
        self._n_disagreements = 0  # of reward.check
        self._in_progress: dict[Key, m.Trajectory] = {}
        self._n_bytes: Counter[str] = Counter()  # of the trajectories in progress, by generator; no zeros
        self._groups: dict[GroupKey, m.Group] = {}  # in progress; the head sends at most one a worker
        self.check_share = 0.0  # of the samples, for the second grader
        self._checks: dict[CheckKey, tuple[m.Trajectory, Verdict]] = {}  # in progress, with the verdict that counts
        self._unsent: list[m.Scored | m.GroupScored] = []

    def turn(self) -> None:
        self._take_messages()
        self._journal.mark("score" if self._n_in_progress else "idle")
        waits = self._n_in_progress or not self._pool.ready or self._is_full
        until = time.monotonic() + COALESCE_S
        verdicts = self._pool.poll(BUSY_S if waits else 0.0)
        while verdicts:
            for verdict in verdicts:
                self._conclude(verdict)
            verdicts = self._pool.poll(BUSY_S) if self._n_in_progress and time.monotonic() < until else []
        self._send_scored()
        if not self._announced and self._pool.ready:
            self._announced = True
            self._session.send(m.Ready(capacity=self._capacity))
        self._heartbeat.note = self._session.with_silence(self._status())
        journal_rejections(self._bus, self._journal)

    @property
    def _n_in_progress(self) -> int:
        return len(self._in_progress) + len(self._groups) + len(self._checks)

    @property
    def _is_full(self) -> bool:
        """Receives nothing more: the head does not take the scored trajectories."""
        return self._bus.n_waiting(HEAD) >= ROOM_BYTES

    def _has_its_share(self, sender: str) -> bool:
        """Receives nothing more of this generator for now: its trajectories fill its share of the backlog."""
        return self._n_bytes[sender] * len(self._n_bytes) >= BACKLOG_BYTES

    def _status(self) -> str:
        if not self._announced:
            return "waits for its workers to load the reward function"
        return f"scores {self._n_in_progress}" if self._n_in_progress else "waits for a trajectory"

    def _take_messages(self) -> None:
        """Receive all waiting messages; waits for the first one while nothing is being scored."""
        patience_s = IDLE_S if self._announced and not self._n_in_progress else 0.0
        while not self._is_full and self.stopped is None:
            self._journal.mark("idle" if patience_s else "bus")
            received = self._bus.receive(patience_s, skips=self._has_its_share)
            if received is None:
                return
            self._journal.mark("bus")
            if self._session.observe(*received):
                self._rejoin()
            self._on(*received)
            patience_s = 0.0

    def _on(self, sender: str, message: m.Message) -> None:
        if isinstance(message, m.Trajectory):
            self._submit(message)
        elif isinstance(message, m.Group):
            self._submit_group(message)
        elif isinstance(message, m.Cancel):
            self._forget(message)
        elif isinstance(message, m.Stop):
            self.stopped = message.reason
        elif not isinstance(message, m.HeadHeartbeat | m.PeerList | m.Rejoin):
            logger.debug("ignored an unexpected {} from {}", type(message).__name__, sender)

    def _submit(self, trajectory: m.Trajectory) -> None:
        """Score a trajectory, unless it is being scored already: generators resend unacknowledged ones."""
        t = trajectory
        key = Key(t.generator, t.lease, t.evaluation, t.uid, t.sample, t.attempt)
        if key in self._in_progress:
            return
        self._in_progress[key] = trajectory
        self._n_bytes[t.generator] += size_of(trajectory)
        submit(self._pool, key, trajectory, sender=t.generator)

    def _submit_group(self, group: m.Group) -> None:
        """Compare the samples of a group. The head asks again when it took this actor for dead."""
        key = GroupKey(group.uid, group.attempt)
        if key not in self._groups:
            self._groups[key] = group
            prompt, samples, row = group.prompt_text, group.samples, group.row
            self._pool.submit_group(key, prompt=prompt, samples=samples, row=row, sender=HEAD)

    def _end(self, key: Key) -> m.Trajectory:
        trajectory = self._in_progress.pop(key)
        self._n_bytes[trajectory.generator] -= size_of(trajectory)
        if not self._n_bytes[trajectory.generator]:
            del self._n_bytes[trajectory.generator]
        return trajectory

    def _forget(self, cancel: m.Cancel) -> None:
        """The group is refunded: drop its waiting scores. One of them might hang, as the one before did."""
        group = (cancel.evaluation, cancel.uid, cancel.attempt)
        unwanted = {key for key in self._in_progress if (key.evaluation, key.uid, key.attempt) == group}
        for key in unwanted.intersection(self._pool.forget(unwanted)):
            self._end(key)
        of_group = GroupKey(cancel.uid, cancel.attempt)
        if not cancel.evaluation and self._pool.forget({of_group}):
            del self._groups[of_group]

    def _rejoin(self) -> None:
        """Join a restarted head and drop the scores in progress."""
        logger.warning("{}: the head restarted: joining again, scores in progress are dropped", self._bus.name)
        self._pool.clear()
        self._in_progress.clear()
        self._groups.clear()
        self._checks.clear()
        self._n_bytes.clear()
        self._session.resend()

    def _conclude(self, verdict: Verdict) -> None:
        if isinstance(verdict.key, CheckKey):
            self._conclude_check(verdict)
            return
        if isinstance(verdict.key, GroupKey):
            del self._groups[verdict.key]
            journal_group_score(self._journal, verdict.key, verdict)
            self._unsent.append(group_scored(verdict.key, verdict))
        else:
            trajectory = self._end(verdict.key)
            verdict = with_roles(trajectory, verdict)
            journal_score(self._journal, trajectory, verdict)
            self._unsent.append(scored(trajectory, verdict))
            self._check(trajectory, verdict)
        self._note_result(verdict)
        self._heartbeat.progress += 1

    def _check(self, trajectory: m.Trajectory, verdict: Verdict) -> None:
        """Ask the second grader, if this sample is chosen."""
        t, key = trajectory, CheckKey(trajectory.uid, trajectory.sample, trajectory.attempt)
        is_value = verdict.status == m.VerdictStatus.VALUE
        if (
            not (is_value and is_chosen(t, self.check_share))
            or key in self._checks
            or len(self._checks) >= MOST_WAITING
        ):
            return
        self._checks[key] = trajectory, verdict
        submit(self._pool, key, trajectory, sender="check", is_check=True)

    def _conclude_check(self, verdict: Verdict) -> None:
        trajectory, first = self._checks.pop(verdict.key)
        if journal_check(self._journal, trajectory, first, verdict):
            self._n_disagreements += 1
            if self._n_disagreements.bit_count() == 1:
                at = f"prompt {trajectory.uid} sample {trajectory.sample}"
                rewards = f"reward {first.reward:g}, reward.check {verdict.reward:g}"
                logger.warning("reward.check disagrees on {}: {} ({} so far)", at, rewards, self._n_disagreements)

    def _note_result(self, verdict: Verdict) -> None:
        """Record failures and output of the reward function. Raises UserCodeFailed when it never succeeds."""
        if self._prints is not None:
            self._prints.log_once()
        if self._failures is None:
            return
        if verdict.status == m.VerdictStatus.VALUE:
            self._failures.note_success()
        elif verdict.place:
            group, about = about_key(verdict.key)
            self._failures.note(
                group=group,
                about=about,
                place=verdict.place,
                error=verdict.error,
                trace=verdict.trace,
                counts=isinstance(verdict.key, Key) and index_of(verdict.key.generator) < self._n_generators,
            )

    def _send_scored(self) -> None:
        if self._unsent:
            self._journal.mark("bus")
            self._journal.flush()  # before the send: the head must not know a score that is not written
            self._bus.send_all((HEAD, one) for one in self._unsent)
            self._unsent.clear()
            self._heartbeat.report_progress()


def about_key(key: Key | GroupKey) -> tuple[tuple[str, int], str]:
    """The group of a score, and the score in words."""
    if isinstance(key, GroupKey):
        return ("", key.uid), f"uid {key.uid} attempt {key.attempt}, reward.group"
    of = f" of evaluation {key.evaluation!r}" if key.evaluation else ""
    return (key.evaluation, key.uid), f"uid {key.uid} sample {key.sample} attempt {key.attempt}{of}"


def submit(
    pool: WorkerPool, key: Hashable, trajectory: m.Trajectory, *, sender: str = "", is_check: bool = False
) -> None:
    """Queue the score of a trajectory, in the turn of this sender; `is_check`: by the second grader."""
    pool.submit(
        key,
        prompt=trajectory.prompt_text,
        completion=trajectory.text,
        row=trajectory.row,
        ids=trajectory.ids,
        n_prompt=n_before(trajectory),
        sender=sender,
        is_check=is_check,
    )


def n_before(trajectory: m.Trajectory) -> int:
    """Tokens before the last completion."""
    return len(trajectory.ids) // 4 - trajectory.segments[-1][1]


def size_of(trajectory: m.Trajectory) -> int:
    """Approximate size in memory, in bytes: texts count their characters."""
    return (
        RECORD_BYTES
        + PAIR_BYTES * (len(trajectory.segments) + len(trajectory.spans))
        + len(trajectory.ids)
        + len(trajectory.logps)
        + len(trajectory.prompt_text)
        + len(trajectory.text)
        + len(trajectory.row)
        + len(trajectory.turns)
        + len(trajectory.fields)
    )


def with_roles(trajectory: m.Trajectory, verdict: Verdict) -> Verdict:
    """The verdict; an error if its rewards of roles are not those of the episode's roles."""
    broken = broken_roles(trajectory.roles, verdict.parts)
    if not broken or verdict.status != m.VerdictStatus.VALUE:
        return verdict
    return replace(verdict, status=m.VerdictStatus.ERROR, reward=0.0, correct=None, error=broken, parts={})


def scored(trajectory: m.Trajectory, verdict: Verdict) -> m.Scored:
    return m.recast(
        trajectory,
        m.Scored,
        status=verdict.status,
        reward=verdict.reward,
        correct=verdict.correct,
        error=verdict.error,
        score_s=verdict.score_s,
        parts=dumped(verdict.parts),
    )


def group_scored(key: GroupKey, verdict: Verdict) -> m.GroupScored:
    return m.GroupScored(
        status=verdict.status,
        rewards=list(verdict.rewards),
        error=verdict.error,
        score_s=verdict.score_s,
        uid=key.uid,
        attempt=key.attempt,
    )


def journal_group_score(journal: Journal, key: GroupKey, verdict: Verdict) -> None:
    """Write the journal line of a group's verdict. It has rewards or an error, never both (I10)."""
    has_value = verdict.status == m.VerdictStatus.VALUE
    outcome = {"rewards": list(verdict.rewards)} if has_value else {"error": verdict.error[:500]}
    status, score_s = str(verdict.status), round(verdict.score_s, 6)
    journal.keep(Event.GROUP_SCORE, uid=key.uid, attempt=key.attempt, status=status, score_s=score_s, **outcome)


def journal_score(journal: Journal, trajectory: m.Trajectory, verdict: Verdict) -> None:
    """Write the journal line of a score. It has a reward or an error, never both (I10)."""
    has_value = verdict.status == m.VerdictStatus.VALUE
    outcome = {"reward": verdict.reward, **as_fields(verdict.parts)} if has_value else {"error": verdict.error[:500]}
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
