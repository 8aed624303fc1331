"""tools.audit --recompute over samples that the engine made while its weights changed."""

import array
import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from actors.engines.builtin.engine import BuiltinEngine, EngineOptions
from actors.engines.protocol import Completion, Request
from actors.head.sample_log import SampleLog
from areal_bus.core.effects import Keep
from areal_bus.errors import ConfigError
from areal_bus.messages import Scored
from tests.support.learner_setup import settings, tiny_model
from tests.tools.audit.forged_run import true_run
from tools.audit import __main__ as command
from tools.audit.findings import Findings
from tools.audit.recompute import TOLERANCE
from tools.audit.recompute import recompute as recompute_run
from tools.offline.recompute_logprobs import RecomputeOrder, read, recompute
from tools.run import Run

VERSIONS = 3
LENGTH = 6
torch.set_num_threads(1)


def trained_a_little(version: int) -> Any:
    """The weights of a version: each a small step from the one before."""
    model = tiny_model()
    generator = torch.Generator().manual_seed(7)
    for _ in range(version):
        for parameter in model.parameters():
            parameter.data += 2e-3 * torch.randn(parameter.shape, generator=generator)
    return model


def sample_over_versions(run: Path, *, on_update: Literal["recompute", "keep"] = "recompute") -> None:
    """Three samples, new weights after every other step; the run keeps tokens and weights as a real one does."""
    engine = BuiltinEngine(
        trained_a_little(0), EngineOptions(n_slots=4, on_update=on_update), stop_ids=frozenset(), version=0
    )
    prompts = [[5, 6, 7], [3, 4], [9, 10, 11, 12]]
    for i, prompt in enumerate(prompts):
        engine.submit(Request(("", i, 0, 0, 0), prompt, (1, i), LENGTH, 0.7, 1.0))
    done: list[Completion] = []
    for step in range(LENGTH + 1):
        if step in (2, 4):
            version = step // 2
            engine.update(version, {name: p.data.clone() for name, p in trained_a_little(version).named_parameters()})
        done += engine.step()
    file = SampleLog(run, tokens=True)
    for completion in done:
        file.keep(Keep(scored(completion, prompts[completion.key[1]]), 2, 2, 0))
    file.close()
    for version in range(VERSIONS):
        trained_a_little(version).save_pretrained(run / "checkpoints" / f"step-{version:06d}" / "model")


def scored(completion: Completion, prompt: list[int]) -> Scored:
    _, uid, attempt, sample, _ = completion.key
    return Scored(
        status="value", reward=1.0, correct=True, error="", score_s=0.0, uid=uid, sample=sample, attempt=attempt,
        evaluation="", generator="generator-0.0", finish=completion.finish, segments=[[len(prompt), LENGTH]],
        spans=completion.spans, seconds=1.0, term=0, ids=array.array("i", [*prompt, *completion.ids]).tobytes(),
        logps=array.array("f", completion.logps).tobytes(), prompt_text="", text="",
    )  # fmt: skip


def make_run(folder: Path, **rollout: str) -> Path:
    forge = true_run()
    forge.config["model"] = {"scratch": {}}
    forge.config["gconfig"]["temperature"] = 0.7
    forge.config["rollout"] |= rollout
    return forge.save(folder)


def edit_tokens(run: Path, line: int, change: Any) -> None:
    path = run / "samples" / "tokens.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    change(lines[line])
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))


def test_each_token_is_that_of_the_version_stamped_on_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    sample_over_versions(run)
    result = recompute(RecomputeOrder(str(run), TOLERANCE))
    assert sorted(result.versions) == [0, 1, 2]
    assert sum(tally.n_tokens for tally in result.versions.values()) == 3 * LENGTH
    for tally in result.versions.values():
        assert tally.max_error < 1e-5
        neighbours = [error for error in (tally.before, tally.after) if error is not None]
        assert neighbours
        assert min(neighbours) > 10 * TOLERANCE  # versions can be told apart


@pytest.mark.slow
def test_I5_a_token_of_a_neighbouring_version_is_caught(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    sample_over_versions(run)

    def change(line: dict[str, Any]) -> None:
        (v, n), *rest = line["versions"]
        line["versions"] = [[v, n - 1], [rest[0][0], rest[0][1] + 1], *rest[1:]]

    edit_tokens(run, 1, change)
    findings = Findings()
    found = recompute_run(Run(run), findings, {})
    assert findings.n["I5"] == 1
    (finding,) = findings.first["I5"]
    assert finding.where == "tokens.jsonl:2"
    assert "a token's log-prob is that of the version stamped on it, within 0.0001" in finding.text
    assert found.n_tokens == 3 * LENGTH


def test_tokens_over_kept_keys_are_counted_and_not_checked(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", on_update="keep")
    sample_over_versions(run, on_update="keep")
    result = recompute(RecomputeOrder(str(run), TOLERANCE))
    assert result.n_kept_keys == 3 * (LENGTH - 2)
    assert result.versions[0].n_tokens == 6
    assert not result.off


def test_a_version_without_weights_is_counted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    sample_over_versions(run)
    (run / "checkpoints" / "step-000001").rename(run / "elsewhere")
    result = recompute(RecomputeOrder(str(run), TOLERANCE))
    assert result.n_without_weights == 6
    assert sorted(result.versions) == [0, 2]


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["samples", "checkpoints"])
def test_recompute_names_the_settings_of_missing_files(
    missing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run")
    sample_over_versions(run)
    (run / missing).rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"journal.tokens = true|checkpoint.every_steps = 1"):
        command.main([str(run), "--recompute"])


def test_each_trajectory_of_an_episode_is_read_as_a_sequence_of_its_own(tmp_path: Path) -> None:
    line = {
        "uid": 1, "sample": 0, "evaluation": "", "segments": [[2, 2], [1, 1], [0, 1]], "trajectories": [0, 1, 0],
        "versions": [[3, 3], [4, 1]], "ids": [1, 2, 3, 4, 5, 6, 7], "logps": [-1.0, -2.0, -3.0, -4.0],
    }  # fmt: skip
    file = tmp_path / "tokens.jsonl"
    file.write_text(json.dumps(line) + "\n" + json.dumps({**line, "trajectories": []}) + "\n")
    first, second, whole = read(file, settings())
    assert (first.ids, first.at, first.logps, first.versions) == (
        [1, 2, 3, 4, 7],
        [2, 3, 4],
        [-1.0, -2.0, -4.0],
        [3, 3, 4],
    )
    assert (second.ids, second.at, second.logps, second.versions) == ([5, 6], [1], [-3.0], [3])
    assert (whole.ids, whole.at) == ([1, 2, 3, 4, 5, 6, 7], [2, 3, 5, 6])
