"""Reports from files alone whether a run is alive, stalled, dead or over, and which actor waits for which."""

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from areal_bus.storage.journal_segments import tail
from tools import run, terminal
from tools.run import Line, Run
from tools.run_status import HEAD_EVENTS, MAX_SHOWN, HeadStatus, Process, RunStatus, Start, process_of, stopped_below
from tools.terminal import run_parser

SILENT_S = 15.0  # a process writes about once a second, the head also when nothing happens
TAIL_BYTES = 1 << 18
LOOP = ("reference-", "front-")  # the one process of a run without a ring (tools/offline), or of a server
REGISTER_INTERVAL_S = 7.0  # the head checks the waits every 5 s and writes changes: an older register is still valid

EPILOG = """\
The state of processes on this host comes from /proc, of others from the journal, 15 s later. Exit code: 0 the run is
alive, or ended without an error; 1 it is stalled, interrupted, dead or ended with an error; 2 no such run."""


@dataclass(slots=True)
class WaitLine:
    """One line of the head's register of waits."""

    who: str
    what: str
    on: str  # names, separated by spaces
    detail: str
    since_s: float  # duration until now; for a dead run until the head's last line


@dataclass(slots=True)
class ActorStatus:
    """The newest incarnation of an actor."""

    name: str
    state: str  # the last one that the head wrote; "" without one, and in a run that is over
    silent_s: float  # since its last line
    doing: str  # the largest label of its last second
    n_lives: int  # incarnations
    process: str = ""  # runs, stopped or gone; "" if unknown on this host
    pid: int = 0  # in its start line


@dataclass(slots=True)
class WhyReport:
    """The report; `--json` prints these fields."""

    run: str
    state: str  # alive, stalled, interrupted, dead, ended, failed
    sentence: str
    term: int
    version: int | None  # newest update; None before the first one
    published: int | None
    waits: list[WaitLine]
    waits_age_s: float | None  # since the head wrote them; None without waits
    verdict: str  # the last one of the head
    verdict_age_s: float | None  # None without a verdict
    stalls: list[str]
    actors: list[ActorStatus]
    restarts: list[str]
    n_refused: int
    refused: str  # the last one

    @property
    def is_well(self) -> bool:
        return self.state in ("alive", "ended")


def make_report(where: Run, now: float) -> WhyReport:
    status = RunStatus(where)
    for line in where.events(*HEAD_EVENTS):
        status.take(line)
    return report_of(status, now)


def report_of(status: RunStatus, now: float) -> WhyReport:
    """The report at `now` from the lines that were read; it also reads the ends of the files and /proc."""
    where, head, starts_of = status.where, status.head, status.starts_by_actor()
    actors = [_actor(place, starts, head, now) for place, starts in starts_of.items()]
    state, sentence = _state_and_sentence(head, actors, was_asked=_was_asked_to_end(where), crash=_crash(where, actors))
    if state not in ("alive", "stalled"):
        actors = [replace(actor, state="") for actor in actors]
    silences = [actor.silent_s for actor in actors if actor.name.startswith("head-")]
    until = now if state in ("alive", "stalled") else now - min(silences, default=0.0)
    verdicts = [line for line in (*head.waits[:1], *([head.stall] if head.stall else ())) if line["verdict"]]
    last = max(verdicts, key=lambda line: float(line["wall"]), default=None)
    refused = head.refused
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
        stalls=[f"{_format_time(line)} {line['verdict']} ({line['action']})" for line in head.stalls],
        actors=actors,
        restarts=_restarts(starts_of),
        n_refused=head.n_refused,
        refused="" if refused is None else f"{refused['what']} of {refused['sender']}: {refused['why']}",
    )


def _was_asked_to_end(where: Run) -> bool:
    """Whether a signal ended the job: then it removed RUN/pid. A killed job leaves it."""
    return bool(where.origin()) and not (where.folder / "pid").exists()


def _crash(where: Run, actors: list[ActorStatus]) -> str:
    """The last line and the path of the traceback of an actor whose newest incarnation crashed; "" without one."""
    for actor in actors:
        path = where.folder / "logs" / f"{actor.name}.error.txt"
        if path.exists():
            error = path.read_text(errors="replace", encoding="utf-8").strip().rpartition("\n")[2]
            return f"{actor.name}: {error}; full traceback: {path}"
    return ""


def _state_and_sentence(head: HeadStatus, actors: list[ActorStatus], *, was_asked: bool, crash: str) -> tuple[str, str]:
    """State and headline. The head's journal decides, because it has all events."""
    if head.end is not None and head.end.get("code") == 0:
        return "ended", f"it ended: {head.end.get('reason', 'done')}"
    if head.end is not None:
        return "failed", f"it ended: {head.end.get('reason') or head.error or 'without a reason'}"
    if actors and all(actor.name.startswith(LOOP) for actor in actors) and actors[-1].doing == "ended":
        return "ended", "it ended: one process, without a ring"
    silences = {actor.name: actor.silent_s for actor in actors}
    silent_s = next((s for name, s in silences.items() if name.startswith("head-")), None)
    running = sorted(actor.name for actor in actors if _is_running(actor))
    if not running:
        return _dead_state(head, min(silences.values()), was_asked=was_asked, crash=crash)
    runs = {actor.pid: actor.name for actor in actors if actor.process == Process.RUNS}
    stopped = [actor for actor in actors if actor.process == Process.STOPPED]
    if stopped:
        names, verb = ", ".join(x.name for x in stopped[:MAX_SHOWN]), "is" if len(stopped) == 1 else "are"
        return "stalled", _stopped(f"{names} {verb}", {actor.pid for actor in stopped})
    if workers := stopped_below(runs):
        names = ", ".join(sorted({runs[pid] for pid in workers.values()}))
        return "stalled", _stopped(f"a worker process of {names} is", workers)
    if any(actor.process == Process.GONE and actor.name.startswith("head-") for actor in actors):
        return "stalled", f"the head's process is gone; {', '.join(running[:MAX_SHOWN])} wait for its restart"
    if silent_s is None and running[0].startswith(LOOP):
        return "alive", "it is alive: one process, without a ring"
    if silent_s is None:
        return "alive", "it begins: no head has written yet"
    if silent_s > SILENT_S:
        others = f"{', '.join(running[:MAX_SHOWN])}{' and others' if len(running) > MAX_SHOWN else ''}"
        silence = f"the head has been silent for {_format_seconds(silent_s)}"
        return "stalled", f"{silence}; {others} still write and wait for it"
    if head.stall is not None:
        return "stalled", f"it is stalled: {head.stall['verdict']}"
    return "alive", "it is alive and moves"


