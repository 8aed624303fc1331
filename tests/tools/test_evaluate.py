import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from actors.engines.builtin.engine import BuiltinEngine, EngineOptions
from actors.engines.protocol import Completion, Request
from actors.generator.rollout_runner import evaluation_number
from actors.models.loading import load_model, load_tokenizer, stop_ids
from actors.models.scratch import write_scratch_folder
from areal_bus.config.sections import Config, ScratchConfig
from areal_bus.errors import ConfigError
from areal_bus.storage import versioned_dirs
from areal_bus.storage.journal import Journal
from tools import evaluate
from tools.offline import evaluate as scoring

ROOT = Path(__file__).parents[2]
ROWS = [{"question": word, "answer": word[::-1], "uid": uid} for uid, word in enumerate(["abc", "xyz", "hello", "no"])]
SETTINGS: dict[str, Any] = {
    "run": {"seed": 5},
    "data": {"task": "reverse", "prompt": "{question}>", "chat_template": False},
    "gconfig": {"max_new_tokens": 6, "n_samples": 2},
    "reward": {"function": "reverse"},
    "evaluate": {"n_samples": 3},
    "rollout": {"max_concurrent_rollouts": 5},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A very small character model with random weights, as a transformers folder."""
    base = tmp_path_factory.mktemp("scratch")
    write_scratch_folder(base / "shape", ScratchConfig(hidden_size=16, layers=1, heads=2))
    folder = base / "model"
    load_model(str(base / "shape"), "float32", "cpu", random_seed=1).save_pretrained(folder)
    load_tokenizer(str(base / "shape")).save_pretrained(folder)
    return folder


@pytest.fixture
def run(tmp_path: Path, model: Path) -> Path:
    """A run that exported this model and was evaluated on ROWS."""
    folder = tmp_path / "run"
    Journal(folder / "journal", role="head", index=0, incarnation=0).close()
    (folder / "config.json").write_text(Config.model_validate(SETTINGS).model_dump_json())
    (folder / "model").symlink_to(model)
    (folder / "evaluation").mkdir()
    write_rows(folder / "evaluation" / "problems.jsonl", ROWS)
    return folder


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def tool(*arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    env: Mapping[str, str] = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "tools.evaluate", *map(str, arguments)]
    return subprocess.run(line, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def resolved(*arguments: object) -> dict[str, Any]:
    return evaluate.make_order(evaluate.parser().parse_args([str(argument) for argument in arguments]))


def scored(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> dict[str, Any]:
    """The figures, computed in this process."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    order = scoring.EvaluateOrder(**resolved(*arguments))
    return dict(scoring.results_of(scoring.evaluate(order, lambda evaluation: None), seconds=0.0))


def reward_module(folder: Path, body: str) -> Path:
    """A folder with a user's mine:score."""
    (folder / "mine.py").write_text(f"def score(prompt, completion, row):\n    {body}\n")
    return folder


def answers_by_hand(model: Path) -> list[str]:
    """What the ring's evaluation "after" would sample: the seed of a sample is (seed, evaluation, uid, sample)."""
    tokenizer, loaded = load_tokenizer(str(model)), load_model(str(model), "float32", "cpu")
    engine = BuiltinEngine(loaded, EngineOptions(n_slots=1), stop_ids=stop_ids(loaded, tokenizer), version=7)
    answers = []
    for uid, row in enumerate(ROWS):
        for sample in range(3):
            seed = (5, evaluation_number("after"), uid, sample)
            ids = tokenizer(f"{row['question']}>")["input_ids"]
            engine.submit(Request(("after", uid, 0, sample, 0), ids, seed, 6, 1.0, 1.0))
            done: list[Completion] = []
            while not done:
                done = engine.step()
            answers.append(tokenizer.decode(done[0].ids, skip_special_tokens=True))
    return answers


def test_a_runs_own_modules_are_found_where_the_run_was_started(run: Path, tmp_path: Path) -> None:
    (run / "origin.json").write_text(json.dumps({"folder": str(tmp_path / "mine")}))
    assert resolved(run, "--config", run / "config.json")["folder"] == str(tmp_path / "mine")
    assert resolved(run, "--modules", tmp_path)["folder"] == str(tmp_path)
    assert resolved(run, "--config", ROOT / "configs" / "tiny.toml")["folder"] == str(ROOT / "configs")


@pytest.mark.slow
def test_a_runs_model_answers_its_problems_as_the_rings_own_evaluation_does_and_another_engine_is_named(
    run: Path, model: Path, tmp_path: Path
) -> None:
    modules = reward_module(tmp_path, "return sum(i * ord(c) for i, c in enumerate(completion + '.', start=1))")
    done = tool(run, "--reward", "mine:score", "--modules", modules, "--json", "--set", "rollout.engine=vllm")
    assert done.returncode == 0, done.stderr
    assert "note: the builtin engine samples here, not rollout.engine = 'vllm'" in done.stderr
    told = json.loads(done.stdout)
    rewards = [sum(i * ord(c) for i, c in enumerate(answer + ".", start=1)) for answer in answers_by_hand(model)]
    assert (told["problems"], told["answers"], told["answers_without_reward"]) == (4, 12, 0)
    assert told["reward"] == pytest.approx(sum(rewards) / len(rewards))
    assert "truncated share" in done.stderr


def test_a_model_folder_is_scored_with_options(
    run: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = reward_module(tmp_path, "return len(prompt) == 4")
    data = write_rows(tmp_path / "data.jsonl", [{"q": "abc", "a": 1}, {"q": "hello", "a": 2}, {"q": "no", "a": 3}])
    keys = ["--set", "data.question_key=q", "--set", "data.answer_key=a", "--set", "data.prompt={q}>"]
    options = ["--config", run / "config.json", "--n-samples", 2, "--limit", 2, "--reward", "mine:score"]
    told = scored(monkeypatch, model, "--data", data, "--modules", modules, *options, *keys)
    assert (told["problems"], told["answers"], told["accuracy"]) == (2, 4, 0.5)


def test_a_model_has_the_settings_of_the_stage_at_its_version(tmp_path: Path) -> None:
    stage = [{"from_step": n, "gconfig": {"max_new_tokens": n, "n_samples": None}, "learner": {}} for n in (3, 9)]
    found = []
    for version in (None, 2, 3, 8, 9):
        tree: dict[str, Any] = {"run": {"stage": stage}, "gconfig": {"max_new_tokens": 6}}
        evaluate.apply_stages(tree, version)
        assert tree["run"] == {}
        found.append(tree["gconfig"])
    assert found == [{"max_new_tokens": n} for n in (9, 6, 3, 3, 9)]
    kept = tmp_path / "checkpoints" / "step-000020" / "model"
    kept.mkdir(parents=True)
    assert evaluate.version_of(kept) == 20
    assert evaluate.version_of(tmp_path / "step-by-step" / "model") is None
    versioned_dirs.link(tmp_path / "model", kept)
    assert evaluate.version_of(tmp_path / "model") == 20, "of a run that its data or evaluate.early_stop_patience ended"


def test_a_problem_that_cannot_be_sampled_is_counted_separately(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_rows(tmp_path / "data.jsonl", [*ROWS[:2], {"question": "a" * 80, "answer": "b"}])
    told = scored(monkeypatch, run, "--data", data)
    assert (told["problems"], told["answers"], told["problems_not_sampled"]) == (3, 6, 1)


def test_a_reward_that_raises_gives_no_number(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = reward_module(tmp_path, "raise KeyError('no')")
    told = scored(monkeypatch, run, "--reward", "mine:score", "--modules", modules)
    assert (told["answers"], told["answers_without_reward"]) == (12, 12)
    assert told["accuracy"] is None
    assert told["reward"] is None


def test_bad_input_is_refused_with_an_error_line(
    run: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = shutil.copytree(model, tmp_path / "cut")
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:500])
    rows = write_rows(tmp_path / "rows.jsonl", [{"question": "abc"}])
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text("{}")
    for arguments, sentence in [
        ((run, "--data", tmp_path / "nowhere.jsonl"), "the data file must exist"),
        ((cut, "--data", rows), "cannot read the weights in "),
        ((run, "--data", rows), "each row of data must have the field 'answer'"),
        ((empty, "--data", rows), "missing weights: no "),
        ((run, "--reward", "nosuch:score"), "reward.function 'nosuch:score' must import"),
        ((empty,), "give a file of problems \\(JSON lines\\) with --data FILE"),
    ]:
        with pytest.raises(ConfigError, match=sentence):
            scored(monkeypatch, *arguments)


def test_a_run_without_a_model_is_refused_with_the_reason(run: Path, model: Path) -> None:
    write_scratch_folder(run.parent / "shape", ScratchConfig())
    with pytest.raises(ConfigError, match=r"describes an untrained model"):
        scoring.find_model(str(run.parent / "shape"))
    (run / "model").unlink()
    with pytest.raises(ConfigError, match="neither model/ nor a checkpoint"):
        resolved(run)
    (run / "checkpoints" / "step-000002").mkdir(parents=True)
    (run / "checkpoints" / "step-000010").mkdir(parents=True)
    for folder in (run / "checkpoints").iterdir():
        (folder / "model").symlink_to(model)
    assert resolved(run)["model"].endswith("step-000010/model")


def test_options_override_the_runs_settings(run: Path) -> None:
    order = resolved(run, "--n-samples", 4, "--temperature", 0.5, "--max-new-tokens", 9, "--seed", 3)
    config = order["config"]
    assert (config.evaluate.n_samples, config.evaluate.temperature) == (4, 0.5)
    assert (config.gconfig.max_new_tokens, config.run.seed) == (9, 3)
    assert (config.reward.function, config.data.prompt) == ("reverse", "{question}>")
    assert order["name"] == "after"
    with pytest.raises(ConfigError, match=r"evaluate\.n_samples must be .*at least 1: it is 0 \(--n-samples\)"):
        resolved(run, "--n-samples", 0)
    with pytest.raises(ConfigError, match=r"unknown key gconfig\.temprature"):
        resolved(run, "--set", "gconfig.temprature=1")


def test_a_config_names_the_problems_of_a_model(tmp_path: Path, model: Path) -> None:
    write_rows(tmp_path / "held-out.jsonl", ROWS)
    plain, own = tmp_path / "plain.toml", tmp_path / "own.toml"
    plain.write_text("[model]\npath = 'm'\n[data]\npath = 'train.jsonl'\n", encoding="utf-8")
    own.write_text(
        "[model]\npath = 'm'\n[data]\npath = 'train.jsonl'\n[evaluate]\npath = 'held-out.jsonl'\n", encoding="utf-8"
    )
    assert resolved(model, "--config", own)["data"] == str(tmp_path / "held-out.jsonl")
    assert resolved(model, "--config", own, "--data", "x.jsonl")["data"] == "x.jsonl"
    own.write_text("[model]\npath = 'm'\n[data]\npath = 'a'\n[evaluate]\npath = 'someone/data-set'\n", encoding="utf-8")
    assert resolved(model, "--config", own)["data"] == "someone/data-set"
    assert resolved(model, "--config", "configs/tiny.toml")["data"] == "", "the held-out problems of its task"
    with pytest.raises(ConfigError, match=r"--data FILE, or as evaluate\.path of --config"):
        resolved(model, "--config", plain)
