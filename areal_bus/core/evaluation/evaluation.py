"""One evaluation: fixed problems with n samples each. They use no credits of the gate and are never trained."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from math import fsum

from areal_bus.core.evaluation import evaluation_metrics as metrics
from areal_bus.core.parts.reward_parts import mean_fields
from areal_bus.errors import ImpossibleEvent, LateEvent
from areal_bus.messages import Sampled, Scored, VerdictStatus


@dataclass(slots=True)
class Evaluation:
    """Problems are queued, leased, and done with their last verdict. An error is counted, not scored 0 (I10)."""

    name: str
    version: int
    n_samples: int
    rows: list[str]  # JSON objects; uid = index
    waiting: list[int] = field(default_factory=list)
    leased: dict[int, str] = field(default_factory=dict)  # uid -> holder
    leased_at: dict[int, float] = field(default_factory=dict)  # uid -> monotonic seconds
    attempts: dict[int, int] = field(default_factory=dict)
    scored: dict[tuple[int, int], Scored] = field(default_factory=dict)  # (uid, sample) -> verdict
    failed: dict[int, str] = field(default_factory=dict)  # uid -> why it could not be sampled
    failed_at: dict[int, set[str]] = field(default_factory=dict)  # uid -> generators that could not sample it
    first_attempt: int = 0
    set_name: str = ""

    def __post_init__(self) -> None:
        self.waiting = list(range(len(self.rows)))

    @property
    def is_over(self) -> bool:
        return not self.waiting and not self.leased

    def first_of(self, may: Callable[[set[str]], bool]) -> int | None:
        """The next problem that may be leased, by the generators that failed at it."""
        return next((uid for uid in self.waiting if may(self.failed_at.get(uid, set()))), None)

    def lease(self, uid: int, holder: str, now: float = 0.0) -> None:
        """A waiting problem goes to `holder`."""
        self.waiting.remove(uid)
        self.leased[uid], self.leased_at[uid] = holder, now
        self.attempts[uid] = self.attempts.get(uid, self.first_attempt - 1) + 1

    def missing(self, uid: int) -> list[int]:
        return [i for i in range(self.n_samples) if (uid, i) not in self.scored]

    def lose(self, holder: str) -> None:
        """`holder` is gone: its problems wait again."""
        lost = [uid for uid, name in self.leased.items() if name == holder]
        for uid in lost:
            del self.leased[uid]
        self.waiting = sorted({*self.waiting, *lost})

    def give_back(self, uid: int, attempt: int) -> None:
        """Its holder will not finish the problem: it waits again."""
        self._check(uid, attempt)
        del self.leased[uid]
        self.waiting = sorted({*self.waiting, uid})

    def sampled(self, holder: str, message: Sampled) -> None:
        """A generator sent a sample to a reward. Its verdict, even the last of the problem, may have arrived first."""
        uid, is_held = message.uid, self.leased.get(message.uid, holder) == holder
        if not is_held or message.attempt != self.attempts.get(uid) or not 0 <= message.sample < self.n_samples:
            raise ImpossibleEvent(
                f"{holder} does not hold {self.name} {uid}/{message.sample}, attempt {message.attempt}"
            )

    def check(self, scored: Scored) -> None:
        """Raises ImpossibleEvent unless this is the first verdict of a sample that its generator holds."""
        self._check(scored.uid, scored.attempt)
        if scored.generator != self.leased[scored.uid]:
            holder = self.leased[scored.uid]
            raise ImpossibleEvent(f"{holder} holds {self.name} {scored.uid}; {scored.generator} claims a sample of it")
        if (scored.uid, scored.sample) in self.scored or not 0 <= scored.sample < self.n_samples:
            raise ImpossibleEvent(f"each sample of an evaluation is scored once; got {scored.uid}/{scored.sample}")

    def deliver(self, scored: Scored) -> None:
        """A verdict of an open problem's current attempt counts once. Raises as `check`."""
        self.check(scored)
        self.scored[scored.uid, scored.sample] = scored
        if not self.missing(scored.uid):
            del self.leased[scored.uid]

    def check_holder(self, name: str, uid: int) -> None:
        """Raises ImpossibleEvent unless this member holds the problem."""
        if self.leased.get(uid) != name:
            raise ImpossibleEvent(f"{name} does not hold {self.name} {uid}")

    def fail(self, uid: int, attempt: int, error: str) -> None:
        """The problem cannot be sampled."""
        self._check(uid, attempt)
        del self.leased[uid]
        self.failed[uid] = error

    def _check(self, uid: int, attempt: int) -> None:
        if uid not in self.leased or attempt != self.attempts[uid]:
            raise ImpossibleEvent(f"a verdict needs a leased problem; {self.name} {uid} attempt {attempt} is not")

    @property
    def values(self) -> list[Scored]:
        return [s for s in self.scored.values() if s.status == VerdictStatus.VALUE]

    @property
    def n_asked(self) -> int:
        """Answers that it should have."""
        return len(self.rows) * self.n_samples

    @property
    def accuracy(self) -> float | None:
        """Share of right answers among those that the task judged; None if it judged none."""
        judged = [s.correct for s in self.values if s.correct is not None]
        return sum(judged) / len(judged) if judged else None

    @property
    def reward(self) -> float | None:
        """Mean reward. The sum is exact, so it does not depend on the order of verdicts."""
        return fsum(s.reward for s in self.values) / len(self.values) if self.values else None

    def figures(self) -> dict[str, str | int | float | None]:
        """The result, for the journal and the console."""
        return {
            "name": self.name,
            "set": self.set_name,
            "version": self.version,
            **self.span(),
            "n": len(self.scored),
            "n_failed": len(self.scored) - len(self.values) + len(self.failed),
            "n_asked": self.n_asked,
            "n_missing": self.n_asked - len(self.values),
            "accuracy": self.accuracy,
            "reward": self.reward,
            **self.metrics(),
            **mean_fields(self.values),
        }

    def span(self) -> dict[str, int | float | None]:
        """Versions of the weights that sampled the answers: the oldest, the newest, and the mean over tokens."""
        spans = [span for scored in self.scored.values() for span in scored.spans]
        n_tokens = sum(n for _, n in spans)
        versions = [version for version, _ in spans]
        mean = sum(version * n for version, n in spans) / n_tokens if n_tokens else None
        return {
            "version_first": min(versions, default=None),
            "version_last": max(versions, default=None),
            "version_mean": mean,
        }

    def metrics(self) -> dict[str, int | float | None]:
        """avg@k with its standard error, maj@k and pass@k, over the answers that the task judged right or wrong."""
        by_row: dict[int, list[tuple[str, bool]]] = defaultdict(list)
        for (uid, _), scored in sorted(self.scored.items()):
            if scored.status == VerdictStatus.VALUE and scored.correct is not None:
                by_row[uid].append((metrics.final_answer(scored.text), scored.correct))
        rows = [[is_right for _, is_right in row] for row in by_row.values()]
        return {
            "k": self.n_samples,
            "avg_at_k": metrics.average(rows),
            "avg_at_k_se": metrics.standard_error(rows),
            "maj_at_k": metrics.majority(list(by_row.values())),
            "pass_at_k": metrics.pass_at(self.n_samples, rows),
        }


class Evaluations:
    """The open evaluation, if there is one, and the names of those that are closed."""

    def __init__(self) -> None:
        self.open: Evaluation | None = None
        self._closed: set[str] = set()  # names

    def named(self, name: str) -> Evaluation:
        """The open evaluation. Raises LateEvent if that name is closed by now, ImpossibleEvent if it is not open."""
        if self.open is None or self.open.name != name:
            error = LateEvent if name in self._closed else ImpossibleEvent
            raise error(f"evaluation {name!r} is not open")
        return self.open

    def close(self) -> Evaluation | None:
        """Close and return the evaluation if it has all its verdicts."""
        evaluation = self.open
        if evaluation is None or not evaluation.is_over:
            return None
        self.open = None
        self._closed.add(evaluation.name)
        return evaluation
