"""When an actor that died is started again: counts its deaths in a row; knows no process and no clock."""

PAUSES_S = (0.0, 0.5, 1.0, 2.0, 4.0)  # before the first, second, ... start in a row without progress


class Restarts:
    """Of one actor, over all its incarnations in this start of the job."""

    def __init__(self, most: int) -> None:
        self.most = most  # launch.max_restarts
        self.n_crashes = 0  # in a row, without progress in between
        self._n_starts = 0  # in a row, those that it asked for included

    def after(self, *, crashed: bool, progressed: bool) -> float | None:
        """Seconds to wait before it is started again; None when it has crashed too often.

        `crashed` is false when it asked to come back, `progressed` true when the life that ended made any progress.
        """
        if progressed:
            self.n_crashes = self._n_starts = 0
        self.n_crashes += crashed
        if self.n_crashes > self.most:
            return None
        self._n_starts += 1
        return PAUSES_S[min(self._n_starts, len(PAUSES_S)) - 1]
