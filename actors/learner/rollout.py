"""Batches from the head for the learner, also while the head fails over to a new incarnation.

A head may die while some ranks have their share of a batch and others do not. So before a batch is trained the ranks
say whether they have theirs: then it is trained by all, else by none, and all go on with the head that the last of them
has joined. With one rank the agreement costs nothing, with more it is one small collective a batch.
"""

from collections.abc import Callable, Iterator, Sequence

from actors.learner.batch import Batch, build
from actors.learner.inbox import LearnerInbox
from actors.runtime.context import HeartbeatState
from areal_bus.core.staleness import StalenessPolicy
from areal_bus.errors import ConfigError, ImpossibleEvent, Restart
from areal_bus.journal import Journal
from areal_bus.messages import BatchRequest, Message, NoBatch, PeerList, ShardEnd, ShardItem

NOBODY = -1  # the life of a head that has not been joined


class HeadFailover:
    """Every method that says so is a collective: all ranks call it in the same order."""

    def __init__(
        self,
        letterbox: LearnerInbox,
        *,
        most: Callable[[Sequence[float]], list[float]],
        begin: Callable[[int, bool], None],
        look: Callable[[], None] = lambda: None,
    ) -> None:
        """`most` is the largest of each value over the ranks. `begin(life, lives_on)` tells the head of this life where
        this rank is; `lives_on`: another one was told before. `look` is called every second of a wait.
        """
        self.life = NOBODY  # of the head that all ranks ask
        self._letterbox = letterbox
        self._most = most
        self._begin = begin
        self._look = look
        self._has_begun = False

    @property
    def is_cut(self) -> bool:
        """This rank has joined another head than the one that is asked."""
        return self._letterbox.life != self.life

    def confirm(self, has: bool) -> bool:
        """Whether all ranks have what they asked for; else all ask another head from now on. A collective."""
        while True:
            joined = NOBODY if self._letterbox.life is None else self._letterbox.life
            missing, newest = self._most([0.0 if has else 1.0, float(joined)])
            if not missing:
                return True
            self.life = max(int(newest), 0)
            self._await(self.life)
            if not self.is_cut:
                lives_on, self._has_begun = self._has_begun, True
                self._begin(self.life, lives_on)
                return False
            has = False  # a head that is newer still

    def _await(self, life: int) -> None:
        """Return once this rank has joined a head of this life, or a later one. No letter of it can be lost here."""
        while self._letterbox.life is None or self._letterbox.life < life:
            self._letterbox.take(look=self._look)


Answer = tuple[ShardEnd | NoBatch, list[ShardItem]]


class Rollout:
    """Batches of one run, in order. Asynchronous or not is the gate's matter (eta), not the loop's."""

    def __init__(
        self,
        send: Callable[[Message], None],
        letterbox: LearnerInbox,
        tie: HeadFailover,
        *,
        journal: Journal,
        pulse: HeartbeatState,
        eta: int,
        n_samples: int,
        partial_groups: bool = False,
        version: Callable[[], int],
        policy: StalenessPolicy = StalenessPolicy.MASK,
        first: int = 0,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        """`send` reaches the head; `version` counts updates finished; `first` is the step of the first batch; `look` is
        called every second of a wait.
        """
        self._send = send
        self._letterbox = letterbox
        self._tie = tie
        self._journal = journal
        self._pulse = pulse
        self._eta = eta
        self._n_samples = n_samples
        self._partial_groups = partial_groups
        self._version = version
        self._policy = policy
        self._look = look
        self._step = first
        self.ended = False  # there will be no further batch
        self.drained = False  # in this run; a later one goes on

    def __iter__(self) -> Iterator[Batch]:
        """Every batch until the run or its data ends."""
        while (batch := self.prepare_batch()) is not None:
            yield batch

    def prepare_batch(self) -> Batch | None:
        """Ask for the next batch and wait for it; None when there will be none.

        Raises StopRun, ImpossibleEvent, and ConfigError while the last batch is not trained.
        """
        self.check_trained()
        if self.ended:
            return None
        with self._journal.span("wait_batch"):
            self._pulse.note = f"waits for the batch of step {self._step}"
            end, items = self._next()
            if isinstance(end, NoBatch):
                self.ended, self.drained = True, end.drained
                return None
            batch = build(
                items,
                step=end.step,
                clock=end.clock,
                n_groups=end.n_groups,
                eta=self._eta,
                policy=self._policy,
                n_samples=self._n_samples,
                partial_groups=self._partial_groups,
            )
        self._pulse.note = f"trains step {self._step}"
        self.ended = end.last
        self._step += 1
        return batch

    def check_trained(self) -> None:
        """Raises ConfigError when a batch was taken and not trained: the head counts on an update for each."""
        if self._version() < self._step:
            raise ConfigError(
                "each batch is trained by actor.ppo_update before the next is asked for, and none can be skipped: the "
                f"learner.loop took the batch of step {self._step - 1} and made no update of it"
            )

    def check_ended(self, loop: str) -> None:
        """Raises ConfigError when the loop of that name returned before the last batch was trained."""
        self.check_trained()
        if not self.ended:
            raise ConfigError(
                f"learner.loop takes batches until there are none: {loop!r} returned at version {self._version()} "
                "while the run goes on"
            )

    def outlive(self) -> None:
        """After the end: another head is there, and hears once more that there is nothing left to do.

        Raises Restart where it may know better: what a drained run had is on disk, and so is whatever else ended.
        """
        if self.drained or not isinstance(self._next()[0], NoBatch):
            raise Restart(f"the next head goes on from what is on disk: the run had ended at step {self._step}")

    def _next(self) -> Answer:
        """What the head that all ranks ask has for them, whichever that is in the end."""
        while True:
            answer = self._ask()
            if self._tie.confirm(answer is not None) and answer is not None:
                return answer

    def _ask(self) -> Answer | None:
        """The answer for this rank; None when that head is no more."""
        if self._tie.is_cut:
            return None
        self._send(BatchRequest(self._step, self._tie.life))
        return self._collect()

    def _collect(self) -> Answer | None:
        items: list[ShardItem] = []
        while True:
            message = self._letterbox.take(look=self._look_around)
            if isinstance(message, PeerList) and message.life > self._tie.life:
                return None  # nothing of the head before comes after this; an older word is left over from a step
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
                    f"a share comes whole: step {self._step} announced {message.n_items} items, {len(items)} came"
                )
            return message, items

    def _look_around(self) -> None:
        self._journal.mark("wait_batch")
        self._look()
