"""Evaluations: which one is due, its open problems, and its metrics (avg@k, maj@k, pass@k). Pure.

An evaluation takes fixed problems with n samples each. They use no credits of the gate and are never trained. The
figures of finished evaluations are part of every head checkpoint, so a resumed run decides the same.

A *row* is one problem: its answers that the task judged right or wrong. Answers without a verdict are left out before
(I10). All metrics are means over rows; a row without a judged answer does not count. Sums are exact, so that the order
of rows makes no difference.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum

from areal_bus.core.parts.reward_parts import mean_fields
from areal_bus.errors import ImpossibleEvent, LateEvent
from areal_bus.messages import Finish, Sampled, Scored, VerdictStatus

LEAST_SHARE = 0.95  # of the answers that an evaluation needs to decide anything
STEP = "step-"  # names of evaluations in training: step-8, step-8:SET
ENDS = ("before", "after")  # and of the others

Figures = Mapping[str, Mapping[str, str | int | float | None]]


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """Problems that are evaluated together."""

    name: str  # "" for the problems of [evaluate] itself
    n_samples: int
    problems: tuple[str, ...]  # JSON objects
    max_new_tokens: int | None = None  # its own limit; None: that of its source or the run


def name_of(when: str, problems: EvaluationSet) -> str:
    """The name of an evaluation: "before", "step-8:aime"."""
    return f"{when}:{problems.name}" if problems.name else when


def first_missing(when: str, sets: tuple[EvaluationSet, ...], figures: Figures) -> EvaluationSet | None:
    """The first set without figures of this moment."""
    return next((problems for problems in sets if name_of(when, problems) not in figures), None)


def due(
    version: int, *, every: int, sets: tuple[EvaluationSet, ...], figures: Figures
) -> tuple[str, EvaluationSet] | None:
    """The evaluation due at this version (moment and set), of the set evaluated longest ago. None: all are done.

    Moments are multiples of `every` above 0; of several that have passed, only the last one is evaluated.
    """
    step = version - version % every if every else 0
    when = f"{STEP}{step}"
    waiting = [problems for problems in sets if name_of(when, problems) not in figures]
    if not step or not waiting:
        return None

    def newest(problems: EvaluationSet) -> int:
        return max((version for version, _ in _values(problems.name, "k", figures, of_step=True)), default=0)

    return when, min(waiting, key=newest)


def history(set_name: str, metric: str, figures: Figures, *, with_ends: bool = False) -> list[tuple[int, float]]:
    """(version, metric) of a set's evaluations that decide, oldest first. `with_ends`: those around training, too."""
    figures = {name: found for name, found in figures.items() if decides(found)}
    found = sorted(_values(set_name, metric, figures, of_step=True))
    if not with_ends:
        return found
    ends = dict(sorted(_values(set_name, metric, figures, of_step=False)))
    return sorted((dict(found) | ends).items())


def decides(found: Mapping[str, str | int | float | None]) -> bool:
    """Whether keep_best and early stopping count an evaluation: it has LEAST_SHARE of its answers."""
    n_asked, n_missing = found.get("n_asked"), found.get("n_missing")  # None: of an older run
    if not isinstance(n_asked, int) or not isinstance(n_missing, int):
        return True
    return n_asked - n_missing >= LEAST_SHARE * n_asked


def _values(set_name: str, metric: str, figures: Figures, *, of_step: bool) -> Iterator[tuple[int, float]]:
    for name, found in figures.items():
        moment, _, of = name.partition(":")
        version, value = found.get("version"), found.get(metric)
        is_wanted = of == set_name and (moment.startswith(STEP) if of_step else moment in ENDS)
        if is_wanted and isinstance(version, int) and isinstance(value, int | float):
            yield version, value


def best(values: list[tuple[int, float]]) -> tuple[int, float] | None:
    """The oldest of the best values, with its version."""
    return max(values, key=lambda value: (value[1], -value[0]), default=None)


def has_stopped_improving(values: list[tuple[int, float]], *, patience: int) -> bool:
    """Whether the last `patience` evaluations did not exceed the best one before them. Never for a patience of 0."""
    if not patience or len(values) <= patience:
        return False
    before, last = values[:-patience], values[-patience:]
    return max(value for _, value in last) <= max(value for _, value in before)


Row = Sequence[bool]  # the judged answers of one problem
Voters = Sequence[tuple[str, bool]]  # (final answer, whether it is right) of one problem

READ = 50_000  # characters at the end of a completion that are searched for its final answer
BOX = "\\boxed"
BRACES = re.compile(r"\\boxed\s*\{|[{}]")
MARK = re.compile(r"####[ \t]*([^\n]+)|<answer>")
CLOSING = "</answer>"
NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?")


def average(rows: Sequence[Row]) -> float | None:
    """avg@k, which is also the estimate of pass@1: the mean over rows of the share of right answers."""
    shares = _shares(rows)
    return math.fsum(shares) / len(shares) if shares else None


