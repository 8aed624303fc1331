"""Runs the jobs, predicts each from the journal of another one, and writes the table.

`python -m benchmarks.simulate.bench FOLDER` predicts again from the journals of an earlier bench.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError
from areal_lab.simulate.calibration import Measured, config_of, fit
from areal_lab.simulate.intervals import REPLICATES, replicas
from areal_lab.simulate.recording import Recording, record
from areal_lab.simulate.tables import RunComparison, compare_with_run, plus_minus
from benchmarks.harness import pace, worker_process
from benchmarks.harness.protocol import Figures
from benchmarks.jobs import lengths_reward, workload
from benchmarks.jobs.real_job import KilledJob
from benchmarks.simulate.other_work import QUIET, other_work
from benchmarks.simulate.pairs import LAWS, N_SAMPLES, PAIRS, Job, jobs
from tools import terminal
from tools.run import Run

PATIENCE_S = 180.0  # for one job
STEPS = 60  # simulated updates
N_ROWS = 2048
N_SLOTS = {"builtin": 32, "simulated": 16}
SHAPE = {"hidden_size": 128, "layers": 3, "heads": 4}  # of configs/tiny.toml
CONFIG = "configs/simulated.toml"
FASTER = (
    "engine.simulated.decode_tokens_per_s=3200",
    "engine.simulated.prefill_tokens_per_s=32000",
    "engine.simulated.update_s=0.03",
    "model.scratch.max_positions=600",
)  # than CONFIG, for short jobs
OTHERS = "other_work.json"
MAY_BE_OFF, MAY_LAG = 0.10, 0.25  # relative error of the throughput; error of the mean lag, in versions


@dataclass(frozen=True, slots=True)
class Pair:
    """A prediction beside the run."""

    source: Job
    target: Job
    comparison: RunComparison
    itself: float  # error of the target's prediction from its own journal: what its own speeds do not explain

    @property
    def in_interval(self) -> bool:
        """Whether the interval of the throughput contains the measured one."""
        interval = self.comparison.predicted.tokens_per_s
        return interval is not None and self.comparison.measured in interval


class SimulateBench:
    about = "predicted over measured tokens a second, 20 pairs of jobs: split, eta, B and lengths differ"

    def measure(self, *, quiet: bool) -> Figures:
        """One job after the other; pairs of a job that fails are left out. Raises ConfigError without mpirun."""
        began = time.monotonic()
        with workload.folder("simulate") as folder:
            with worker_process.ours("jobs.halves_alone") as maker:
                prepare(folder, maker)
            seen = {}
            chosen = pace.of(jobs(), jobs()[:2])
            for number, job in enumerate(chosen, start=1):
                pace.say(number, len(chosen), f"job {job.name}:", time.monotonic() - began)
                try:
                    seen[job] = observed(job, folder)
                except ConfigError as error:
                    print(f"left out: {error}", file=sys.stderr, flush=True)
            found, lines = results(seen, folder)
        print("\n".join(lines), file=sys.stderr if quiet else sys.stdout)
        return found | {"seconds": round(time.monotonic() - began, 1), "folder": str(folder)}


def prepare(folder: Path, maker: worker_process.Side) -> None:
    """The model, and for each law of lengths the rows and settings of the builtin jobs."""
    model = folder / "model"
    model.mkdir()
    longest = max(most for _, most in LAWS.values())
    maker.ask("make_model", folder=str(model), max_positions=lengths_reward.N_PROMPT + longest, **SHAPE)
    for name, (law, most) in LAWS.items():
        rows = folder / f"{name}.jsonl"
        drawn = lengths_reward.rows(N_ROWS, N_SAMPLES, median=law.median, sigma=law.sigma, longest=most)
        lengths_reward.write_rows(rows, list(drawn))
        (folder / f"{name}.toml").write_text(settings_text(model, rows, most), encoding="utf-8")


def settings_text(model: Path, rows: Path, longest: int) -> str:
    """The settings of builtin jobs with these rows."""
    return workload.SETTINGS.format(
        model=model, rows=rows, batch_size=32, n_prompt=lengths_reward.N_PROMPT, n_slots=N_SLOTS["builtin"],
        n_samples=N_SAMPLES, longest=longest, max_tokens_per_mb=4096,
    )  # fmt: skip


def changes(job: Job) -> tuple[str, ...]:
    """The settings of a job, beside those of its file."""
    law, most = LAWS[job.law]
    common = (
        f"run.total_train_steps={job.n_steps}",
        f"topology.learners={job.learners}",
        'topology.reward="beside"',
        f"rollout.max_head_offpolicyness={job.eta}",
        f"data.batch_size={job.batch_size}",
        f"rollout.max_concurrent_rollouts={N_SLOTS[job.engine]}",
    )
    if job.engine == "builtin":
        return common
    lengths = f"engine.simulated.median_tokens={law.median}", f"engine.simulated.sigma={law.sigma}"
    own = f"gconfig.max_new_tokens={most}", f"topology.ranks={job.learners + job.generators}"
    return (*common, *FASTER, *lengths, *own)


def observed(job: Job, folder: Path) -> tuple[Config, Recording]:
    """Run a job to its end and read its journal. Raises ConfigError when it fails or takes PATIENCE_S."""
    config = str(folder / f"{job.law}.toml") if job.engine == "builtin" else CONFIG
    started = KilledJob(
        folder / job.name, config=config, changes=changes(job), ranks=job.learners + job.generators, quiet=True
    )
    with other_work() as others, started.started():
        started.ended(PATIENCE_S)
    if others.cores is not None:
        (started.run / OTHERS).write_text(json.dumps({"cores": round(others.cores, 3)}) + "\n", encoding="utf-8")
    return read(started.run)


def other_cores(job: Job, folder: Path) -> float | None:
    """Cores that other programs used while this job ran. None if that was not measured."""
    path = folder / job.name / OTHERS
    return float(json.loads(path.read_text(encoding="utf-8"))["cores"]) if path.is_file() else None


def read(folder: Path) -> tuple[Config, Recording]:
    """Settings and observations of a finished job. Raises ConfigError for one that cannot be measured."""
    where = Run(folder)
    settings = config_of(where)
    return settings, record(where, settings)


def results(seen: Mapping[Job, tuple[Config, Recording]], folder: Path) -> tuple[Figures, list[str]]:
    """Figures and table of the pairs, also written to `pairs.json` and `pairs.md`."""
    pairs = compared(seen)
    others = {job.name: cores for job in seen if (cores := other_cores(job, folder)) is not None}
    found, lines = figures(pairs) | {"other_cores": others}, [*markdown(pairs), *other_lines(others)]
    (folder / "pairs.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "pairs.json").write_text(json.dumps(found) + "\n", encoding="utf-8")
    return found, lines


def compared(seen: Mapping[Job, tuple[Config, Recording]]) -> list[Pair]:
    """The pairs whose jobs have both ended."""
    found = []
    for source, target in PAIRS:
        if source in seen and target in seen:
            config, recording = seen[target]
            measured = fit(recording)
            itself = compare_with_run(config, measured, measured, n_steps=STEPS).error
            lengths = None if source.law == target.law else LAWS[target.law][0]
            comparison = compare_with_run(
                config, fit(seen[source][1]), measured, n_steps=STEPS, lengths=lengths,
                repeated=repeated(seen[source][1]),
            )  # fmt: skip
            found.append(Pair(source, target, comparison, itself))
    return found


def repeated(recording: Recording) -> list[Measured]:
    return list(replicas(recording, REPLICATES))


def figures(pairs: Sequence[Pair]) -> Figures:
    """Errors over all pairs, and of each one."""
    errors = [abs(pair.comparison.error) for pair in pairs]
    lags = [abs(pair.comparison.lag_error) for pair in pairs]
    return {
        "bench": "simulate",
        "pairs": len(pairs),
        "within_10_percent": sum(error <= MAY_BE_OFF for error in errors),
        "lag_within_a_quarter": sum(lag <= MAY_LAG for lag in lags),
        "in_interval": sum(pair.in_interval for pair in pairs),
        "mean_error": round(fmean(errors), 3) if errors else None,
        "largest_error": round(max(errors), 3) if errors else None,
        "largest_lag_error": round(max(lags), 3) if lags else None,
        "each": {
            f"{pair.source.name} -> {pair.target.name}": {
                "measured": round(pair.comparison.measured, 1),
                "predicted": round(pair.comparison.predicted.outcome.tokens_per_s, 1),
                "error": round(pair.comparison.error, 3),
                "error_from_itself": round(pair.itself, 3),
                "in_interval": pair.in_interval,
                "measured_lag": round(pair.comparison.measured_lag, 3),
                "predicted_lag": round(pair.comparison.predicted.outcome.lag_mean, 3),
                "updates": pair.comparison.n_updates,
            }
            for pair in pairs
        },
    }


def markdown(pairs: Sequence[Pair]) -> list[str]:
    """The table of docs/choosing.md."""
    lines = [
        "| calibrated from | predicted | measured tokens/s | predicted | error | from itself | lag measured | "
        "lag predicted |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for pair in pairs:
        one = pair.comparison
        outcome = one.predicted.outcome
        reach = plus_minus(outcome.tokens_per_s, one.predicted.tokens_per_s)
        lines.append(
            f"| {described(pair.source)} | {described(pair.target)} | {one.measured:,.0f} | "
            f"{outcome.tokens_per_s:,.0f} {reach} | {one.error:+.0%} | {pair.itself:+.0%} | {one.measured_lag:.2f} | "
            f"{outcome.lag_mean:.2f} |"
        )
    return lines


def other_lines(others: Mapping[str, float]) -> list[str]:
    """Lines on the jobs beside which other programs used the cores."""
    busy = [f"{job} ({n:.2f})" for job, n in others.items() if n > QUIET]
    return ["", f"not quiet: cores that other programs used beside {', '.join(busy)}"] if busy else []


def described(job: Job) -> str:
    engine = "" if job.engine == "builtin" else ", simulated engine"
    return f"{job.learners} + {job.generators}, eta {job.eta}, B {job.batch_size}, {job.law}{engine}"


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        "python -m benchmarks.simulate.bench", description="Predict the jobs of an earlier bench again."
    )
    p.add_argument("folder", type=Path, metavar="FOLDER", help="runs/bench-simulate-...")
    folder = p.parse_args(argv).folder
    ended = [job for job in jobs() if (folder / job.name / "summary.json").is_file()]
    if not ended:
        raise ConfigError(f"a bench leaves its jobs in a folder: {folder} has none that has ended")
    found, lines = results({job: read(folder / job.name) for job in ended}, folder)
    print("\n".join([*lines, json.dumps(found)]))
    return 0


if __name__ == "__main__":
    terminal.end(main)
