"""What the README shows is run as it stands: own data, own reward, own loop, own workflow."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SMALL = [  # instead of the README's model: a character model that needs no download
    "model.path=''",
    "model.scratch.hidden_size=16",
    "model.scratch.layers=1",
    "model.scratch.max_positions=128",
    "model.scratch.characters='abcdefghijklmnopqrstuvwxyz ?.ABCDEFGHIJKLMNOPQRSTUVWXYZ'",
    "data.chat_template=false",
]


def blocks() -> dict[str, str]:
    """The README's files by their names."""
    return dict(re.findall(r"^```\w+ (mine/\S+)\n(.*?)^```", README, re.M | re.S))


def launch(folder: Path, *changes: str) -> subprocess.CompletedProcess[str]:
    """The README's mpirun line, from the folder that holds mine/."""
    mpirun = Path(sys.executable).parent / "mpirun"
    overrides = [word for change in [*SMALL, *changes] for word in ("--set", change)]
    environment = os.environ | {
        "PATH": f"{mpirun.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    line = [str(mpirun), "-np", "3", "python", "-m", "areal_bus.launch", "mine/mine.toml", *overrides]
    return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    for name, text in blocks().items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return tmp_path


def test_every_example_has_fewer_than_20_lines() -> None:
    assert set(blocks()) == {"mine/questions.jsonl", "mine/mine.toml", "mine/my.py", "mine/turns.py"}
    assert all(len(text.splitlines()) < 20 for text in blocks().values())


def test_own_data_reward_and_loop_run_as_shown(mine: Path) -> None:
    done = launch(mine)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^version \d: reward -?\d\.\d{3}", done.stdout, re.M)) == 3
    assert (mine / "runs/latest/model/model.safetensors").is_file()


def test_an_own_workflow_of_two_turns_runs_as_shown(mine: Path) -> None:
    done = launch(mine, "workflow.function='turns:TwoTries'", "learner.loop='ppo'", "run.total_train_steps=1")
    assert done.returncode == 0, done.stdout + done.stderr
    samples = (mine / "runs/latest/samples/samples.jsonl").read_text().splitlines()
    assert len(samples) == 8


def test_the_tree_names_every_top_folder() -> None:
    folders = {p.name for p in ROOT.iterdir() if (p / "__init__.py").is_file()} | {"configs", "docs"}
    assert folders <= set(re.findall(r"^(\w+)/ ", README, re.M))
