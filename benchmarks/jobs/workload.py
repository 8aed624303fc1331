"""Whole jobs on one workload: a small random model, prompts with drawn lengths, one generator and one learner.

Only the compared setting differs; model, rows, lengths and seeds are the same. Each process has one thread. The cost
of a setting is wall seconds a token that entered a backward pass, or that needed none because its group had no
signal.
"""

import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from areal_bus.errors import ConfigError
from benchmarks.harness.interleave import Measure, Rounds
from benchmarks.harness.protocol import Figures
from benchmarks.harness.worker_process import Side
from benchmarks.jobs import lengths_reward
from benchmarks.jobs.demo import ROOT, mpirun
from benchmarks.jobs.paused_jobs import PATIENT, Lane
from benchmarks.jobs.real_job import KilledJob
from tools.run import Line

BALANCE = 1.25  # generation alone over training alone, at most, and its reciprocal
AIM = 0.92  # the target: in a job, generation takes a sixth longer than alone and training some hundredths
NEAR = 1.1  # a shape within this factor of AIM is taken without trying others
SHAPES = ((320, 6, 10), (288, 6, 9), (256, 6, 8), (224, 6, 7), (192, 6, 6), (128, 4, 4))  # (width, layers, heads)
"""The narrower, the longer generation takes beside training."""
WARM = 3  # batches before speeds are compared, so that the slots hold samples of all ages
N_ROWS = 2048
SETTINGS = """\
[run]
total_train_steps = 1000000

[topology]
reward = "beside"

[model]
path = "{model}"

[data]
path = "{rows}"
prompt = "{{question}}"
chat_template = false
batch_size = {batch_size}
max_prompt_tokens = {n_prompt}

[workflow]
function = "benchmarks.jobs.lengths_reward:DrawnLengths"

[rollout]
max_concurrent_rollouts = {n_slots}

[gconfig]
n_samples = {n_samples}
max_new_tokens = {longest}

[reward]
function = "benchmarks.jobs.lengths_reward:score"

[actor]
lr = 1e-9

[learner]
max_tokens_per_mb = {max_tokens_per_mb}

[checkpoint]
at_end = false

[journal]
samples = false
"""


@dataclass(frozen=True, slots=True)
class Workload:
    """Sizes of a workload."""

    shape: tuple[int, int, int]  # width, layers, heads
    median: float  # of the lengths, log-normal, in tokens
    sigma: float
    longest: int
    batch_size: int  # groups
    n_samples: int
    n_slots: int
    max_tokens_per_mb: int = 4096
    n_flat: int = 0  # groups of four without a signal (no gradient)

    @property
    def n_batch(self) -> int:
        """Samples of a batch."""
        return self.batch_size * self.n_samples


class PreparedWorkload:
    """A workload on disk."""

    def __init__(self, workload: Workload, folder: Path, maker: Side) -> None:
        self.workload, self.folder = workload, folder
        w = workload
        model, rows = folder / "model", folder / "rows.jsonl"
        model.mkdir(parents=True)
        self.n_parameters = maker.ask(
            "make_model",
            folder=str(model),
            hidden_size=w.shape[0],
            layers=w.shape[1],
            heads=w.shape[2],
            max_positions=lengths_reward.N_PROMPT + w.longest,
        )
        found = list(
            lengths_reward.rows(N_ROWS, w.n_samples, median=w.median, sigma=w.sigma, longest=w.longest, n_flat=w.n_flat)
        )
        self.mean = lengths_reward.write_rows(rows, found)
        self.settings = folder / "settings.toml"
        self.settings.write_text(
            SETTINGS.format(
                model=model, rows=rows, batch_size=w.batch_size, n_prompt=lengths_reward.N_PROMPT, n_slots=w.n_slots,
                n_samples=w.n_samples, longest=w.longest, max_tokens_per_mb=w.max_tokens_per_mb,
            ),
            encoding="utf-8",
        )  # fmt: skip

    @property
    def n_tokens(self) -> int:
        """Sampled tokens of a batch, on average."""
        return round(self.mean * self.workload.n_batch)

    def job(self, name: str, *changes: str, ranks: int = 2, quiet: bool) -> KilledJob:
        """One setting of the workload: a generator and a learner, unless the changes override it."""
        return KilledJob(
            self.folder / name, config=str(self.settings), changes=(*PATIENT, *changes), ranks=ranks, quiet=quiet
        )

    def figures(self) -> Figures:
        """Figures that describe the workload."""
        w = self.workload
        return {
            "parameters": self.n_parameters,
            "width": w.shape[0],
            "layers": w.shape[1],
            "lengths": "log-normal",
            "length_mean": round(self.mean, 1),
            "length_sigma": w.sigma,
            "length_cap": w.longest,
            "prompts_a_batch": w.batch_size,
            "samples_a_prompt": w.n_samples,
            "groups_without_a_signal": w.n_flat / 4,
            "slots": w.n_slots,
        }


