"""Bench `eta0`: a real ring at eta = 0 against `tools.offline.synchronous_reference`, bit for bit.

The tiny character model, in a job of seconds; the engines have fewer slots than samples, so they queue. Losses are
compared as floats, weights by digest, samples by token ids and log-probs.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_bus.errors import ConfigError
from benchmarks.harness import pace
from benchmarks.harness.protocol import Figures
from benchmarks.jobs import demo
from tools.run import Run
from tools.trust.batches import differences, steps_of_loop, steps_of_run

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
    "journal.replay=true",
)
GENERATORS = (1, 2)


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
        self.identical_batches &= not {"prompts", "tokens"} & set(found)
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
    """The plain loop's folder; `changes` are further settings. Raises ConfigError when it does not end well."""
    out = folder / f"reference-{n_generators}"
    line = [
        sys.executable,
        "-m",
        "tools.offline.synchronous_reference",
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
    return out


def overrides(*more: str) -> list[str]:
    return [word for change in (*CHANGES, *more) for word in ("--set", change)]


def compare(run: Run, reference: Path, *, n_generators: int) -> Likeness:
    """Step by step, to the last step of either."""
    plain, theirs = steps_of_loop(reference), steps_of_run(run)
    likeness = Likeness()
    for one, other in zip(plain, theirs, strict=False):
        likeness.note(f"step {one.version}", list(differences(one, other)))
        likeness.n_same += likeness.difference is None
    if len(plain) != len(theirs):
        likeness.note(f"the ring made {len(theirs)} steps, the loop {len(plain)}", ["prompts"])
    held = digests(reference)
    for index in range(n_generators):
        mine = (line for line in run.events("pushed", role="generator") if line["rank"] == index)
        pushed = {line["version"]: line["digest"] for line in mine}
        likeness.note(f"generator {index}", [] if pushed == held else ["weights"])
    return likeness


def digests(reference: Path) -> dict[int, str]:
    """Of the weights of each version."""
    with (reference / "reference.jsonl").open(encoding="utf-8") as file:
        return {line["version"]: line["digest"] for line in map(json.loads, file)}