def _stopped(what: str, pids: Iterable[int]) -> str:
    listed = " ".join(map(str, sorted(pids)))
    return f"it is stalled: {what} stopped by SIGSTOP or a debugger (to continue: kill -CONT {listed})"


def _is_running(actor: ActorStatus) -> bool:
    """Whether its process runs; if this host cannot know, whether it has written recently."""
    if actor.process == Process.UNKNOWN:
        return actor.silent_s <= SILENT_S
    return actor.process != Process.GONE


def _dead_state(head: HeadStatus, least_s: float, *, was_asked: bool, crash: str) -> tuple[str, str]:
    """State and headline of a run without a running process and without an end line."""
    since = f"no process has written for {_format_seconds(least_s)}"
    if head.error:
        return "dead", f"it is dead: {since}, and the head failed: {head.error}"
    if was_asked and crash:
        return "failed", f"it failed: {crash}"
    if was_asked:
        return "interrupted", f"it was interrupted by a signal (Ctrl-C or SIGTERM): {since}"
    return "dead", f"it is dead: {since}, and there is no end line: it was killed, or its host is gone"


# journals of the actors


def _actor(place: str, starts: list[Start], head: HeadStatus, now: float) -> ActorStatus:
    name, began, path, pid, where = starts[-1]
    last = _last_lines(path)
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
    process = process_of(path, pid, where)
    return ActorStatus(name, state, round(silent_s, 3), doing, len(starts), str(process), pid)


def _last_lines(path: Path) -> list[Line]:
    """The complete lines in the last TAIL_BYTES of a journal."""
    end = tail(path, TAIL_BYTES)
    pieces = end.split(b"\n")[1 if len(end) == TAIL_BYTES else 0 : -1]
    found = []
    for piece in pieces:
        try:
            line = run.parse(piece)
        except ValueError:
            continue
        if isinstance(line, dict) and run.is_number(line.get("wall")) and "event" in line:
            found.append(line)
    return found


def _restarts(starts_of: dict[str, list[Start]]) -> list[str]:
    later = [start for starts in starts_of.values() for start in starts[1:]]
    last = sorted(later, key=lambda start: start[1])[-MAX_SHOWN:]
    return [f"{_format_time({'wall': wall})} {name}" for name, wall, *_ in last]


# text


def _wait(line: Line, until: float) -> WaitLine:
    """A wait. Its duration includes the time since the head wrote it, unless that may be a delay of the register."""
    age_s = until - float(line["wall"])
    since_s = float(line["since_s"]) + (age_s if age_s > REGISTER_INTERVAL_S else 0.0)
    return WaitLine(line["who"], line["what"], line["on"], line["detail"], round(since_s, 3))


def _format_time(line: Line) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(line["wall"])))


def _format_seconds(s: float) -> str:
    return f"{s:.1f} s" if s < 10 else f"{s:.0f} s" if s < 600 else f"{s / 60:.0f} min"


def report_lines(report: WhyReport) -> list[str]:
    versions = "no update yet" if report.version is None else f"version {report.version}"
    out = [f"{report.run}: {report.sentence}", f"term {report.term}, {versions}, published {report.published}"]
    if report.verdict:
        out.append(f"the head's last verdict, {_format_seconds(report.verdict_age_s or 0.0)} ago: {report.verdict}")
    if report.waits:
        out += ["", f"waits, {_format_seconds(report.waits_age_s or 0.0)} ago"]
        rows = [(f"  {_format_seconds(w.since_s)}", w.who, w.what, w.detail) for w in report.waits]
        out += terminal.columns(rows, right=frozenset({0}))
    out += ["", "actors"]
    rows_of = [("  name", "state", "process", "last line", "busy with", "incarnations")]
    rows_of += [
        (f"  {a.name}", a.state, a.process, f"{_format_seconds(a.silent_s)} ago", a.doing, str(a.n_lives))
        for a in report.actors
    ]
    out += terminal.columns(rows_of)
    for title, lines in (("stalls", report.stalls), ("restarts", report.restarts)):
        out += ["", title, *(f"  {line}" for line in lines)] if lines else []
    if report.n_refused and report.state != "ended":  # late messages are normal at the end
        out += ["", f"{report.n_refused} messages refused, the last: {report.refused}"]
    return [terminal.quote(line, indent="", width=10_000) for line in out]  # the name of a foreign peer may be any text


def parser() -> argparse.ArgumentParser:
    p = run_parser("tools.why", __doc__, EPILOG)
    p.add_argument("--json", action="store_true", help="one JSON object on one line")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    report = make_report(run.find(args.run), time.time())
    print(json.dumps(asdict(report)) if args.json else "\n".join(report_lines(report)))
    return 0 if report.is_well else 1


if __name__ == "__main__":
    terminal.end(main)