@contextmanager
def folder(name: str) -> Iterator[Path]:
    """The folder of a bench's jobs, which is kept. Raises ConfigError without mpirun."""
    mpirun()
    path = ROOT / "runs" / f"bench-{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    path.mkdir(parents=True)
    yield path


def balanced(workload: Workload, at: Path, alone: Side) -> PreparedWorkload:
    """The workload with the first shape whose ratio of generation to training is NEAR to AIM, or the nearest one.

    Starts at its own shape in SHAPES and goes to narrower shapes where generation is too fast, else to wider ones.
    """

    def look(index: int) -> tuple[PreparedWorkload, float]:
        shape = SHAPES[index]
        made = PreparedWorkload(replace(workload, shape=shape), at / "x".join(map(str, shape)), alone)
        generation, training = speeds(made, alone)
        return made, math.log(generation / training / AIM)

    index = SHAPES.index(workload.shape)
    made, away = look(index)
    best, nearest = made, away
    step = 1 if away < 0 else -1
    while abs(nearest) >= math.log(NEAR) and away * step < 0 and 0 <= index + step < len(SHAPES):
        index += step
        made, away = look(index)
        if abs(away) < abs(nearest):
            best, nearest = made, away
    if made is not best:
        warm(best, alone)
    return best


def warm(made: PreparedWorkload, alone: Side) -> None:
    """Open it, spread lengths over the slots, and train each recorded batch: this allocates and compiles."""
    alone.ask("opened", config=str(made.settings))
    alone.ask("generate", n_tokens=WARM * made.n_tokens)
    alone.ask("train", n_updates=lengths_reward.n_recorded(made.workload.batch_size))


def speeds(made: PreparedWorkload, alone: Side) -> tuple[float, float]:
    """Seconds a token of generation and of training, opened for this and warm."""
    warm(made, alone)
    sides = beside(made, alone)
    return sides["generation"](), sides["training"]()


def beside(made: PreparedWorkload, alone: Side) -> dict[str, Measure]:
    """Measures each half alone, as bounds of a job: over half of the recorded batches, or all if groups differ."""
    n_recorded = lengths_reward.n_recorded(made.workload.batch_size)
    n_batches = n_recorded if made.workload.n_flat else n_recorded // 2
    return {
        "generation": lambda: float(alone.ask("generate", n_tokens=n_batches * made.n_tokens)),
        "training": lambda: float(alone.ask("train", n_updates=n_batches)),
    }


def check_balance(rounds: Rounds, within: float = BALANCE, mend: str = "another of SHAPES in workload.py") -> float:
    """Cost of generation alone over that of training alone. Raises ConfigError when they are too far apart."""
    ratio = rounds.ratio("generation", to="training").median
    if not 1 / within <= ratio <= within:
        raise ConfigError(
            f"generation and training alone must be within {within:g}x of each other for this bench: one takes "
            f"{ratio:.2f} of the other's time; choose {mend}"
        )
    return ratio


def running(lane: Lane, n_updates: int) -> Measure:
    """One lap of a job: seconds a token that was trained, or needed no gradient."""

    def lap() -> float:
        seconds, updates = lane.lap(n_updates)
        return seconds / n_young(updates)

    return lap


def n_young(updates: Sequence[Line]) -> float:
    """Tokens that were not too old: they entered a backward pass, or their group had no signal."""
    return n_trained(updates) + float(sum(line["n_tokens_skipped"] for line in updates))


def n_trained(updates: Sequence[Line]) -> float:
    """Tokens that entered a backward pass."""
    return float(sum(line["n_tokens_trained"] for line in updates))


def of_updates(name: str, updates: Sequence[Line]) -> Figures:
    """Lag of the trained tokens, and the share of tokens that were too old."""
    trained = n_trained(updates)
    lag = sum(line["lag_mean"] * line["n_tokens_trained"] for line in updates if line["n_tokens_trained"])
    masked = sum(line["n_tokens_masked"] for line in updates)
    young = n_young(updates)
    return {
        f"{name}_lag_mean": round(lag / trained, 3) if trained else 0.0,
        f"{name}_masked_share": round(masked / (masked + young), 4),
        f"{name}_updates": len(updates),
    }


def tokens_per_s(rounds: Rounds, names: Sequence[str]) -> Figures:
    return {f"{name}_tokens_per_s": round(1 / rounds.cost(name), 1) for name in names}