def standard_error(rows: Sequence[Row]) -> float | None:
    """Standard error of `average` over rows: sample deviation / sqrt(rows). None for fewer than two rows."""
    shares = _shares(rows)
    if len(shares) < 2:
        return None
    mean = sum(shares) / len(shares)
    variance = sum((share - mean) ** 2 for share in shares) / (len(shares) - 1)
    return math.sqrt(variance / len(shares))


def pass_at(k: int, rows: Sequence[Row]) -> float | None:
    """pass@k: the probability that k answers, drawn without replacement from a row's n, hold a right one.

    Unbiased: 1 - C(n - c, k) / C(n, k) with c right answers (Chen et al. 2021, arXiv 2107.03374). Rows with fewer than
    k answers are left out; None when no row has k. Raises ValueError for k < 1.
    """
    if k < 1:
        raise ValueError(f"pass@k needs k of at least 1; got {k}")
    found = [1 - math.comb(len(row) - sum(row), k) / math.comb(len(row), k) for row in rows if len(row) >= k]
    return math.fsum(found) / len(found) if found else None


def majority(rows: Sequence[Voters]) -> float | None:
    """maj@k: the share of rows whose most frequent answer is right; n equally frequent ones count 1/n each."""
    found = [_majority(row) for row in rows if row]
    return math.fsum(found) / len(found) if found else None


def final_answer(text: str) -> str:
    """The final answer in a completion, by which answers are equal for the vote.

    The last box, else the last "####" line or <answer>, else the last number, else the whole text. Spaces, case,
    thousands separators, dollars and a last full stop are removed. Only the last READ characters count, and the time is
    linear in them: the head calls this.
    """
    text = text[-READ:]
    answer = _last_box(text)
    if answer is None:
        answer = _last_marked(text)
    if answer is None:
        numbers = NUMBER.findall(text)
        answer = numbers[-1] if numbers else text
    plain = re.sub(r"(?<=\d),(?=\d{3})", "", answer)
    return re.sub(r"[\s$]+", "", plain).rstrip(".").casefold()


def _shares(rows: Sequence[Row]) -> list[float]:
    return [sum(row) / len(row) for row in rows if row]


def _majority(row: Voters) -> float:
    verdicts: dict[str, list[bool]] = defaultdict(list)
    for answer, is_right in row:
        verdicts[answer].append(is_right)
    most = max(map(len, verdicts.values()))
    tied = [sum(group) / len(group) for group in verdicts.values() if len(group) == most]
    return sum(tied) / len(tied)


def _last_box(text: str) -> str | None:
    """The content of the last \\boxed{...} whose braces are balanced."""
    first = text.find(BOX)
    last, end = -1, -1
    opened: list[int] = []  # begin of the content of each open box; -1 for another brace
    for brace in BRACES.finditer(text, first, text.rfind("}") + 1) if first >= 0 else ():
        token = brace[0]
        if token == "{":
            opened.append(-1)
        elif token != "}":
            opened.append(brace.end())
        elif opened and (begin := opened.pop()) > last:
            last, end = begin, brace.start()
    return text[last:end] if last >= 0 else None


def _last_marked(text: str) -> str | None:
    """The rest of the last "####" line, or the content of the last <answer>, whichever comes later."""
    found, at, last_closing = None, 0, text.rfind(CLOSING)
    while mark := MARK.search(text, at):
        found, at = mark[1] or found, mark.end()
        if not mark[1] and at <= last_closing:
            end = text.index(CLOSING, at)
            found, at = text[at:end], end + len(CLOSING)
    return found


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
    max_new_tokens: int | None = None  # as in its set

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
            sample = f"{self.name} {uid}/{message.sample}, attempt {message.attempt}"
            raise ImpossibleEvent(f"{holder} does not hold {sample}")

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
            raise ImpossibleEvent(f"unexpected verdict: {self.name} {uid} is not leased at attempt {attempt}")

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
    def completed_accuracy(self) -> float | None:
        """Share of the judged answers that are right and ended by an accepted stop; None if the task judged none."""
        judged = [s for s in self.values if s.correct is not None]
        return sum(s.correct is True and s.finish == Finish.STOP for s in judged) / len(judged) if judged else None

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
            "completed_accuracy": self.completed_accuracy,
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
        first, last = min(versions, default=None), max(versions, default=None)
        return {"version_first": first, "version_last": last, "version_mean": mean}

    def metrics(self) -> dict[str, int | float | None]:
        """avg@k with its standard error, maj@k and pass@k, over the answers that the task judged right or wrong."""
        by_row: dict[int, list[tuple[str, bool]]] = defaultdict(list)
        for (uid, _), scored in sorted(self.scored.items()):
            if scored.status == VerdictStatus.VALUE and scored.correct is not None:
                by_row[uid].append((final_answer(scored.text), scored.correct))
        rows = [[is_right for _, is_right in row] for row in by_row.values()]
        return {
            "k": self.n_samples,
            "avg_at_k": average(rows),
            "avg_at_k_se": standard_error(rows),
            "maj_at_k": majority(list(by_row.values())),
            "pass_at_k": pass_at(self.n_samples, rows),
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
