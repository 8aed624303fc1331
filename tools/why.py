"""Why a run stands where it stands, from its journal alone: alive, stalled, dead or over, and who waits for whom.

It reads what the processes wrote, so it says the same of a run that moves, hangs or was killed, on this host or not.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tools import run, terminal
from tools.processes import Process, process_of
from tools.run import Line, Run

SILENT_S = 15.0  # a process writes about once a second; the head does even when nothing happens
TAIL_BYTES = 1 << 18
FRESH_S = 7.0  # the head looks for new waits every 5 s: an older register still holds
N_SHOWN = 5

HEAD_EVENTS = ("start", "end", "failed", "member", "joined", "term", "update", "publish", "refused", "wait", "stall")
TEXTS = {  # fields that are read, by event
    "wait": ("who", "what", "on", "detail", "verdict"),
    "stall": ("scope", "action", "verdict"),
    "refused": ("what", "sender", "why"),
    "member": ("name",),
    "joined": ("name",),
}
NUMBERS = {"wait": ("i", "n", "since_s"), "term": ("term", "version"), "update": ("version",), "publish": ("version",)}
MORE = """\
Processes on this host are looked up in /proc; of others only the journal tells, 15 s later. Exit code: 0 the run is
alive and moves, or ended well; 1 it is stalled, interrupted, dead or ended with an error; 2 no such run."""


@dataclass(slots=True)
class WaitLine:
    """One line of the head's register of waits."""

    who: str
    what: str
    on: str  # names, with spaces between
    detail: str
    since_s: float  # how long, up to now; of a dead run up to the head's last line


@dataclass(slots=True)
class ActorStatus:
    """A place in the ring (generator-1) by its newest process."""

    name: str
    state: str  # by the head's last word; "" when it said none
    silent_s: float  # since its last line
    doing: str  # the label of most of its last second
    n_lives: int
    process: str = ""  # runs, stopped or gone; "" when this host cannot know
    pid: int = 0  # by its start line


@dataclass(slots=True)
class HeadStatus:
    """What the head of the last life wrote down."""

    version: int | None = None
    published: int | None = None
    term: int = 0
    states: dict[str, str] = field(default_factory=dict)
    hosts: dict[str, str] = field(default_factory=dict)  # by name; the head runs beside learner 0
    waits: list[Line] = field(default_factory=list)  # the last whole register
    register: list[Line] = field(default_factory=list)  # one that is being read
    stall: Line | None = None  # of the ring, as long as it lasts
    stalls: list[Line] = field(default_factory=list)  # the last ones, of members too
    n_refused: int = 0
    refused: Line | None = None
    end: Line | None = None
    error: str = ""

    def take(self, line: Line) -> None:
        event = line["event"]
        if event in ("member", "joined"):
            self.states[line["name"]] = str(line.get("state", "joining"))
            if event == "joined":
                self.hosts[line["name"]] = str(line.get("host", ""))
        elif event == "term":
            self.term, self.version, self.published = line["term"], line["version"], line["version"]
        elif event == "update":
            self.version = line["version"]
        elif event == "publish":
            self.published = line["version"]
        elif event == "refused":
            self.n_refused, self.refused = self.n_refused + 1, line
        elif event == "wait":
            self._register(line)
        elif event == "stall":
            self._stall(line)
        elif event == "failed" and "name" not in line:
            self.error = str(line.get("error", ""))
        elif event == "end":
            self.end = line

    def _register(self, line: Line) -> None:
        """A register counts when its last line is there."""
        self.register = [line] if line["i"] == 0 else [*self.register, line]
        if len(self.register) >= line["n"]:
            self.waits = self.register if line["n"] else []

    def _stall(self, line: Line) -> None:
        if line["scope"] == "ring":
            self.stall = None if line["action"] == "over" else line
        if line["action"] != "over":
            self.stalls = [*self.stalls, line][-N_SHOWN:]


@dataclass(slots=True)
class WhyReport:
    """What there is to say."""

    run: str
    state: str  # alive, stalled, interrupted, dead, ended, failed
    sentence: str
    term: int
    version: int | None  # newest update; None before the first
    published: int | None
    waits: list[WaitLine]
    waits_age_s: float | None  # since the head registered them; None when there are none
    verdict: str  # the head's last one
    verdict_age_s: float | None  # up to now; None when there is no verdict
    stalls: list[str]
    actors: list[ActorStatus]
    restarts: list[str]
    n_refused: int
    refused: str  # the last one

    @property
    def is_well(self) -> bool:
        return self.state in ("alive", "ended")


