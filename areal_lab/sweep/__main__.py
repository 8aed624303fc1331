"""`python -m areal_lab.sweep SWEEP.toml`: a grid of settings with several seeds; one folder, one table, one plot."""

import argparse
import os
import signal
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from areal_bus.config.names.packaged import find_and_announce
from areal_bus.errors import ConfigError
from areal_bus.process.commands import as_here, find_mpirun, install_command
from areal_lab.sweep import report
from areal_lab.sweep.comparison import summaries
from areal_lab.sweep.plan import Job, SweepFile, as_toml, jobs_of, plot_axis, read_sweep, with_seeds
from areal_lab.sweep.results import Result, ResultFile
from areal_lab.sweep.runner import SweepProgress, SweepRunner, is_done
from areal_lab.sweep.starting import start_of
from tools import terminal

EPILOG = """\
A job with rollout.exact_lag or virtual_time.seconds runs as one process, any other as a ring with `ranks` ranks.
Results are kept in OUT/results.jsonl after each job: start the same line again to go on after a stop (Ctrl-C, kill).
Only jobs that have no result, whose settings changed, or which failed, run again. Exit code: 0; 1 if a job failed;
2 for wrong input; 130 after a stop. The keys of SWEEP.toml: docs/sweep.md.

examples:
  python -m areal_lab.sweep configs/sweeps/lag.toml --cores 2
  python -m areal_lab.sweep configs/sweeps/lag.toml --seeds 1     a first look
  python -m areal_lab.sweep configs/sweeps/lag.toml --report      the table and the plot of what is there
  python -m areal_lab.sweep configs/sweeps/lag.toml --dry-run     the jobs, without running any"""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        as_here("python -m areal_lab.sweep"),
        description="Run a grid of settings with several seeds and compare the cells, paired by seed.",
        epilog=as_here(EPILOG),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("sweep", type=Path, metavar="SWEEP.toml", help="config, seeds, [grid], [variants.NAME], [[block]]")
    p.add_argument("--out", type=Path, metavar="DIR", help="folder of the sweep (runs/sweeps/NAME)")
    p.add_argument("--cores", type=count, default=len(os.sched_getaffinity(0)), metavar="N", help="cores to use (all)")
    p.add_argument("--seeds", type=count, metavar="N", help="seeds 1 to N instead of those of the file")
    p.add_argument("--keep", action="store_true", help="keep the run folders of finished jobs (journals, logs)")
    what = p.add_mutually_exclusive_group()
    what.add_argument("--report", action="store_true", help="run nothing; write the table and the plot again")
    what.add_argument("--dry-run", action="store_true", help="list the jobs and what is left to do")
    return p


def count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"a number of at least 1, not {text!r}")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    args.sweep = find_and_announce(str(args.sweep))
    sweep = read_sweep(args.sweep)
    if args.seeds is not None:
        sweep = with_seeds(sweep, args.seeds)
    jobs = jobs_of(sweep, args.sweep)
    out = args.out or sweep.out or Path("runs/sweeps") / args.sweep.stem
    known = ResultFile(out / "results.jsonl").read()
    if args.dry_run:
        return list_jobs(jobs, known, ranks=sweep.ranks)
    if not args.report:
        known = run(sweep, jobs, out, n_cores=args.cores, keep=args.keep)
    results = [known[job.digest] for job in jobs if job.digest in known]
    if not results:
        others = f" (its {len(known)} results are of other settings)" if known else ""
        raise ConfigError(f"{out} has no results of this sweep{others}: run the sweep first")
    write_report(sweep, results, out, n_missing=len(jobs) - len(results))
    return 1 if any(result.error for result in results) else 0


def list_jobs(jobs: Sequence[Job], known: Mapping[str, Result], *, ranks: int) -> int:
    states: Counter[str] = Counter()
    for job in jobs:
        result = known.get(job.digest)
        state = "to do" if result is None else "failed" if result.error else "done"
        states[state] += 1
        print(f"{state:<6}  {job.name}")
    n_rings = sum(start_of(job, ranks=ranks).loop is None for job in jobs)
    kinds = {"in one process": len(jobs) - n_rings, f"rings of {ranks} ranks": n_rings}
    how = ", ".join(f"{n} {kind}" for kind, n in kinds.items() if n)
    again = f", {states['failed']} failed and run again" if states["failed"] else ""
    print(f"{len(jobs)} jobs ({how}): {states['done']} done, {states['to do']} to do{again}")
    return 0


def run(sweep: SweepFile, jobs: Sequence[Job], out: Path, *, n_cores: int, keep: bool) -> dict[str, Result]:
    """Raises KeyboardInterrupt at SIGINT and SIGTERM, after the end of the running jobs, and ConfigError when another
    sweep runs in this folder.
    """
    signal.signal(signal.SIGTERM, stop)
    if any(start_of(job, ranks=sweep.ranks).loop is None for job in jobs):
        find_mpirun()
    runner = SweepRunner(sweep, out, n_cores=n_cores, keep=keep, view=Lines())
    with runner.results.locked():
        n_done = count_done(jobs, runner.results.read())
        print(f"{len(jobs)} jobs, {n_done} done before, on {n_cores} cores, in {out}", flush=True)
        try:
            return runner.run(jobs)
        except KeyboardInterrupt:
            n_done = count_done(jobs, runner.results.read())
            print(f"stopped: {n_done} of {len(jobs)} jobs are done; the same line goes on", file=sys.stderr, flush=True)
            raise


def count_done(jobs: Sequence[Job], known: Mapping[str, Result]) -> int:
    return sum(is_done(known.get(job.digest)) for job in jobs)


def stop(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


class Lines:
    """Prints a line for each job that ended, and now and then for those that run."""

    def ended(self, job: Job, result: Result, progress: SweepProgress, left_s: float | None) -> None:
        left = "" if left_s is None or progress.n_done == progress.n_jobs else f", {duration(left_s)} left"
        outcome = f"failed: {result.error}" if result.error else f"score {result.score:.4f}"
        where = f"[{progress.n_done}/{progress.n_jobs}]"
        print(f"{where} {job.name}: {outcome}, {duration(result.wall_s)}{left}", flush=True)

    def running(self, job: Job, elapsed_s: float, line: str) -> None:
        print(f"running for {duration(elapsed_s)}: {job.name}: {terminal.one_line(line)}", flush=True)


def duration(seconds: float) -> str:
    """In seconds below two minutes, in minutes below two hours, else in hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def write_report(sweep: SweepFile, results: Sequence[Result], out: Path, *, n_missing: int) -> None:
    baseline = {axis: as_toml(value) for axis, value in sweep.baseline.items()}
    found = summaries(results, baseline)
    rows = report.rows(found)
    print("\n".join(report.drawn(rows)))
    (out / "table.txt").write_text("\n".join(report.plain(rows)) + "\n", encoding="utf-8")
    report.write_csv(out / "runs.csv", results)
    x = plot_axis(sweep)
    has_plot = bool(x) and report.write_plot(out / "plot.svg", found, x=x, metric=sweep.metric)
    if x and not has_plot:
        print(f"no plot: it needs matplotlib ({install_command('plot')})", file=sys.stderr)
    files = ["runs.csv", "table.txt", *(["plot.svg"] if has_plot else [])]
    print(f"{out}: {', '.join(files)}" + (f"; {n_missing} jobs have not run" if n_missing else ""))


if __name__ == "__main__":
    terminal.end(main)
