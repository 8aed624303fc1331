"""One real ring on two cores: configs/tiny.toml under mpirun, with a reward that is learned within 14 steps.

`make soak` runs the config as it is.
"""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from actors.models.loading import load_model
from actors.models.scratch import SCRATCH_FILE, write_scratch_folder
from areal_bus.config.loader import load
from areal_bus.config.names import packaged
from areal_bus.config.sections import Config, ScratchConfig
from areal_bus.weights.process_group import NAMELESS
from tests.actors.learner.algorithms.test_registry import example_of
from tests.actors.models.test_families import FAMILIES, V, plain, saved
from tests.faults.ring import History
from tests.support.listening import of_the_launcher, watched
from tests.support.replaying import replay_run
from tools import export
from tools.alarms.alarm_reader import findings
from tools.audit.audit import audit, judge
from tools.audit.findings import InvariantVerdict
from tools.offline.synchronous_reference import ReferenceStep, SynchronousReference
from tools.run import Run

ROOT = Path(__file__).resolve().parents[1]


def launch(folder: Path, *changes: str, config: str = "configs/tiny.toml", ranks: int = 4) -> Path:
    """Run a config as in the README. Returns its run folder."""
    scripts = Path(sys.executable).parent
    environment = os.environ | {
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    overrides = [word for change in (f"run.folder='{folder}'", *changes) for word in ("--set", change)]
    line = [str(scripts / "mpirun"), "-np", str(ranks), "python", "-m", "areal_bus.launch", config, *overrides]
    job = subprocess.Popen(line, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with watched(job.pid) as listeners:
        output, errors = job.communicate(timeout=600)
    assert job.returncode == 0, output + errors
    (folder / "output.txt").write_text(output)
    # by address: a child between fork and exec still holds its parent's listeners
    ours = sorted({f"{x.address}:{x.port}" for x in listeners if not of_the_launcher(x)})
    (folder / "listeners.txt").write_text("\n".join(ours))
    return (folder / "latest").resolve()


def events(run: Path, actor: str, name: str) -> list[dict[str, Any]]:
    lines = (run / "journal" / f"{actor}.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["event"] == name]


def gain(run: Path, n: int = 10) -> float:
    """Mean reward of the last n steps over that of the first n."""
    rewards = [update["reward"] for update in events(run, "head-0.0", "update")]
    return float(sum(rewards[-n:]) - sum(rewards[:n])) / n


VOWELS = """
def score(completion):
    return sum(letter in "aeiou" for letter in completion) / max(len(completion), 1)
"""
QUICK = (
    "run.total_train_steps=14",
    "learner.warmup.steps=20",
    "actor.lr=2e-4",
    "actor.lr_warmup_steps=1",
    "data.limit=1000",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of one job, for all tests of it."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "vowels.py").write_text(VOWELS)
    (folder / "vowels.toml").write_text(
        f'extends = "{ROOT / "configs" / "tiny.toml"}"\n[reward]\nfunction = "vowels:score"\n'
    )
    beside = ('journal.tracker=["csv"]', "watch.console=true", "profile.actor=learner-0", "profile.steps=[2,3]")
    no_death = "bus.silent_s=60"  # a replay has no clock
    busy = 'watch.off=["starved_generators"]'  # the learner has less than its core where something else runs, too
    return launch(folder, no_death, busy, *beside, *QUICK, config=str(folder / "vowels.toml"))


def test_the_tiny_model_learns(run: Path) -> None:
    """From a fifth of vowels to a half; a model that learns nothing stays within 0.02."""
    assert gain(run, 5) >= 0.15


def test_a_tracker_started_later_has_the_series_of_the_whole_journal(run: Path, tmp_path: Path) -> None:
    export.main([str(run), "--to", "csv", "--out", str(tmp_path)])
    beside, afterwards = (folder / "csv" / "scalars.csv" for folder in (run / "trackers", tmp_path))
    assert beside.read_text() == afterwards.read_text()
    rows = [row.split(",")[0] for row in beside.read_text().splitlines()[1:]]
    assert rows == [str(update["version"]) for update in events(run, "head-0.0", "update")]


def test_a_run_that_goes_well_raises_no_alarm(run: Path) -> None:
    assert findings(Run(run)) == []
    assert "alarm" not in (run.parent / "output.txt").read_text()
    assert (run / "logs" / "alarms.txt").read_text() == ""


def test_two_steps_of_the_learner_are_recorded(run: Path) -> None:
    [line] = events(run, "learner-0.0", "profile")
    assert (line["first"], line["last"]) == (2, 3)
    with gzip.open(run / line["file"], "rt") as file:
        assert {"Optimizer.step#AdamW.step"} <= {event.get("name") for event in json.load(file)["traceEvents"]}


def test_it_keeps_every_invariant_and_trains_tokens_of_older_versions(run: Path) -> None:
    """I1 to I12: all is trained, pushed and published once, no token is over the bound, every second has a label."""
    judged = judge(audit(Run(run)))
    assert {name: one.why for name, one in judged.items() if one.verdict is not InvariantVerdict.HOLDS} == {}
    steps = json.loads((run / "config.json").read_text())["run"]["total_train_steps"]
    assert History.of(run).versions == list(range(1, steps + 1))
    assert max(update.get("lag_max", 0) for update in events(run, "head-0.0", "update")) > 0
    for generator in ("generator-0.0", "generator-1.0"):
        assert events(run, generator, "pushed")[-1]["version"] == steps


def test_its_journal_replays_to_the_same_decisions(run: Path) -> None:
    replay = replay_run(run, n_generators=2)
    assert replay.head.state.gate.eta == 1
    assert replay.head.state.gate.u == len(events(run, "head-0.0", "update"))
    assert replay.n_compared > len(events(run, "head-0.0", "scored"))


def test_sampler_and_learner_agree_at_the_same_version(run: Path) -> None:
    first = events(run, "head-0.0", "update")[0]
    assert first["lag_max"] == 0
    assert first["mismatch_max"] < 1e-4


def test_its_sockets_listen_on_loopback_only(run: Path) -> None:
    """Only the store listens: pushes within one host need no collectives, and the bus uses ipc paths."""
    seen = (run.parent / "listeners.txt").read_text().split()
    addresses = [address.rpartition(":")[0] for address in seen]
    assert [address for address in addresses if address != NAMELESS] == ["127.0.0.1"]  # that one for 10 ms at a start


@pytest.mark.slow
def test_the_exported_model_loads_in_plain_transformers(run: Path) -> None:
    model, tokenizer = (
        kind.from_pretrained(run / "model") for kind in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer)
    )
    ids = tokenizer("abc>", return_tensors="pt")["input_ids"]
    shown = tokenizer.decode(model.generate(ids, max_new_tokens=3, do_sample=False)[0])
    assert shown.replace(" ", "").startswith("abc>")


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_the_tiny_model_learns_to_reverse_words(seed: int, tmp_path: Path) -> None:
    """By 0.15 to 0.21; by chance alone, with 2,560 samples in each mean, 0.01."""
    assert gain(launch(tmp_path, f"run.seed={seed}")) >= 0.1


TINY = ROOT / "configs" / "tiny.toml"
SHORTLY = (
    "run.total_train_steps=3",
    "data.limit=200",
    "learner.warmup.steps=10",
    "data.batch_size=16",
    "gconfig.n_samples=4",
    "model.scratch.hidden_size=32",
    "model.scratch.layers=2",
)


def teacher(folder: Path) -> str:
    """A setting that names a model with the tokenizer of the run's own."""
    write_scratch_folder(folder / "shape", ScratchConfig(hidden_size=32, layers=1, heads=2, max_positions=64))
    shutil.copytree(folder / "shape", folder / "teacher", ignore=shutil.ignore_patterns(SCRATCH_FILE))
    load_model(str(folder / "shape"), "float32", "cpu", random_seed=1).save_pretrained(folder / "teacher")
    return f"teacher.path='{folder / 'teacher'}'"


@pytest.mark.slow
def test_the_six_lines_of_the_docs_for_dapo_train_a_tiny_model(tmp_path: Path) -> None:
    """In the plain loop instead of on eight GPUs, with a tiny model and one line of data."""
    block = re.search(
        r"```toml title=\"mine/dapo.toml\"\n(.*?)```",
        (ROOT / "docs/algorithms.md").read_text(encoding="utf-8"),
        re.DOTALL,
    )
    assert block is not None
    assert len([line for line in block[1].splitlines() if line and not line.startswith("[")]) <= 6
    write_scratch_folder(tmp_path / "shape", ScratchConfig(hidden_size=32, layers=1, heads=2, max_positions=64))
    load_model(str(tmp_path / "shape"), "float32", "cpu", random_seed=1).save_pretrained(tmp_path / "shape")
    (tmp_path / "problems.jsonl").write_text('{"question": "ab", "answer": "1"}\n' * 8)
    (tmp_path / "dapo.toml").write_text(block[1])
    smaller = ("topology.gpus_per_host=0", "topology.learners=1", "topology.ranks=3", "topology.generators=1",
               "topology.reward=rank", f"model.path='{tmp_path / 'shape'}'", "model.dtype=float32",
               f"data.path='{tmp_path / 'problems.jsonl'}'", "data.prompt='{question}'", "data.chat_template=false",
               "data.batch_size=2", "gconfig.n_samples=2", "gconfig.max_new_tokens=10", "run.total_train_steps=2",
               "data.max_refill=0", "rollout.max_head_offpolicyness=0")  # fmt: skip
    config = load(tmp_path / "dapo.toml", smaller, {})
    assert [step.version for step in plain_steps(config, tmp_path)] == [1, 2]
    assert (config.actor.algorithm, config.actor.eps_clip_higher, config.actor.overlong_tokens) == ("dapo", 0.28, 2)


def plain_steps(config: Config, folder: Path) -> list[ReferenceStep]:
    reference = SynchronousReference(config, folder, folder, n_generators=1)
    steps = list(reference.run())
    reference.journal.close()
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("name", packaged.algorithm_names())
def test_each_algorithm_trains_three_steps_in_the_plain_loop(tmp_path: Path, name: str) -> None:
    more = [teacher(tmp_path)] if name == "distill" else []
    changes = (*SHORTLY, *more, "rollout.max_head_offpolicyness=0")
    steps = plain_steps(load([TINY, packaged.ALGORITHMS / f"{name}.toml"], changes, {}), tmp_path)
    assert [step.version for step in steps] == [1, 2, 3]
    assert all(step.stats["grad_norm"] > 0 for step in steps)


@pytest.mark.slow
def test_adapters_and_fields_of_a_workflow_are_trained_in_a_ring_that_resumes_and_whose_tokens_are_of_the_merged_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fields travel through the ring to a loss of the user's own."""
    keys = example_of("A field of your own", tmp_path, monkeypatch)
    own = [f"{section}.{key}={value!r}" for section, part in keys.items() for key, value in part.items()]
    (tmp_path / "own.toml").write_text(f"extends = '{TINY}'\n")
    lora = (
        "actor.lora.rank=4",
        "actor.lora.variant=['rslora','dora']",
        "actor.lora.target_modules={q_proj=4,up_proj=[2,3]}",
    )
    changes = (*lora, "learner.warmup.steps=10", "checkpoint.every_steps=1", "checkpoint.keep=9",
               "journal.tokens=true", "data.limit=1000", "data.batch_size=8", *own)  # fmt: skip
    config, runs = str(tmp_path / "own.toml"), tmp_path / "runs"
    run = launch(runs, "run.total_train_steps=2", *changes, config=config, ranks=3)
    launch(runs, f"run.resume='{run}'", "run.total_train_steps=4", *changes, config=config, ranks=3)
    updates = events(run, "head-0.0", "update") + events(run, "head-0.1", "update")
    assert [update["version"] for update in updates] == [1, 2, 3, 4]
    assert all(update["grad_norm"] > 0 and 0 <= update["loss/surprise"] < 1 for update in updates)
    check_extended(run, at=2)
    audit = [sys.executable, "-m", "tools.audit", str(run), "--recompute"]
    done = subprocess.run(audit, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    recomputed = re.search(r"recomputed: ([0-9]+) tokens within", done.stdout)
    assert recomputed is not None
    assert int(recomputed[1]) > 1000
    assert "neighbours told apart" in done.stdout
    (model,) = events(run, "learner-0.0", "model")
    assert model["n_trained"] < model["n_params"] / 10


def check_extended(run: Path, *, at: int) -> None:
    """The finished run went on as if it had been longer from the start: open prompts are trained, no row is twice."""
    (term,) = events(run, "head-0.1", "term")
    assert term["version"] == at
    assert term["open"]
    assert set(History.of(run).rows().values()) == {1}
    assert f"extends {run}, which had finished at version {at}" in (run.parent / "output.txt").read_text()


@pytest.mark.soak
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_each_family_goes_through_the_whole_ring(tmp_path: Path, family: str) -> None:
    """Warm-up, sampling beyond the window, scores, updates, pushes, export; log-probs recomputed by a plain forward."""
    folder = saved(tmp_path / "family", family, 0)
    write_scratch_folder(tmp_path / "scratch", ScratchConfig())
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(tmp_path / "scratch" / name, folder)
    run = launch(tmp_path, "data.limit=1000", f"model.path='{folder}'", config="tests/family.toml", ranks=3)
    assert [update["version"] for update in events(run, "head-0.0", "update")] == [1, 2, 3]
    audit = subprocess.run(
        [sys.executable, "-m", "tools.audit", str(run), "--recompute"], cwd=ROOT, capture_output=True, text=True
    )
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert plain(str(run / "model")).config.vocab_size == V
