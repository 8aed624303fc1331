"""Bench `eta0`: a real ring at eta = 0 against `actors.offline.synchronous_reference`, bit for bit.

The tiny character model, in a job of seconds; the engines have fewer slots than samples, so they queue. Losses are
compared as floats, weights by digest, samples by token ids and log-probs.
"""

import array
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_bus.errors import ConfigError
from benchmarks.harness import pace
from benchmarks.harness.protocol import Figures
from benchmarks.jobs import demo
from tools.run import Line, Run

CONFIG = "configs/tiny.toml"
STEPS = 20
CHANGES = (
    f"run.total_train_steps={STEPS}",
    "rollout.max_head_offpolicyness=0",
    "rollout.max_concurrent_rollouts=12",
    "data.batch_size=8",
    "gconfig.n_samples=4",
    "actor.ppo_n_minibatches=2",
    "model.scratch.hidden_size=64",
    "model.scratch.layers=2",
    "learner.warmup.steps=40",
    "checkpoint.at_end=false",
    "journal.tokens=true",
)
GENERATORS = (1, 2)
CLOCKS = {"update_s"}  # figures that are seconds


class Eta0:
    about = "eta = 0 over 1 and 2 generators against a plain synchronous loop: same batches, same bits, 20 steps"

    def measure(self, *, quiet: bool) -> Figures:
        """Both for each number of generators. Raises ConfigError without mpirun or when either does not end well."""
        began = time.monotonic()
        found: dict[int, Likeness] = {}
        n_steps = pace.of(STEPS, 8)
        changes = (f"run.total_train_steps={n_steps}",)
        with tempfile.TemporaryDirectory(prefix="eta0-") as folder:
            for n in pace.of(GENERATORS, GENERATORS[:1]):
                pace.say(n, len(GENERATORS), "ring and plain loop, generators:")
                there = Path(folder)
                seen = ring(there, n, quiet=quiet, changes=changes)
                found[n] = compare(seen, reference(there, n, changes=changes), n_generators=n)
        figures: Figures = {
            "bench": "eta0",
            "steps": n_steps,
            "identical_batches": all(likeness.identical_batches for likeness in found.values()),
            "bit_equal": all(likeness.bit_equal for likeness in found.values()),
        }
        for n, likeness in found.items():
            figures |= {f"same_steps_{n}": likeness.n_same, f"difference_{n}": likeness.difference}
        return figures | {"seconds": round(time.monotonic() - began, 1)}


@dataclass(slots=True)
class Likeness:
    """Comparison of two runs."""

    identical_batches: bool = True  # uids, samples and token ids in order
    bit_equal: bool = True  # log-probs, losses and all other figures, digests of every version everywhere
    n_same: int = 0  # steps before the first difference
    difference: str | None = None  # the first one

    def note(self, where: str, found: list[str]) -> None:
        """One comparison's outcome."""
        self.identical_batches &= "batch" not in found
        self.bit_equal &= not found
        if found and self.difference is None:
            self.difference = f"{where}: {', '.join(found)}"


def ring(
    folder: Path, n_generators: int, *, quiet: bool = True, config: str = CONFIG, changes: Sequence[str] = ()
) -> Run:
    """The system over real processes; `changes` are further settings. Raises ConfigError when it does not end well."""
    job = [
        sys.executable,
        "-m",
        "areal_bus.launch",
        config,
        *overrides(f"run.folder='{folder}/ring-{n_generators}'", *changes),
    ]
    code = demo.launch([demo.mpirun(), "-np", str(n_generators + 2), *job], quiet=quiet)
    if code != 0:
        raise ConfigError(
            f"the ring (generators: {n_generators}) must end with code 0 to be compared: it ended with {code}"
        )
    return Run(folder / f"ring-{n_generators}" / "latest")


def reference(folder: Path, n_generators: int, *, config: str = CONFIG, changes: Sequence[str] = ()) -> Path:
    """The plain loop's lines; `changes` are further settings. Raises ConfigError when it does not end well."""
    out = folder / f"reference-{n_generators}"
    line = [
        sys.executable,
        "-m",
        "actors.offline.synchronous_reference",
        config,
        "--generators",
        str(n_generators),
        "--out",
        str(out),
    ]
    one_thread = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(demo.ROOT)}  # as in an actor
    done = subprocess.run([*line, *overrides(*changes)], cwd=demo.ROOT, env=os.environ | one_thread, check=False)
    if done.returncode != 0:
        raise ConfigError(f"the plain loop must end with code 0 to be compared; it ended with {done.returncode}")
    return out / "reference.jsonl"


def overrides(*more: str) -> list[str]:
    return [word for change in (*CHANGES, *more) for word in ("--set", change)]


def compare(run: Run, reference: Path, *, n_generators: int) -> Likeness:
    """Step by step, to the last step of either."""
    with reference.open(encoding="utf-8") as file:
        plain = [json.loads(line) for line in file]
    theirs = list(steps(run))
    likeness = Likeness()
    for line, (update, samples) in zip(plain[1:], theirs, strict=False):
        likeness.note(f"step {line['version']}", differences(line, update, samples))
        likeness.n_same += likeness.difference is None
    if len(plain) - 1 != len(theirs):
        likeness.note(f"the ring made {len(theirs)} steps, the loop {len(plain) - 1}", ["batch"])
    held = {line["version"]: line["digest"] for line in plain}
    for index in range(n_generators):
        mine = (line for line in run.events("pushed", role="generator") if line["rank"] == index)
        pushed = {line["version"]: line["digest"] for line in mine}
        likeness.note(f"generator {index}", [] if pushed == held else ["digest"])
    return likeness


def differences(plain: Line, update: Line, samples: list[Line]) -> list[str]:
    """Differences between a step of the plain loop and of the ring."""
    found = sorted(key for key in plain.keys() - CLOCKS - {"samples"} if plain[key] != update.get(key))
    if logps(plain["samples"]) != logps(samples):
        found.insert(0, "log-probs")
    if tokens(plain["samples"]) != tokens(samples):
        found.insert(0, "batch")
    return found


def steps(run: Run) -> Iterator[tuple[Line, list[Line]]]:
    """Each update's line with the samples of its batch, in the batch's order."""
    kept = {}
    with (run.folder / "samples" / "tokens.jsonl").open(encoding="utf-8") as file:
        for sample in map(json.loads, file):
            if not sample["evaluation"]:  # its problems have uids of their own
                kept[sample["uid"], sample["sample"]] = sample
    batch: list[Line] = []
    for line in run.events("trajectory", "update", role="head"):
        if line["event"] == "update":
            yield line, batch
            batch = []
        else:
            batch.append(kept[line["uid"], line["sample"]])


def tokens(samples: list[Line]) -> list[tuple[int, int, list[int]]]:
    return [(sample["uid"], sample["sample"], sample["ids"]) for sample in samples]


def logps(samples: list[Line]) -> list[bytes]:
    """As float32, whose bits count."""
    return [array.array("f", sample["logps"]).tobytes() for sample in samples]
