"""Runs the examples of the README, of the tutorials and of the pages for code of one's own, as they are shown."""

import csv
import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from actors.learner.batching import Batch, Item
from actors.models.loading import load_model, load_tokenizer
from actors.models.scratch import write_scratch_folder
from areal_bus.config.sections import ScratchConfig

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LOOP = (ROOT / "docs" / "loop.md").read_text(encoding="utf-8")
PAGES = [
    README,
    LOOP,
    *((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("environments", "own-parts")),
]
FILE = r"^```\w+ (?:title=\")?(mine/[^\s\"]+)\"?\n(.*?)^```"  # a block with the name of its file, in README or in docs/
OWN_PARTS = {"advantage": "centred", "loss": "soft_ppo", "correction": "by_age", "aggregation": "per_trajectory"}
CHARACTERS = "abcdefghijklmnopqrstuvwxyz ?.!ABCDEFGHIJKLMNOPQRSTUVWXYZ"
TEMPLATE = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + '.' }}{% endfor %}{{ 'assistant ' }}"


def blocks(*pages: str) -> dict[str, str]:
    """The files shown on these pages, by name."""
    return dict(found for page in pages for found in re.findall(FILE, page, re.M | re.S))


def make_model(folder: Path) -> None:
    """A character model with a chat template replaces the README's model, so nothing is downloaded."""
    write_scratch_folder(folder, ScratchConfig(characters=CHARACTERS, hidden_size=16, layers=1, max_positions=256))
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    load_model(str(folder), "float32", "cpu", random_seed=1).save_pretrained(folder)


def launch(folder: Path, *changes: str) -> subprocess.CompletedProcess[str]:
    """The README's mpirun line, from the folder that holds mine/."""
    mpirun = Path(sys.executable).parent / "mpirun"
    overrides = [word for change in ["model.path=model", *changes] for word in ("--set", change)]
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
    make_model(tmp_path / "model")
    for name, text in blocks(*PAGES).items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return tmp_path


def test_every_example_has_fewer_than_20_lines() -> None:
    names = ("questions.jsonl", "held-out.jsonl", "mine.toml", "my.py")
    assert list(blocks(README)) == [f"mine/{name}" for name in names]
    assert {"mine/loops.py", "mine/turns.py", "mine/parts.py"} <= set(blocks(*PAGES[1:]))
    assert all(len(text.splitlines()) < 20 for text in blocks(README, LOOP).values())
    assert len(README.splitlines()) <= 120


@pytest.mark.slow
def test_own_data_and_reward_run_as_shown(mine: Path) -> None:
    done = launch(mine, "run.total_train_steps=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "done: 2 versions" in done.stdout
    assert len(re.findall(r"^held-out accuracy (before|after): 0\.000", done.stdout, re.M)) == 2
    assert (mine / "runs/latest/model/model.safetensors").is_file()


@pytest.mark.slow
def test_the_loop_of_the_docs_runs_with_own_parts_and_a_workflow_of_two_turns_that_keeps_every_turn(mine: Path) -> None:
    """The workflow asks by the chat template."""
    (mine / "mine/noise.py").write_text("def score(completion): return len(completion) % 3")
    words = ["learner.loop=loops:train", "workflow.function=turns:TwoTries", "reward.function=noise:score"]
    own = [f"actor.{part}=parts:{name}" for part, name in OWN_PARTS.items()]
    few = ("run.total_train_steps=2", "data.batch_size=4", "gconfig.n_samples=4")
    done = launch(mine, *words, *own, *few, "evaluate.before=false", "evaluate.after=false")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"^version (\d): reward \d\.\d{3}, trained (\d+)$", done.stdout, re.M)
    assert [version for version, _ in lines] == ["1", "2"]
    assert all(int(n) > 0 for _, n in lines)
    samples = [json.loads(line) for line in (mine / "runs/latest/samples/samples.jsonl").read_text().splitlines()]
    assert len(samples) == 2 * 4 * 4
    for sample in samples:
        (first, answer), (second, last) = sample["turns"]
        assert re.fullmatch(r"user What is the capital of \w+\? Answer in one short sentence\.\.assistant ", first)
        assert re.fullmatch(r"(<eos>)?\.user Are you sure\? Answer in one short sentence\.\.assistant ", second), second
        assert sample["completion"] == last
        assert isinstance(answer, str)


def test_the_docs_of_the_loop_name_every_field_of_batch_and_item() -> None:
    named = set(re.findall(r"`([\w.]+)`", LOOP))
    assert {field.name for kind in (Batch, Item) for field in dataclasses.fields(kind)} <= named


def test_the_tree_names_every_top_folder() -> None:
    folders = {p.name for p in ROOT.iterdir() if (p / "__init__.py").is_file()} | {"configs", "docs"}
    assert folders <= set(
        re.findall(r"^(\w+)/ ", (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"), re.M)
    )


def tutorial(name: str, folder: Path) -> None:
    """Writes the files that a tutorial shows."""
    for file, text in blocks((ROOT / "docs" / f"tutorial-{name}.md").read_text(encoding="utf-8")).items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(text)


def areal_bus(folder: Path, *words: str) -> str:
    """The output of a command in this folder, which must succeed."""
    line = [str(Path(sys.executable).parent / "areal-bus"), *words]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


FEW = (
    "run.total_train_steps=1",
    "learner.warmup.steps=5",
    "data.batch_size=4",
    "gconfig.n_samples=4",
    "evaluate.limit=4",
)
SHORTLY = ("-np", "3", *(word for change in FEW for word in ("--set", change)))


@pytest.mark.slow
def test_the_tutorial_of_a_reward_trains_by_it_and_reports_its_parts(tmp_path: Path) -> None:
    areal_bus(tmp_path, "init", "mine")
    tutorial("reward", tmp_path)
    printed = areal_bus(tmp_path, "run", "mine/config.toml", *SHORTLY)
    assert len(re.findall(r"^evaluation (?:before|after) .*letters", printed, re.M)) == 2


@pytest.mark.slow
def test_the_tutorial_of_an_agent_trains_through_its_tool_calls(tmp_path: Path) -> None:
    tutorial("agent", tmp_path)
    subprocess.run([sys.executable, "mine/bank.py"], cwd=tmp_path, check=True)
    printed = areal_bus(tmp_path, "run", "mine/agent.toml", *SHORTLY)
    assert len(re.findall(r"^evaluation (?:before|after) .*calls", printed, re.M)) == 2


@pytest.mark.slow
def test_the_tutorial_of_an_algorithm_compares_it_with_ppo(tmp_path: Path) -> None:
    tutorial("algorithm", tmp_path)
    base = tmp_path / "mine" / "base.toml"
    base.write_text(base.read_text().replace("steps = 60", "steps = 2") + "learner.warmup.steps = 5\n")
    areal_bus(tmp_path, "sweep", "mine/sweep.toml", "--cores", "1", "--seeds", "1", "--keep")
    with (tmp_path / "runs/sweeps/sweep/runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["algorithm"] for row in rows} == {"ppo", "doubtful"}
    assert all(row["error"] == "" for row in rows)
