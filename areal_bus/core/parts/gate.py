"""The staleness gate: the version clock, and the rules that admit prompts and take batches. Pure: no I/O.

Symbols (docs/staleness.md): B prompts a batch, eta versions of lag, u updates finished, v newest version published, w
batches taken, born the version a prompt's generator held. The paper's gate, eq. 3, is kept in credit form: live + in
training <= (eta + 1) * B (I1). A batch is in training from the moment it is taken until its version is published.

`hold` adds a demand bound (earliest deadline first). The deadline of a prompt, D = born + eta, is the last batch that
may contain it. For every D >= w, at most (D - w + 1) * B live prompts may be due by D. Then the batches w..D have
room for all of them. Admission and the choice of a batch both keep this bound. Its clock is w, not v.
"""

from collections.abc import Mapping, Sequence

from areal_bus.core.parts.staleness import StalenessPolicy
from areal_bus.errors import GateShut, ImpossibleEvent


class Gate:
    """Owns the clock and the credits. A decision costs O(1), under `hold` O(eta): counts per version, no scan."""

    def __init__(
        self, *, batch_size: int, eta: int, policy: StalenessPolicy = StalenessPolicy.MASK, clock: int = 0
    ) -> None:
        """`clock` is the version at which the term begins."""
        if batch_size < 1 or eta < 0 or clock < 0:
            raise ValueError(f"batch_size >= 1, eta >= 0 and clock >= 0; got {batch_size}, {eta} and {clock}")
        self.batch_size = batch_size
        self.eta = eta
        self.policy = policy
        self.restart(clock)

    def restart(self, clock: int) -> None:
        """Begin a term at version `clock` with all credits free. The caller admits the open prompts again."""
        self.u = self.v = self.w = clock
        self.live = 0  # admitted, neither taken nor refunded
        self.in_training = 0  # taken, not yet published
        self._born: dict[int, int] = {}  # version -> live prompts born at it
        self._taken: dict[int, int] = {}  # batch -> its prompts, until its version is published

    @property
    def limit(self) -> int:
        """Credits in all: prompts that may be live or in training at once."""
        return (self.eta + 1) * self.batch_size

    @property
    def free(self) -> int:
        return self.limit - self.live - self.in_training

    @property
    def is_idle(self) -> bool:
        """Neither a live prompt nor a batch in training."""
        return self.live == 0 and self.in_training == 0

    # admission

    def may_admit(self, born: int) -> bool:
        """Whether a prompt may be leased now to a generator that holds version `born`."""
        if self.live + self.in_training >= self.limit:  # I1
            return False
        return self.policy is not StalenessPolicy.HOLD or self._has_room(born)

    def admit(self, born: int) -> None:
        """Spend a credit on one prompt. Raises GateShut when none is left or, under `hold`, no batch has room."""
        if not 0 <= born <= self.u:  # I6
            raise ImpossibleEvent(f"unknown version {born}: a generator holds one of 0..{self.u}")
        if not self.may_admit(born):
            raise GateShut(self._why_shut(born))
        self.live += 1
        self._born[born] = self._born.get(born, 0) + 1

    def refund(self, born: int) -> None:
        """Return the credit of a live prompt that will not be trained."""
        if not self._born.get(born):
            raise ImpossibleEvent(f"only a live prompt can be refunded; none born at version {born} is live")
        self._leave(born)

    # batches

    def is_too_old(self, born: int) -> bool:
        """Whether the policy `drop` would refuse to train this prompt now."""
        return self.policy is StalenessPolicy.DROP and born < self.u - self.eta

    def may_take(self, n_prompts: int, ready: Mapping[int, int]) -> bool:
        """Whether the n oldest `ready` prompts (counts by born) may form the next batch: the rest must still fit."""
        if self.policy is not StalenessPolicy.HOLD:
            return True
        left, stays = n_prompts, 0
        for k in range(self.eta + 1):  # I2: those due by batch w + k; the batches w + 1 .. w + k have room for k * B
            born = self.w - self.eta + k
            gone = min(left, ready.get(born, 0))
            left -= gone
            stays += self._born.get(born, 0) - gone
            if stays > k * self.batch_size:
                return False
        return True

    def take(self, borns: Sequence[int]) -> int:
        """Take the next batch, prompts born at these versions. Returns c, the number of finished updates."""
        if self.w != self.u:
            raise ImpossibleEvent(f"batch {self.w} is taken when update {self.w} is next; {self.u} are finished")
        if not 0 < len(borns) <= min(self.live, self.batch_size):
            raise ImpossibleEvent(f"a batch has 1..{self.batch_size} of {self.live} live prompts; got {len(borns)}")
        counts: dict[int, int] = {}
        for born in borns:
            counts[born] = counts.get(born, 0) + 1
        if any(n > self._born.get(born, 0) for born, n in counts.items()):
            raise ImpossibleEvent(f"only live prompts are taken; got {counts} (born: prompts)")
        if self.policy in (StalenessPolicy.HOLD, StalenessPolicy.DROP) and min(counts) < self.u - self.eta:  # I2
            raise ImpossibleEvent(f"under {self.policy} c - born <= {self.eta}; got born {min(counts)} at c = {self.u}")
        if not self.may_take(len(borns), counts):  # I2
            raise ImpossibleEvent(
                f"under hold the prompts that batch {self.w} leaves must still be trainable in time; got {counts}"
            )
        for born in borns:
            self._leave(born)
        self.in_training += len(borns)
        self._taken[self.w] = len(borns)
        self.w += 1
        return self.u

    def finish_update(self, version: int) -> None:
        """The learner finished the update that makes `version`."""
        if version != self.u + 1 or version > self.w:  # I6
            raise ImpossibleEvent(f"update {self.u + 1} is next and needs its batch ({self.w} taken); got {version}")
        self.u = version

    def publish(self, version: int) -> int:
        """Publish `version`: the credits of all batches that it contains return (I1). Returns their number."""
        if not self.v <= version <= self.u:  # I6
            raise ImpossibleEvent(f"wrong version to publish: it must be in v..u = {self.v}..{self.u}; got {version}")
        back = sum(self._taken.pop(batch) for batch in [b for b in self._taken if b < version])
        self.in_training -= back
        self.v = version
        return back

    # inside

    def _has_room(self, born: int) -> bool:
        """Whether the demand bound holds with one more prompt: at most (D - w + 1) * B are due by D, for all D >= w."""
        eta, deadline = self.eta, born + self.eta
        if deadline < self.w:
            return False
        due, room = 0, 0
        for version in range(self.w - eta, self.u + 1):  # D = version + eta
            due += self._born.get(version, 0)
            room += self.batch_size
            if version >= born and due >= room:
                return False
        return True

    def _leave(self, born: int) -> None:
        self.live -= 1
        self._born[born] -= 1
        if not self._born[born]:
            del self._born[born]

    def _why_shut(self, born: int) -> str:
        if self.free <= 0:
            there = f"{self.live} + {self.in_training} are, at version {self.v}"
            return f"at most (eta + 1) * B = {self.limit} prompts may be live or in training; {there}"
        rule = "under hold at most (D - w + 1) * B live prompts are due by batch D = born + eta"
        return f"{rule}; one more born at {born} would be too many, at w = {self.w}"
