"""The memory plan against the peak of each process of real jobs with SmolLM2 on CPU (`make soak`)."""

import json
import os
import subprocess
import time
from itertools import product
from pathlib import Path

import pytest

from areal_bus.config.loader import load
from areal_bus.messages import Role
from benchmarks.jobs.demo import mpirun
from launch.commands.dry_run import longest_prompt
from launch.memory.ranks import estimate
from launch.memory.shape import MIB, REWARD_WORKER, find_shape
from tests.launch.test_bootstrap import MPIRUN

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "configs" / "demo.toml"
NEAR = 0.10
CHANGES = (
    "run.total_train_steps=4",  # the heap of several ranks stops growing by then
    "evaluate.before=false",
    "evaluate.after=false",
    "gconfig.n_samples=4",
    "gconfig.max_new_tokens=16",
    "gconfig.ignore_eos=true",  # the plan counts answers of full length
    "topology.generators=1",
    "checkpoint.async_save=false",  # the copy of a checkpoint may not meet the peak of a step
)
REWARD = """
def score(completion):
    return sum(map(ord, completion)) % 101 / 100
"""  # groups of equal rewards are not computed
CASES = list(product((1, 2), (False, True), (False, True)))


@pytest.mark.soak
@pytest.mark.skipif(MPIRUN is None, reason="there is no mpirun beside this Python or on the path")
@pytest.mark.parametrize(
    ("learners", "lora", "recompute"),
    CASES,
    ids=[f"{n}-{'adapters' if lora else 'weights'}-{'recomputed' if again else 'kept'}" for n, lora, again in CASES],
)
def test_the_peak_of_every_process_is_as_planned(tmp_path: Path, learners: int, lora: bool, recompute: bool) -> None:
    """1 and 2 learner ranks, all weights or adapters, activations kept or recomputed."""
    changes = [*CHANGES, f"topology.learners={learners}", f"learner.gradient_checkpointing={str(recompute).lower()}"]
    changes += ["actor.lora.rank=16"] if lora else []
    (tmp_path / "lengths.py").write_text(REWARD)
    file = tmp_path / "demo.toml"
    file.write_text(f'extends = "{DEMO}"\n[reward]\nfunction = "lengths:score"\n')
    peaks = measured(tmp_path, file, changes, ranks=learners + 2)
    settings = load(file, changes, {})
    shape, n_prompt = find_shape(settings, DEMO.parent), longest_prompt(settings, DEMO.parent)
    assert shape is not None
    output = {}
    for name, found in sorted(peaks.items()):
        role, _, index = name.partition("-")
        need = estimate(settings, shape, Role(role), int(index), n_prompt=n_prompt)
        planned = need.device + need.host - (REWARD_WORKER if role == "reward" else 0)  # a process of its own
        output[name] = planned / found - 1
        print(f"{name}: planned {planned / MIB:.0f} MiB, measured {found / MIB:.0f} MiB, {output[name]:+.1%}")
    assert set(output) == {"head-0", "generator-0", "reward-0", *(f"learner-{i}" for i in range(learners))}
    assert {name: error for name, error in output.items() if abs(error) > NEAR} == {}


def measured(folder: Path, config: Path, changes: list[str], *, ranks: int) -> dict[str, int]:
    """The peak (VmHWM) of each actor's process of a job, by name."""
    words = [word for change in (f'run.folder="{folder}"', *changes) for word in ("--set", change)]
    line = [mpirun(), "-np", str(ranks), "python", "-m", "areal_bus.launch", str(config), *words]
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    peaks: dict[str, int] = {}
    with subprocess.Popen(line, cwd=ROOT, env=os.environ | allowed, stdout=subprocess.DEVNULL) as job:
        try:
            while job.poll() is None:
                for name, pid in actors(folder / "demo" / "journal").items():
                    peaks[name] = max(peaks.get(name, 0), peak(pid))
                time.sleep(0.2)
        finally:
            job.terminate()
    assert job.returncode == 0
    return peaks


def actors(journal: Path) -> dict[str, int]:
    """The process of each started actor, by name."""
    found = {}
    for file in journal.glob("*.jsonl"):
        with file.open() as lines:
            first = lines.readline()
        if first.endswith("\n"):
            start = json.loads(first)
            found[f"{start['role']}-{start['rank']}"] = start["pid"]
    return found


def peak(pid: int) -> int:
    """Peak resident bytes so far; 0 for a process that is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)
