"""What went wrong in a run: deaths, restarts, stalls, failures, undone versions, broken pushes and refunds."""

from collections import Counter
from dataclasses import dataclass, field

from tools.report.facts.curves import StepBins
from tools.run import Line, skips_incomplete

EVENTS = ("start", "member", "stall", "failed", "term", "collapse", "push_broken", "refund", "refused", "admit",
          "update")  # fmt: skip
MAX_KEPT = 200  # incidents with their text; all are counted


@dataclass(frozen=True, slots=True)
class Incident:
    """One event, for people."""

    wall: float  # seconds since 1970
    kind: str  # restart, death, stall, failure, undone, collapse, broken push
    who: str
    text: str


@dataclass(slots=True)
class Incidents:
    """Takes lines of EVENTS of all processes, in the order of their wall time."""

    kept: list[Incident] = field(default_factory=list)
    n_of: Counter[str] = field(default_factory=Counter)  # kind -> number
    n_undone: int = 0  # versions
    n_admitted: int = 0
    n_refused: int = 0
    refunds: Counter[str] = field(default_factory=Counter)  # reason -> prompts
    by_step: StepBins = field(default_factory=StepBins)  # reason -> prompts, by the version in the making
    _started: set[str] = field(default_factory=set)
    _version: int = 0

    @skips_incomplete
    def take(self, line: Line) -> None:
        """Take one line. A line without the fields of its event is ignored."""
        getattr(self, f"_on_{line['event']}")(line)

    def _keep(self, line: Line, kind: str, who: str, text: str) -> None:
        self.n_of[kind] += 1
        if len(self.kept) < MAX_KEPT:
            self.kept.append(Incident(float(line["wall"]), kind, who, text))

    def _on_start(self, line: Line) -> None:
        place = f"{line['role']}-{line['rank']}"
        if place in self._started:
            self._keep(line, "restart", f"{place}.{line['inc']}", "started again")
        self._started.add(place)

    def _on_member(self, line: Line) -> None:
        if line["state"] == "dead":
            self._keep(line, "death", str(line["name"]), str(line.get("why", "")))

    def _on_stall(self, line: Line) -> None:
        if line["action"] != "over":
            self._keep(line, "stall", str(line.get("on", "")), f"{line['verdict']} ({line['action']})")

    def _on_failed(self, line: Line) -> None:
        if "name" not in line:  # with a name, the head repeats what another actor wrote
            self._keep(line, "failure", f"{line['role']}-{line['rank']}.{line['inc']}", str(line.get("error", "")))

    def _on_term(self, line: Line) -> None:
        version = int(line["version"])
        if version < self._version:
            lost = self._version - version
            self.n_undone += lost
            self._keep(line, "undone", "learner", f"{lost} versions are undone; training continues from {version}")
        self._version = version

    def _on_collapse(self, line: Line) -> None:
        self._keep(line, "collapse", "head", f"ahead at version {line['version']}: {line['why']} ({line['action']})")

    def _on_update(self, line: Line) -> None:
        self._version = int(line["version"])

    def _on_push_broken(self, line: Line) -> None:
        if line["role"] == "head":
            text = f"push of version {line['version']}: {line.get('error', '')}"
            self._keep(line, "broken push", str(line.get("name", "")), text)

    def _on_refund(self, line: Line) -> None:
        reason = str(line["reason"])
        self.refunds[reason] += 1
        self.by_step.add(reason, self._version + 1, 1)

    def _on_refused(self, line: Line) -> None:
        self.n_refused += 1

    def _on_admit(self, line: Line) -> None:
        self.n_admitted += 1
