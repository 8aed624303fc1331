"""Writes a run's scalar series to a tracker, from the journal: afterwards, or beside the running job."""

import argparse
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from areal_bus.config.trackers import PACKAGES
from areal_bus.errors import ConfigError
from tools import run, terminal
from tools.follow import HOLD_S
from tools.run import Run
from tools.trackers.session import TrackerSession, open_session

INTERVAL_S = 2.0
QUIET_S = 10.0  # after the head's end line other actors may write their last lines
EPILOG = """\
Files go to RUN/trackers/TRACKER. A second export, or a follower of a resumed run, continues the same tracker run and
writes only steps that are new; --new begins another one. docs/trackers.md lists the series.
To start a follower beside a job: journal.tracker = ["tensorboard"]."""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        "python -m tools.export",
        description="Write the scalar series of a run to a tracker.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("run", nargs="?", metavar="RUN", help="folder of the run, or its name below runs/ (runs/latest)")
    p.add_argument("--to", required=True, choices=list(PACKAGES), help="which tracker")
    p.add_argument("--out", metavar="FOLDER", help="folder for the tracker's files (RUN/trackers)")
    p.add_argument("--new", action="store_true", help="begin another run of the tracker instead of continuing")
    p.add_argument("--follow", action="store_true", help="write on while the job runs; ends after it, or by Ctrl-C")
    p.add_argument("--until-eof", action="store_true", help="follow until standard input ends, at low priority")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    where = _starting_run(args.run) if args.until_eof else run.find(args.run)
    where = Run(where.folder.resolve())  # runs/latest may point to another run later
    out = Path(args.out).resolve() if args.out else where.folder / "trackers"
    with open_session(where, args.to, out, new=args.new) as session:
        if args.until_eof:
            os.nice(10)
            follow(session, stopped_by(end_of_input=True), lambda now: False)
        elif args.follow:
            follow(session, stopped_by(end_of_input=False), lambda now: is_over(where, now))
        session.advance(float("inf"), time.time())
        session.write_samples()
        n = session.n_rows
    print(f"{where.folder} ({where.name}): {n} new rows for {args.to}, in {out / args.to}")
    return 0


def _starting_run(argument: str | None) -> Run:
    """The folder of a job that starts: it may have no journal yet."""
    if argument is None or not Path(argument).is_dir():
        raise ConfigError(f"--until-eof needs the folder of a run: got {argument}")
    return Run(Path(argument))


def stopped_by(*, end_of_input: bool) -> threading.Event:
    """Is set by SIGTERM, by Ctrl-C and, if asked for, at the end of standard input."""
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    if end_of_input:
        threading.Thread(target=_wait_for_eof, args=(stopped,), daemon=True).start()
    return stopped


def _wait_for_eof(stopped: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    stopped.set()


def follow(session: TrackerSession, stopped: threading.Event, is_over: Callable[[float], bool]) -> None:
    """Write new rows every INTERVAL_S until the job is over or `stopped` is set."""
    while not stopped.is_set():
        now = time.time()
        over = is_over(now)  # before the read, which then covers the last lines
        session.advance(now - HOLD_S, now)
        if over:
            return
        stopped.wait(INTERVAL_S)


def is_over(where: Run, now: float) -> bool:
    """Whether the newest head ended some time ago."""
    heads = where.journals("head")
    last = max(run.lines(heads[-1], "start", "end"), key=lambda line: float(line["wall"])) if heads else {}
    return last.get("event") == "end" and now - float(last["wall"]) > QUIET_S


if __name__ == "__main__":
    terminal.end(main)
