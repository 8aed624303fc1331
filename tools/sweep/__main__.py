"""`python -m tools.sweep SWEEP.toml`: runs a grid of settings with several seeds; one folder, one table, one plot."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from areal_bus.config.packaged import find_and_announce
from areal_bus.errors import ConfigError
from areal_bus.process.commands import as_here
from tools import terminal
from tools.sweep import report
from tools.sweep.comparison import summaries
from tools.sweep.plan import Job, SweepFile, as_toml, jobs_of, read_sweep
from tools.sweep.results import Result, ResultFile
from tools.sweep.runner import Progress, SweepRunner, is_done, loop_of

EPILOG = """\
A job with rollout.exact_lag or virtual_time.seconds runs as one process, any other as a ring with `ranks` ranks.
Results are kept in OUT/results.jsonl after each job: start the same line again to go on after a stop. Only jobs whose
settings changed, or which failed, run again.

examples:
  python -m tools.sweep configs/sweeps/lag.toml --cores 2
  python -m tools.sweep configs/sweeps/lag.toml --report      the table and the plot of what is there
  python -m tools.sweep configs/sweeps/lag.toml --dry-run     the jobs, without running any"""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        as_here("python -m tools.sweep"),
        description="Run a grid of settings with several seeds and compare the cells, paired by seed.",
        epilog=as_here(EPILOG),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("sweep", type=Path, metavar="SWEEP.toml", help="config, seeds, [grid], [variants.NAME], [[block]]")
    p.add_argument("--out", type=Path, metavar="DIR", help="folder of the sweep (runs/sweeps/NAME)")
    p.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="cores to use (all)")
    p.add_argument("--seeds", type=int, metavar="N", help="seeds 1 to N instead of those of the file")
    p.add_argument("--keep", action="store_true", help="keep the run folders of finished jobs (journals, logs)")
    p.add_argument("--report", action="store_true", help="run nothing; write the table and the plot again")
    p.add_argument("--dry-run", action="store_true", help="list the jobs and what is left to do")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    args.sweep = find_and_announce(str(args.sweep))
    sweep = read_sweep(args.sweep)
    if args.seeds is not None:
        sweep = sweep.model_copy(update={"seeds": args.seeds})
    jobs = jobs_of(sweep, args.sweep)
    out = args.out or sweep.out or Path("runs/sweeps") / args.sweep.stem
    known = ResultFile(out / "results.jsonl").read()
    if args.dry_run:
        return list_jobs(jobs, known)
    if not args.report:
        known = run(sweep, jobs, out, n_cores=args.cores, keep=args.keep)
    results = [known[job.digest] for job in jobs if job.digest in known]
    if not results:
        others = f" (its {len(known)} results are of other settings)" if known else ""
        raise ConfigError(f"{out} has no results of this sweep{others}: run the sweep first")
    write_report(sweep, results, out, n_missing=len(jobs) - len(results))
    return 1 if any(result.error for result in results) else 0


def list_jobs(jobs: Sequence[Job], known: dict[str, Result]) -> int:
    for job in jobs:
        print(f"{'done' if is_done(known.get(job.digest)) else 'to do'}  {job.name}")
    n_done = sum(is_done(known.get(job.digest)) for job in jobs)
    print(f"{len(jobs)} jobs, {n_done} done, {len(jobs) - n_done} to do")
    return 0


def run(sweep: SweepFile, jobs: Sequence[Job], out: Path, *, n_cores: int, keep: bool) -> dict[str, Result]:
    signal.signal(signal.SIGTERM, stop)
    is_alone = all(loop_of(job) for job in jobs if job.seed == jobs[0].seed)
    n_workers = max(1, n_cores if is_alone else n_cores // sweep.ranks)
    print(f"{len(jobs)} jobs, {n_workers} at once, in {out}", flush=True)
    return SweepRunner(sweep, out, n_workers=n_workers, keep=keep, show=show).run(jobs)


def stop(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def show(progress: Progress, result: Result, job: Job) -> None:
    """A line for each job that ended."""
    left = "" if progress.left_s is None else f", {progress.left_s / 60:.0f} min left"
    outcome = f"failed: {result.error}" if result.error else f"score {result.score:.4f}"
    print(f"[{progress.n_done}/{progress.n_jobs}] {job.name}: {outcome}, {result.wall_s:.0f} s{left}", flush=True)


def write_report(sweep: SweepFile, results: Sequence[Result], out: Path, *, n_missing: int) -> None:
    baseline = {axis: as_toml(value) for axis, value in sweep.baseline.items()}
    found = summaries(results, baseline)
    lines = report.table(found)
    print("\n".join(lines))
    (out / "table.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    report.write_csv(out / "runs.csv", results)
    x = sweep.x or next(iter(sweep.grid), "")
    has_plot = bool(x) and report.write_plot(out / "plot.svg", found, x=x, metric=sweep.metric)
    if x and not has_plot:
        print('no plot: it needs matplotlib (pip install "areal-bus[plot]")', file=sys.stderr)
    files = ["runs.csv", "table.txt", *(["plot.svg"] if has_plot else [])]
    print(f"{out}: {', '.join(files)}" + (f"; {n_missing} jobs have not run" if n_missing else ""))


if __name__ == "__main__":
    terminal.end(main)