def look(where: Run, now: float) -> WhyReport:
    """Judge the run by its journal, at `now` (wall time)."""
    head, lives = HeadStatus(), _lives(where)
    for line in where.events(*HEAD_EVENTS, role="head"):
        if not _is_whole(line):
            print(f"the head's line {line.get('seq')} ({line['event']}) is damaged and passed over", file=sys.stderr)
            continue
        if line["event"] == "start":
            head = HeadStatus(n_refused=head.n_refused, refused=head.refused)
        head.take(line)
    actors = [_actor(place, starts, head, now) for place, starts in lives.items()]
    state, sentence = _judge(head, actors, was_asked=_was_asked_to_end(where), crash=_crash(where, actors))
    silences = [actor.silent_s for actor in actors if actor.name.startswith("head-")]
    until = now if state in ("alive", "stalled") else now - min(silences, default=0.0)
    verdicts = [line for line in (*head.waits[:1], *([head.stall] if head.stall else ())) if line["verdict"]]
    last = max(verdicts, key=lambda line: float(line["wall"]), default=None)
    return WhyReport(
        run=str(where.folder),
        state=state,
        sentence=sentence,
        term=head.term,
        version=head.version,
        published=head.published,
        waits=[] if head.end is not None else [_wait(line, until) for line in head.waits],
        waits_age_s=round(max(0.0, now - float(head.waits[0]["wall"])), 3) if head.waits else None,
        verdict="" if last is None or head.end is not None else str(last["verdict"]),
        verdict_age_s=None if last is None else round(max(0.0, now - float(last["wall"])), 3),
        stalls=[f"{_clock(line)} {line['verdict']} ({line['action']})" for line in head.stalls],
        actors=actors,
        restarts=_restarts(lives),
        n_refused=head.n_refused,
        refused=""
        if head.refused is None
        else f"{head.refused['what']} of {head.refused['sender']}: {head.refused['why']}",
    )


def _is_whole(line: Line) -> bool:
    """Whether the fields that are read here are there and of their type."""
    event = line["event"]
    are_texts = all(isinstance(line.get(key), str) for key in TEXTS.get(event, ()))
    return are_texts and all(run.is_number(line.get(key)) for key in ("wall", *NUMBERS.get(event, ())))


def _was_asked_to_end(where: Run) -> bool:
    """A job that a signal ends removes RUN/pid; one that is killed leaves it."""
    return bool(where.origin()) and not (where.folder / "pid").exists()


def _crash(where: Run, actors: list[ActorStatus]) -> str:
    """The error of an actor whose newest incarnation ended with one: its last line, and the traceback's path."""
    for actor in actors:
        path = where.folder / "logs" / f"{actor.name}.error.txt"
        if path.exists():
            error = path.read_text(errors="replace").strip().rpartition("\n")[2]
            return f"{actor.name}: {error}; full traceback: {path}"
    return ""


def _judge(head: HeadStatus, actors: list[ActorStatus], *, was_asked: bool, crash: str) -> tuple[str, str]:
    """State and sentence. The head's file decides: it alone writes whatever happens."""
    if head.end is not None and head.end.get("code") == 0:
        return "ended", f"it ended: {head.end.get('reason', 'done')}"
    if head.end is not None:
        return "failed", f"it ended: {head.end.get('reason') or head.error or 'without a reason'}"
    silences = {actor.name: actor.silent_s for actor in actors}
    silent_s = next((s for name, s in silences.items() if name.startswith("head-")), None)
    heard = sorted(actor.name for actor in actors if _is_heard(actor))
    if not heard:
        return _dead(head, min(silences.values()), was_asked=was_asked, crash=crash)
    stopped = [actor for actor in actors if actor.process == Process.STOPPED]
    if stopped:
        names, verb = ", ".join(x.name for x in stopped[:N_SHOWN]), "is" if len(stopped) == 1 else "are"
        pids = " ".join(str(pid) for pid in sorted({actor.pid for actor in stopped}))
        return (
            "stalled",
            f"it is stalled: {names} {verb} stopped by SIGSTOP or a debugger (to go on: kill -CONT {pids})",
        )
    if any(actor.process == Process.GONE and actor.name.startswith("head-") for actor in actors):
        return "stalled", f"the head's process is gone, while {', '.join(heard[:N_SHOWN])} wait for its next life"
    if silent_s is None:
        return "alive", "it begins: no head has written yet"
    if silent_s > SILENT_S:
        others = f"{', '.join(heard[:N_SHOWN])}{' and others' if len(heard) > N_SHOWN else ''}"
        return (
            "stalled",
            f"the head has been silent for {_seconds(silent_s)}, while {others} still write and wait for it",
        )
    if head.stall is not None:
        return "stalled", f"it is stalled: {head.stall['verdict']}"
    return "alive", "it is alive and moves"


def _is_heard(actor: ActorStatus) -> bool:
    """Whether its process is there, as far as this host knows; else whether it has written of late."""
    if actor.process == Process.UNKNOWN:
        return actor.silent_s <= SILENT_S
    return actor.process != Process.GONE


def _dead(head: HeadStatus, least_s: float, *, was_asked: bool, crash: str) -> tuple[str, str]:
    """Nobody is there, and the head wrote no end."""
    since = f"nobody has written for {_seconds(least_s)}"
    if head.error:
        return "dead", f"it is dead: {since}, and the head failed: {head.error}"
    if was_asked and crash:
        return "failed", f"it failed: {crash}"
    if was_asked:
        return "interrupted", f"it was interrupted by a signal (Ctrl-C or SIGTERM): {since}"
    return "dead", f"it is dead: {since}, and there is no end line: it was killed, or its host is gone"


