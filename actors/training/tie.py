"""Which head the learner ranks ask: they agree on it, and outlive it together; knows no batch and no weights.

A head may die while some ranks have their share of a batch and others do not. So before a batch is trained the ranks
say whether they have theirs: then it is trained by all, else by none, and all go on with the head that the last of them
has joined. With one rank the agreement costs nothing, with more it is one small collective a batch.
"""

from collections.abc import Callable, Sequence

from actors.training.letterbox import Letterbox

NOBODY = -1  # the life of a head that has not been joined


class Tie:
    """Every method that says so is a collective: all ranks call it in the same order."""

    def __init__(
        self,
        letterbox: Letterbox,
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
