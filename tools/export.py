"""Writes a run's scalar series to a tracker, from the journal: afterwards, or beside the running job."""

import argparse
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from areal_bus.config.names.trackers import TRACKERS
from tools import run, terminal
from tools.follow import HOLD_S, is_over, stopped_by
from tools.run import Run
from tools.terminal import run_parser
from tools.trackers.session import TrackerSession, open_session

INTERVAL_S = 2.0
EPILOG = """\
Files go to RUN/trackers/TRACKER. A second export, or a follower of a resumed run, continues the same tracker run and
writes only steps that are new; --new begins another one. docs/trackers.md lists the series.
To start a follower beside a job: journal.tracker = ["tensorboard"]."""


def parser() -> argparse.ArgumentParser:
    p = run_parser("tools.export", __doc__, EPILOG)
    p.add_argument("--to", required=True, metavar="TRACKER", help=f'{", ".join(TRACKERS)} or "module:Writer"')
    p.add_argument("--out", metavar="FOLDER", help="folder for the tracker's files (RUN/trackers)")
    p.add_argument("--new", action="store_true", help="begin another run of the tracker instead of continuing")
    p.add_argument("--follow", action="store_true", help="write on while the job runs; ends after it, or by Ctrl-C")
    p.add_argument("--until-eof", action="store_true", help="follow until standard input ends, at low priority")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    where = run.starting(args.run) if args.until_eof else run.find(args.run)
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
    print(f"{where.folder} ({where.name}): {n} new rows for {args.to}, in {out / args.to.replace(':', '-')}")
    return 0


def follow(session: TrackerSession, stopped: threading.Event, is_over: Callable[[float], bool]) -> None:
    """Write new rows every INTERVAL_S until the job is over or `stopped` is set."""
    while not stopped.is_set():
        now = time.time()
        over = is_over(now)  # before the read, which then covers the last lines
        session.advance(now - HOLD_S, now)
        if over:
            return
        stopped.wait(INTERVAL_S)


if __name__ == "__main__":
    terminal.end(main)
