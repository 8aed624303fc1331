"""Watches a run: prompts in the ring, curves, actors, verdict and newest samples; in a browser with --web."""

import argparse
import sys
import threading
import time
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live

from areal_bus.errors import ConfigError
from areal_bus.process.terminal import is_terminal
from tools import run, terminal
from tools.run import Run
from tools.terminal import run_parser
from tools.watch import screen
from tools.watch.live_run import Frame, LiveRun
from tools.watch.server import PageServer

EPILOG = """\
It reads the journal only: its start, its end and its cost do not touch the job. Ctrl-C ends it. Where the output is no
terminal, it prints a line for each update and each change of the verdict. It ends with the run."""


def parser() -> argparse.ArgumentParser:
    p = run_parser("tools.watch", __doc__, EPILOG)
    p.add_argument("--once", action="store_true", help="print one frame and end")
    p.add_argument("--every", type=float, default=2.0, metavar="S", help="seconds between two frames (2)")
    p.add_argument("--web", action="store_true", help="serve the page on this machine and print its address")
    p.add_argument("--port", type=int, default=0, metavar="N", help="with --web: the port (a free one)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.every < 0.2:
        raise ConfigError(f"--every must be at least 0.2 s: {args.every:g}")
    if args.web and args.once:
        raise ConfigError("--once prints to the terminal: leave out --web")
    if args.port and not args.web:
        raise ConfigError("--port needs --web")
    if not 0 <= args.port < 1 << 16:
        raise ConfigError(f"--port must be between 0 and 65535: {args.port}")
    live = LiveRun(Run(run.find(args.run).folder.resolve()))  # runs/latest may point to another run later
    if args.web:
        return serve(live, args.port)
    if args.once:
        Console(width=None if is_terminal(sys.stdout) else terminal.width()).print(screen.render(live.frame()))
        return 0
    draw(live, args.every) if is_terminal(sys.stdout) else log(live, args.every)
    return 0


def draw(live: LiveRun, every_s: float) -> None:
    """Redraw the terminal until the run ends."""
    frame = live.frame()
    with Live(screen.render(frame), auto_refresh=False, vertical_overflow="crop") as view:
        while frame.is_running:
            time.sleep(every_s)
            frame = live.frame()
            view.update(screen.render(frame), refresh=True)


def log(live: LiveRun, every_s: float) -> None:
    """Print what changes until the run ends."""
    before: Frame | None = None
    while True:
        frame = live.frame()
        for line in screen.log_lines(before, frame):
            print(line, flush=True)
        if not frame.is_running:
            return
        before = frame
        time.sleep(every_s)


def serve(live: LiveRun, port: int) -> int:
    """Serve the page until Ctrl-C."""
    with PageServer(live, port) as server:
        print(f"{live.where.folder}: {server.url}   (Ctrl-C ends it)", flush=True)
        threading.Event().wait()
    return 0


if __name__ == "__main__":
    terminal.end(main)