# one file a process

Start = tuple[str, float, Path]  # name, wall, file


def _lives(where: Run) -> dict[str, list[Start]]:
    """Starts by place in the ring, in order."""
    found: dict[str, list[Start]] = {}
    for path in where.journals():
        name = path.name.removesuffix(".jsonl")
        starts = [float(line["wall"]) for line in run.lines(path, "start")]
        found.setdefault(name.rpartition(".")[0], []).extend((name, wall, path) for wall in starts or [0.0])
    return {place: sorted(starts, key=lambda start: start[1]) for place, starts in found.items()}


def _actor(place: str, starts: list[Start], head: HeadStatus, now: float) -> ActorStatus:
    name, began, path = starts[-1]
    last = _tail(path)
    silent_s = max(0.0, now - float(last[-1]["wall"] if last else began))
    doing = ""
    for line in reversed(last):
        if line["event"] in ("end", "failed"):
            doing = "ended" if line["event"] == "end" else "failed"
            break
        if line["event"] == "spans":
            spans = {key[2:]: value for key, value in line.items() if key.startswith("s_") and run.is_number(value)}
            doing = max(spans, key=lambda label: spans[label], default="")
            break
    state = head.states.get(name, "") if place != "head-0" else ""
    known = name if place != "head-0" else next((x for x in reversed(head.hosts) if x.startswith("learner-0.")), "")
    pid = _pid(path)
    process = process_of(path, pid, head.hosts.get(known, ""))
    return ActorStatus(name, state, round(silent_s, 3), doing, len(starts), str(process), pid)


def _pid(path: Path) -> int:
    """Of the newest life in this file; 0 when it does not say."""
    pids = [line.get("pid", 0) for line in run.lines(path, "start")]
    return pids[-1] if pids and isinstance(pids[-1], int) else 0


def _tail(path: Path) -> list[Line]:
    """The whole lines in the last piece of a file; a torn one at either end is left out."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - TAIL_BYTES))
        pieces = file.read().split(b"\n")[1 if size > TAIL_BYTES else 0 : -1]
    found = []
    for piece in pieces:
        try:
            line = json.loads(piece)
        except ValueError:
            continue
        if isinstance(line, dict) and run.is_number(line.get("wall")) and "event" in line:
            found.append(line)
    return found


def _restarts(lives: dict[str, list[Start]]) -> list[str]:
    """The last lives that are not the first of their place."""
    later = [start for starts in lives.values() for start in starts[1:]]
    return [f"{_clock({'wall': wall})} {name}" for name, wall, _ in sorted(later, key=lambda x: x[1])[-N_SHOWN:]]


# words


def _wait(line: Line, until: float) -> WaitLine:
    """Its duration goes on when the head, looking again, has found nothing new."""
    age_s = until - float(line["wall"])
    since_s = float(line["since_s"]) + (age_s if age_s > FRESH_S else 0.0)
    return WaitLine(line["who"], line["what"], line["on"], line["detail"], round(since_s, 3))


def _clock(line: Line) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(line["wall"])))


def _seconds(s: float) -> str:
    return f"{s:.1f} s" if s < 10 else f"{s:.0f} s" if s < 600 else f"{s / 60:.0f} min"


def show(report: WhyReport) -> list[str]:
    """The report for people."""
    versions = "no update yet" if report.version is None else f"version {report.version}"
    out = [f"{report.run}: {report.sentence}", f"term {report.term}, {versions}, published {report.published}"]
    if report.verdict:
        out.append(f"the head's last verdict, {_seconds(report.verdict_age_s or 0.0)} ago: {report.verdict}")
    if report.waits:
        out += ["", f"waits, {_seconds(report.waits_age_s or 0.0)} ago"]
        rows = [(f"  {_seconds(w.since_s)}", w.who, w.what, w.detail) for w in report.waits]
        out += terminal.columns(rows, right=frozenset({0}))
    out += ["", "actors"]
    rows_of = [("  name", "state", "process", "last line", "busy with", "lives")]
    rows_of += [
        (f"  {a.name}", a.state, a.process, f"{_seconds(a.silent_s)} ago", a.doing, str(a.n_lives))
        for a in report.actors
    ]
    out += terminal.columns(rows_of)
    for title, lines in (("stalls", report.stalls), ("restarts", report.restarts)):
        out += ["", title, *(f"  {line}" for line in lines)] if lines else []
    if report.n_refused:
        out += ["", f"{report.n_refused} messages refused, the last: {report.refused}"]
    return [terminal.quote(line, indent="", width=10_000) for line in out]  # a stranger's name may be any text


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        "python -m tools.why",
        description="Show whether a run is alive, stalled, dead or over, and who waits for whom since when.",
        epilog=MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("run", nargs="?", metavar="RUN", help="folder of the run, or its name below runs/ (runs/latest)")
    p.add_argument("--json", action="store_true", help="one JSON object on one line")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    report = look(run.find(args.run), time.time())
    print(json.dumps(asdict(report)) if args.json else "\n".join(show(report)))
    return 0 if report.is_well else 1


if __name__ == "__main__":
    terminal.end(main)
