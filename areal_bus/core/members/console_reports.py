"""Console reports: dead members, one line each or one summary, and a warning when over 5 % of the scores fail."""

import re
from collections import Counter, deque
from dataclasses import dataclass

from areal_bus.core.parts.split import first_few
from areal_bus.messages import Scored, VerdictStatus

N_EACH = 3  # deaths that have a line of their own
WITHIN_S = 10.0  # within this time; later deaths are reported together after it
N_REASONS = 3


@dataclass(frozen=True, slots=True)
class Death:
    """A member that was declared dead."""

    name: str
    why: str


class Deaths:
    """Call `add` and `back` at each event, `tell` at every tick."""

    def __init__(self) -> None:
        self._new: list[Death] = []
        self._back: set[str] = set()  # of the new ones, those heard again
        self._told: deque[float] = deque(maxlen=N_EACH)  # when the last lines were

    def add(self, name: str, why: str) -> None:
        self._new.append(Death(name, why))

    def back(self, name: str) -> None:
        """The member was heard again."""
        self._back.add(name)

    def tell(self, now: float) -> list[str]:
        """The lines of this moment."""
        while self._told and now - self._told[0] >= WITHIN_S:
            self._told.popleft()
        room = N_EACH - len(self._told)
        if not self._new or not room:
            return []
        is_storm = len(self._new) > room
        lines = self.rest() if is_storm else [_line(death) for death in self._take()]
        self._told.extend([now] * (N_EACH if is_storm else len(lines)))
        return lines

    def rest(self) -> list[str]:
        """All deaths not yet reported, in at most one line."""
        back, new = self._back, self._take()
        if len(new) <= 1:
            return [_line(death) for death in new]
        names = list(dict.fromkeys(death.name for death in new))
        reasons = Counter(death.why for death in new).most_common()
        whys = [f"{why} ({n})" if len(reasons) > 1 else why for why, n in reasons[:N_REASONS]]
        more = [f"{len(reasons) - N_REASONS} more reasons"] if len(reasons) > N_REASONS else []
        again = len(back.intersection(names))
        tail = f"; {again} of them are heard again" if again else ""
        return [f"{_count(new, names)} for dead: {'; '.join([*whys, *more])}: {first_few(names)}{tail}"]

    def _take(self) -> list[Death]:
        new, self._new, self._back = self._new, [], set()
        return new


def _line(death: Death) -> str:
    return f"{death.name} is taken for dead: {death.why}"


def _count(new: list[Death], names: list[str]) -> str:
    n = len(names)
    who = "1 member was" if n == 1 else f"{n} members were"
    return f"{who} taken{f' {len(new)} times' if len(new) > n else ''}"


SHARE = 0.05  # share of failed scores above which a warning is due
FIRST = 40  # scores before the first warning, so that one early failure causes none
MOST_KINDS = 1000  # different errors that are counted
SHOWN = 300  # characters of an error
VARIES = re.compile(r"'[^']*'|\"[^\"]*\"|\d+(?:\.\d+)?")  # parts of an error text that differ between answers


class ScoreFailures:
    """Counts every accepted verdict of this head, in training and evaluation."""

    def __init__(self) -> None:
        self.n = 0
        self.n_by_status: Counter[str] = Counter()  # of those that failed
        self._kinds: Counter[str] = Counter()
        self._examples: dict[str, str] = {}  # kind -> the first error of it
        self._was_said = False

    @property
    def n_failed(self) -> int:
        return self.n_by_status.total()

    def add(self, scored: Scored) -> None:
        self.n += 1
        if scored.status == VerdictStatus.VALUE:
            return
        self.n_by_status[scored.status] += 1
        text = " ".join(scored.error.split())[:SHOWN] or f"no text with the {scored.status}"
        kind = VARIES.sub("*", text)
        if kind in self._kinds or len(self._kinds) < MOST_KINDS:
            self._kinds[kind] += 1
            self._examples.setdefault(kind, text)

    def warning(self) -> str | None:
        """The warning, returned once: after FIRST scores, as soon as more than SHARE of them failed."""
        if self._was_said or self.n < FIRST or not self._are_many:
            return None
        self._was_said = True
        return f"{self._sentence()}; reward.on_error, on_timeout and partial_groups say what becomes of such samples"

    def summary(self) -> str | None:
        """A sentence for the end of the run, if more than SHARE failed."""
        return f"over the whole run {self._sentence()}" if self._are_many else None

    @property
    def _are_many(self) -> bool:
        return self.n_failed > SHARE * self.n

    def _sentence(self) -> str:
        (kind, n_times), *_ = self._kinds.most_common(1)
        statuses = ", ".join(f"{n} {status}{'s' * (n != 1)}" for status, n in sorted(self.n_by_status.items()))
        share = f"{self.n_failed} of {self.n} scores failed ({100 * self.n_failed / self.n:.1f} %: {statuses})"
        return f"{share}; most often, {n_times} times: {self._examples[kind]}"
