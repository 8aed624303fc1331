"""Terms (incarnations of the learner) and which tokens of older terms still count.

A term begins at the version of a checkpoint, of a learner that survived its head, or of the copy in memory of one that
died. A learner checkpoint needs the head checkpoint of the same version, so both are kept equally long. A surviving
learner needs a savepoint that was captured for it: at the version where it began, or for one of its last two batches.
A copy in memory is enough by itself while the same head runs and has seen no later version. Otherwise the head needs
such a savepoint, or the state that it captured when the copy was made.

The version at which a term begins is its base. Everything that later versions of older terms made is void. Versions
of different terms are compared by this rule only.
"""

from collections.abc import Callable, Collection, Iterable, Mapping

from areal_bus.core.parts.collapse import kept_for_rollback, last_good
from areal_bus.core.parts.head_checkpoint import HeadCheckpoint, HeadSavepoint
from areal_bus.messages import Finished


class Terms:
    """Numbers terms; keeps the head checkpoints and the last savepoints."""

    def __init__(
        self,
        term: int,
        checkpoints: Mapping[int, HeadCheckpoint],
        savepoints: Iterable[HeadSavepoint] = (),
        *,
        every: int,
        keep: int,
    ) -> None:
        """`term`: number of the first term. `every`, `keep`: of checkpoints (`every` 0: none by steps)."""
        self.term = term
        self.checkpoints = dict(checkpoints)
        self.begun_by: str | None = None  # learner 0 of this term; None before it begins
        self.requests: dict[int, int] = {}  # learner ranks that wait for a batch -> its step
        self.finished: dict[int, Finished] = {}  # learner rank -> what it wrote, at the end
        self._savepoints = {slot(savepoint): savepoint for savepoint in savepoints}
        self._every = every
        self._keep = keep
        self._has_begun = False
        self._held: dict[int, HeadCheckpoint] = {}  # at the last two versions of which supervisors hold copies
        self._saved = {version for version in checkpoints if version}  # on disk
        self._sealed = set(self._saved)  # whose checkpoint is whole
        self._whole: set[int] = set()  # both were when the last batch went out
        self._refused = 0  # newest version of a learner that survived a head, and whose savepoint is missing

    def break_crew(self) -> None:
        """Forget all that learners reported; the next BeginTerm begins a term."""
        self.begun_by = None
        self._whole.clear()
        self.requests.clear()
        self.finished.clear()

    @property
    def may_be_outlived(self) -> bool:
        """A running learner may hold a version that no checkpoint has."""
        return any(savepoint.checkpoint.version for savepoint in self._savepoints.values())

    def is_due(self, version: int) -> bool:
        """Whether `every` demands a checkpoint of this version. Learner 0 may write others, and reports them."""
        return self._every > 0 and version % self._every == 0

    def begin(
        self,
        version: int,
        *,
        outlived: str | None = None,
        sealed: Collection[int] = (),
        copied: HeadCheckpoint | None = None,
    ) -> HeadCheckpoint | None:
        """Begin a term at `version`. Returns its head checkpoint; None, with nothing begun, if there is none.

        `outlived`: the learner 0 that survived a head, if one did. `sealed`: versions whose checkpoints it reports as
        complete. `copied`: what the copy in memory that it begins from needs.
        """
        checkpoint = copied or self.checkpoints.get(version)
        if outlived is not None:
            savepoint = self._savepoints.get(version % 2)
            is_its_own = savepoint is not None and (savepoint.root, savepoint.checkpoint.version) == (outlived, version)
            checkpoint = None if savepoint is None or not is_its_own else checkpoint or savepoint.checkpoint
        if checkpoint is None and outlived is not None:
            self._refused = max(self._refused, version)
        if checkpoint is not None:
            self.term += self._has_begun
            self._has_begun = True
            self._sealed = self.checkpoints.keys() & set(sealed)
            self._held = {other: held for other, held in self._held.items() if other <= version}
        return checkpoint

    def _saved_at(self, version: int) -> HeadCheckpoint | None:
        savepoint = self._savepoints.get(version % 2)
        return savepoint.checkpoint if savepoint is not None and savepoint.checkpoint.version == version else None

    def continues_at(self, version: int) -> bool:
        """Whether a copy of this version undoes no update that this head, which has begun no term, can know of."""
        is_newest = version >= max(self.checkpoints, default=0) and version >= self._refused
        return is_newest and self._saved_at(version) is not None

    def of_copy(self, version: int) -> HeadCheckpoint | None:
        """What a copy of this version needs, if later updates are undone or the head has restarted."""
        return self.checkpoints.get(version) or self._held.get(version) or self._saved_at(version)

    def hold(self, checkpoint: HeadCheckpoint) -> None:
        """The supervisors hold a copy of this version. Of the copies they keep two."""
        self._held[checkpoint.version] = checkpoint
        self._held = dict(sorted(self._held.items())[-2:])

    def mark(self, savepoint: HeadSavepoint) -> None:
        """Keep a savepoint, before a batch is sent or at the begin of a term. It replaces the one before the last."""
        self._savepoints[slot(savepoint)] = savepoint

    def savepoints(self) -> list[HeadSavepoint]:
        """The last two."""
        return list(self._savepoints.values())

    def later_than(self, version: int) -> list[int]:
        """Forget the checkpoints after `version`, which belong to a lost timeline. Returns their versions."""
        return self._drop(lambda other: other > version)

    def checkpointed(self, version: int) -> None:
        """The checkpoint of `version` is on disk."""
        self._sealed.add(version)

    def hand_out(self) -> None:
        """A batch is sent to the ranks that requested it."""
        self.requests.clear()
        self._whole = self._sealed & self._saved

    def good(self, version: int) -> int:
        """The newest version that a forecast of a collapse at `version` goes back to."""
        return last_good(self._whole, version)

    def updated(self, *, rollback_at: int | None = None) -> list[int]:
        """The update of that batch is finished. Returns the versions that no learner will resume from.

        `rollback_at`: its version, if a rollback may follow.

        Checkpoints are released only here. The finished update proves that this learner ran after the checkpoints that
        were complete when its batch was sent, so its successor finds them on disk. A report of a checkpoint proves
        less: it may have been delayed until after the successor chose.
        """
        newest = sorted(self._whole)[-self._keep :]
        kept = set() if rollback_at is None else {0} | kept_for_rollback(self._whole, rollback_at)
        return self._drop(lambda other: other < newest[0] and other not in kept) if newest else []

    def saved(self, checkpoint: HeadCheckpoint) -> None:
        """The head checkpoint is on disk."""
        if self.checkpoints.get(checkpoint.version) is checkpoint:  # not of a lost timeline
            self._saved.add(checkpoint.version)

    def _drop(self, is_gone: Callable[[int], bool]) -> list[int]:
        gone = sorted(version for version in self.checkpoints if is_gone(version))
        for version in gone:
            del self.checkpoints[version]
        self._sealed = {version for version in self._sealed if not is_gone(version)}
        self._saved = {version for version in self._saved if not is_gone(version)}
        self._whole = {version for version in self._whole if not is_gone(version)}
        return gone


def slot(savepoint: HeadSavepoint) -> int:
    """The slot of a savepoint: two consecutive ones use different slots."""
    return savepoint.checkpoint.version % 2


class TermHistory:
    """The term, and the versions of older terms that are part of its history."""

    def __init__(self) -> None:
        self.term = 0
        self._base: int | None = None  # newest version of older terms that counts; None: none does for certain

    def begin(self, term: int, base: int) -> bool:
        """A term begins at `base`; False if it or a later one is known. After a missed term no older tokens count."""
        if term <= self.term:
            return False
        self._base = base if term == self.term + 1 else None
        self.term = term
        return True

    def keeps(self, newest: int | None) -> bool:
        """Whether tokens of versions up to `newest` of older terms are valid; None: there are no tokens."""
        return newest is None or (self._base is not None and newest <= self._base)
