"""What holds for every line of a process: its name, its clock and its term; its start is as it joined.

A `t` never goes back in one start. A term is one that the head has begun, and never goes back in one start.
"""

from tools.audit.journal_reader import JournalFile, Line
from tools.audit.replay.actor_logs import Evidence, Start

WALL_S = 0.1  # `wall_s` of an end line counts from just before the start line


class EveryLine:
    """Takes each line of one process in order."""

    def __init__(self, file: JournalFile, evidence: Evidence) -> None:
        self.file, self.evidence = file, evidence
        self.terms = {0} | {beginning.term for beginning in evidence.terms.all}
        role, _, place = file.name.partition("-")
        rank, _, inc = place.partition(".")
        self.writer = (role, rank, inc)
        self._t = self._began = float("-inf")
        self._term = self._told = 0

    def look(self, line: Line) -> None:
        if line["event"] == "start":
            self._t = self._began = line["t"]
            self._term = 0
            self.evidence.starts.setdefault(self.file.name, []).append(Start(line.get("pid"), line.get("host")))
        writer = (line["role"], str(line["rank"]), str(line["inc"]))
        if writer != self.writer:
            self.file.add("journal", f"a line has the name of its writer: {'-'.join(writer)} in {self.file.name}")
        if line["t"] < self._t:
            self.file.add("journal", f"the clock of a process never goes back: {line['t']} after {self._t}")
        self._t = line["t"]
        self._look_at_term(line["term"])
        if line["event"] == "end" and abs(line["wall_s"] - (self._t - self._began)) > WALL_S:
            text = f"wall_s counts from the start: {self._t - self._began:.3f} s, not {line['wall_s']}"
            self.file.add("I12", text)

    def _look_at_term(self, term: int) -> None:
        is_known = term in self.terms or not self.evidence.terms.all
        is_new, self._told = term != self._told, term
        if is_new and (not is_known or term < self._term):
            self.file.add("I6", f"terms are begun by the head and never go back: {term} after {self._term}")
        self._term = max(term, self._term) if is_known else self._term
