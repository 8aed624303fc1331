"""I11 between two lines of the head: a long silence in which nobody is at work, and somebody could be."""

from tools.audit.clock import Clock
from tools.audit.members import Members
from tools.audit.prompts import Prompts
from tools.audit.reading import File, Line
from tools.audit.setup import Setup


class Stalls:
    """`hear` every event of the head, `look` at the end of a life."""

    def __init__(self, setup: Setup, file: File, clock: Clock, prompts: Prompts, members: Members) -> None:
        self.setup, self.file = setup, file
        self.clock, self.prompts, self.members = clock, prompts, members
        self._heard = 0.0  # when the last event was, by the time of a head that never stood still

    def begin(self, t: float) -> None:
        self._heard = t - self.file.still_s

    def hear(self, line: Line) -> None:
        """The silence before the line. When a learner joins next, all waited for what it begins with."""
        patience_s = self.setup.patience_s
        t = line["t"] - self.file.still_s
        if patience_s is not None and t - self._heard > patience_s and not _is_learner_back(line):
            self.look(line["t"])
        self._heard = t

    def look(self, t: float) -> None:
        """Nobody at work, a generator there, prompts live and every deadline past: everyone waits."""
        patience_s, size = self.setup.patience_s, self.setup.batch_size
        prompts, clock = self.prompts, self.clock
        silent_s = t - self.file.still_s - self._heard
        if patience_s is None or size is None or silent_s <= patience_s or not prompts.open:
            return
        n_at_work = len(prompts.open) - prompts.n_ready - prompts.n_queued
        if n_at_work == 0 and clock.w == clock.u and prompts.n_ready < size and self.members.any_waits:
            text = (
                f"no state has everyone waiting: {silent_s:.0f} s without an event; {len(prompts.open)} prompts "
                f"live, {prompts.n_ready} ready, {prompts.n_queued} queued, none sampled, trained or scored"
            )
            self.file.add("I11", text)


def _is_learner_back(line: Line) -> bool:
    return line["event"] == "joined" and str(line["name"]).startswith("learner-")
