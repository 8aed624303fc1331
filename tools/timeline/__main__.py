"""Writes RUN/trace.json.gz: the run as a Chrome trace, to open in ui.perfetto.dev."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from areal_bus.errors import ConfigError
from tools import run, terminal
from tools.terminal import run_parser
from tools.timeline import timeline
from tools.timeline.trace_file import Window

EPILOG = """\
Open the file at https://ui.perfetto.dev (it stays on your machine) or in chrome://tracing. docs/timeline.md explains
the tracks. Times are seconds since the first start of a process."""


def parser() -> argparse.ArgumentParser:
    p = run_parser("tools.timeline", __doc__, EPILOG)
    p.add_argument("--from", dest="begin", type=float, metavar="S", help="leave out what ended before this second")
    p.add_argument("--to", dest="end", type=float, metavar="S", help="leave out what began after this second")
    p.add_argument("--step", type=int, metavar="N", help="version N only: from its first prompt to its publish")
    p.add_argument("--output", type=Path, metavar="FILE", help="instead of RUN/trace.json.gz")
    return p


def window(args: argparse.Namespace, read: timeline.Timeline) -> Window:
    """The window of the command line. Raises ConfigError when it is empty."""
    if args.step is not None:
        if args.begin is not None or args.end is not None:
            raise ConfigError("--step chooses the time itself: give it without --from and --to")
        return timeline.window_of_step(read, args.step)
    length = read.ended - read.began
    begin = 0.0 if args.begin is None else args.begin
    end = length if args.end is None else args.end
    if not begin < end or begin > length:
        raise ConfigError(f"--from must lie before --to and within the run of {length:.1f} s: {begin:g} to {end:g}")
    return Window(begin, end)


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    where = run.find(args.run)
    read = timeline.read(where)
    path = args.output or where.folder / "trace.json.gz"
    try:
        n_events = timeline.write(read, path, window(args, read))
    except OSError as error:
        raise ConfigError(f"the trace must be writable: {path}: {error.strerror or error}") from None
    print(f"{path}: {n_events} events, {path.stat().st_size / 2**20:.1f} MiB; open it at https://ui.perfetto.dev")
    print("clocks of the hosts:")
    for clock in read.clocks.all:
        print(f"  {clock.sentence}")
    return 0


if __name__ == "__main__":
    terminal.end(main)
