"""Terms: the state at the beginning of each, and what a later term undoes.

All `term` lines are read before any other line, so that work which does not survive is recognised at once.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.audit.journal_reader import Line, find

ATTEMPTS = 1000  # leases of term t have the attempts t * ATTEMPTS and up


@dataclass(frozen=True, slots=True)
class TermStart:
    """One `term` line of the head: it restores the state at the end of update `version`."""

    term: int
    version: int
    next_uid: int
    position: int  # rows drawn from the data
    open: Mapping[int, frozenset[int]]  # prompt -> its samples whose verdicts are kept
    compared: frozenset[int] = frozenset()  # open prompts that keep the verdict of their group
    lives_on: bool = False  # no update of the learner is undone: the state is that after batch V - 1, or a later one
    restored: bool = (
        False  # it lives on as a copy in memory. The state is all that the same head had: nothing is undone
    )


def read(line: Line) -> TermStart:
    """Raises ValueError (KeyError, TypeError) when the line is damaged."""
    numbers = [line[name] for name in ("term", "version", "next_uid", "position")]
    uids, kept = line["open"], line["kept"]
    open_ = {uid: frozenset(samples) for uid, samples in zip(uids, kept, strict=True)}
    if len(open_) != len(uids) or not all(type(n) is int and n >= 0 for n in [*numbers, *open_]):
        raise ValueError("numbers count from 0, and each prompt is open once")
    term, version, next_uid, position = numbers
    compared = frozenset(line.get("compared", ()))
    how = (line.get(name, False) is True for name in ("lives_on", "restored"))
    return TermStart(term, version, next_uid, position, open_, compared, *how)


class TermLog:
    """All terms of a run, in the order of the head's incarnations; `begin` moves on to the next."""

    def __init__(self, all_: Sequence[TermStart] = ()) -> None:
        self.all = tuple(all_)
        self.n_begun = 0
        self._least_version = _least([b.version for b in self.all])
        self._least_uid = _least([b.next_uid for b in self.all])
        self._open_later = Counter(uid for b in self.all for uid in b.open)

    def begin(self, beginning: TermStart) -> None:
        self.n_begun += 1
        self._open_later.subtract(dict.fromkeys(beginning.open, 1))

    def undo_step(self, step: int) -> bool:
        """Whether a later term begins before this batch."""
        return step >= self._least_version[min(self.n_begun, len(self.all))]

    def undo_prompt(self, uid: int) -> bool:
        """Whether a later term undoes this end of the prompt: it has the prompt open, or erases it."""
        return uid >= self._least_uid[min(self.n_begun, len(self.all))] or self._open_later[uid] > 0

    def base(self, *, after: int, to: int) -> int | None:
        """The newest version of term `after` that counts in term `to`; None without a `term` line."""
        return min((b.version for b in self.all if after < b.term <= to), default=None)

    def maker(self, version: int, *, before: int) -> int | None:
        """The term that made this version of the surviving history, by the first `before` terms."""
        return next((b.term for b in reversed(self.all[:before]) if b.version < version or not version), None)


def scan(paths: Sequence[Path]) -> TermLog:
    """The terms in these files of the head; damaged lines are skipped."""
    found = []
    for path in paths:
        for line in find(path, "term"):
            try:
                found.append(read(line))
            except (ValueError, KeyError, TypeError):
                continue
    return TermLog(found)


def _least(values: Sequence[int]) -> list[float]:
    """For each index the smallest value from there on; infinity at the end."""
    out: list[float] = [float("inf")]
    for value in reversed(values):
        out.append(min(out[-1], value))
    return out[::-1]
