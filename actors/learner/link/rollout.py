"""Batches from the head for the learner, also while the head fails over to a new incarnation.

A head may die while some ranks have their shard of a batch and others do not. So the ranks agree before they train a
batch: if all have their shard, all train it; else none does, and all follow the newest head that any of them has
joined. With one rank the agreement costs nothing. With more it is one small collective per batch.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from actors.learner.batching import Batch
from actors.learner.link.inbox import LearnerInbox
from actors.runtime.context import HeartbeatState
from areal_bus.errors import ConfigError, ImpossibleEvent, Restart
from areal_bus.messages import BatchRequest, Message, NoBatch, PeerList, ShardEnd, ShardItem
from areal_bus.storage.journal import Journal

NOBODY = -1  # stands for the incarnation of the head before the first one is joined


class HeadFailover:
    """The link of this rank to the head, whose incarnation the ranks agree on. `confirm` is a collective."""

    def __init__(
        self,
        inbox: LearnerInbox,
        send: Callable[[Message], None],
        *,
        most: Callable[[Sequence[float]], list[float]],
        begin: Callable[[int, bool], None],
        look: Callable[[], None] = lambda: None,
    ) -> None:
        """`send` sends to the head. `most` is the maximum of each value over the ranks. `begin(life, lives_on)` reports
        the version of this rank to the head of that incarnation; `lives_on`: an earlier head received it before. `look`
        runs every second of a wait.
        """
        self.life = NOBODY  # incarnation of the head that all ranks follow
        self.inbox = inbox
        self.look = look
        self._send = send
        self._most = most
        self._begin = begin
        self._has_begun = False

    @property
    def has_new_head(self) -> bool:
        """This rank has joined a newer head than the one that all ranks follow."""
        return self.inbox.life != self.life

    def request(self, step: int) -> None:
        """Ask the head that all ranks follow for the batch of this step."""
        self._send(BatchRequest(step, self.life))

    def confirm(self, has: bool) -> bool:
        """Whether all ranks have their answer. Else all follow a newer head from now on. A collective."""
        while True:
            joined = NOBODY if self.inbox.life is None else self.inbox.life
            missing, newest = self._most([0.0 if has else 1.0, float(joined)])
            if not missing:
                return True
            self.life = max(int(newest), 0)
            self._await(self.life)
            if not self.has_new_head:
                lives_on, self._has_begun = self._has_begun, True
                self._begin(self.life, lives_on)
                return False
            has = False  # an even newer head appeared

    def _await(self, life: int) -> None:
        """Wait until this rank has joined a head of this incarnation or a later one: no message is lost."""
        while self.inbox.life is None or self.inbox.life < life:
            self.inbox.take(look=self.look)


Answer = tuple[ShardEnd | NoBatch, list[ShardItem]]


class BuildBatch(Protocol):
    """Makes the batch of a shard and checks it: `batch.build` with the rules of the run."""

    def __call__(self, shard: list[ShardItem], /, *, step: int, clock: int, n_groups: int) -> Batch: ...


class Rollout:
    """Batches of one run, in order. The gate (eta) decides how asynchronous they are."""

    def __init__(
        self,
        failover: HeadFailover,
        *,
        build: BuildBatch,
        journal: Journal,
        heartbeat: HeartbeatState,
        version: Callable[[], int],
        turn: Callable[[int], None] = lambda step: None,
    ) -> None:
        """`version`: the number of finished updates, the step of the next batch. `turn(step)` runs before each step."""
        self._failover = failover
        self._build = build
        self._journal = journal
        self._heartbeat = heartbeat
        self._version = version
        self._turn = turn
        self._step = version()
        self.ended = False  # no further batch follows
        self.drained = False  # the run stopped early; a later run continues it

    def __iter__(self) -> Iterator[Batch]:
        """Every batch until the run or its data ends."""
        while (batch := self.prepare_batch()) is not None:
            yield batch

    def prepare_batch(self) -> Batch | None:
        """Wait for the next batch; None: no more. Raises StopRun, ImpossibleEvent; ConfigError: last one untrained."""
        self.check_trained()
        self._turn(self._step)
        if self.ended:
            return None
        with self._journal.span("wait_batch"):
            self._heartbeat.note = f"waits for the batch of step {self._step}"
            end, items = self._next()
            if isinstance(end, NoBatch):
                self.ended, self.drained = True, end.drained
                return None
            batch = self._build(items, step=end.step, clock=end.clock, n_groups=end.n_groups)
        self._heartbeat.note = f"trains step {self._step}"
        self.ended = end.last
        self._step += 1
        return batch

    def check_trained(self) -> None:
        """Raises ConfigError if a batch was taken and not trained: the head expects one update per batch."""
        if self._version() < self._step:
            raise ConfigError(
                f"untrained batch: learner.loop took the batch of step {self._step - 1} and did not train it; each one "
                "must be trained by actor.ppo_update before the next is requested"
            )

    def check_ended(self, loop: str) -> None:
        """Raises ConfigError when the loop of that name returned before the last batch was trained."""
        self.check_trained()
        if not self.ended:
            raise ConfigError(
                f"learner.loop must take batches until there are none: {loop!r} returned at version {self._version()} "
                "while the run continues"
            )

    def report_end_again(self) -> None:
        """Report the end to a restarted head. Raises Restart if the run drained or the head has another batch."""
        if self.drained or not isinstance(self._next()[0], NoBatch):
            raise Restart(f"a restarted head continues from the checkpoint on disk: this run had ended at {self._step}")

    def _next(self) -> Answer:
        """The answer of the head, after all ranks have received theirs from the same incarnation."""
        while True:
            answer = self._ask()
            if self._failover.confirm(answer is not None) and answer is not None:
                return answer

    def _ask(self) -> Answer | None:
        """The answer for this rank; None if that head is gone."""
        if self._failover.has_new_head:
            return None
        self._failover.request(self._step)
        return self._collect()

    def _collect(self) -> Answer | None:
        items: list[ShardItem] = []
        while True:
            message = self._failover.inbox.take(look=self._on_wait)
            if isinstance(message, PeerList) and message.life > self._failover.life:
                return None  # no message of the former head follows; an older PeerList is stale
            if not isinstance(message, ShardItem | ShardEnd | NoBatch):
                continue
            if message.step != self._step:
                raise ImpossibleEvent(f"batches come in order: waited for step {self._step}, got step {message.step}")
            if isinstance(message, NoBatch):
                return message, []
            if isinstance(message, ShardItem):
                items.append(message)
                continue
            if len(items) != message.n_items:
                raise ImpossibleEvent(
                    f"incomplete shard of step {self._step}: {message.n_items} items were announced, {len(items)} came"
                )
            return message, items

    def _on_wait(self) -> None:
        self._journal.mark("wait_batch")
        self._failover.look()
