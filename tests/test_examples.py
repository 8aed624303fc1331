"""The examples of examples/: the algorithm in one file, held to the parts of the ring, and the tutorials."""

import contextlib
import random
import runpy
import sys
import tomllib
from importlib import import_module, metadata
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

import pytest
import torch

from actors.engines.protocol import Completion
from actors.learner.algorithms.fused import decoupled_ppo
from actors.models.loading import load_tokenizer
from actors.models.scratch import write_scratch_folder
from actors.runtime import user_code
from actors.runtime.user_code import add_user_folder
from actors.workflows.episode_runner import EpisodeRun, roles_of
from areal_bus.config.sections import Config
from areal_bus.errors import WorkflowError
from tests.support.polling import wait_until
from tests.support.talking import talking

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture(scope="module")
def loop() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / "loop.py"))


def test_the_algorithm_in_one_file_has_at_most_200_lines() -> None:
    assert len((EXAMPLES / "loop.py").read_text(encoding="utf-8").splitlines()) <= 200


def test_its_loss_and_gradient_are_those_of_the_learner(loop: dict[str, Any]) -> None:
    draw = torch.Generator().manual_seed(1)
    theta, prox, behav, advantage = (torch.randn(500, generator=draw) * scale for scale in (0.5, 0.5, 0.5, 1.0))
    ours, its = theta.clone().requires_grad_(), theta.clone().requires_grad_()
    weight = (prox - behav).exp()
    wanted = decoupled_ppo(ours, prox, weight, advantage, eps_clip=loop["EPS_CLIP"], cap=None).loss / len(theta)
    assert weight.max() > loop["MAX_WEIGHT"]  # the clamp of the file is the cap that the ring's settings call "clip"
    inside = weight <= loop["MAX_WEIGHT"]
    found = loop["decoupled_ppo"](its, prox, behav, advantage)
    wanted.backward()
    found.backward()
    assert its.grad is not None
    assert ours.grad is not None
    assert torch.allclose(its.grad[inside], ours.grad[inside], atol=1e-7)


def test_its_advantages_are_rloo(loop: dict[str, Any]) -> None:
    group = [loop["Sample"]("", "", [], [], 0, reward) for reward in (1.0, 0.0, 0.5)]
    assert loop["advantages"](group) == pytest.approx([0.75, -0.75, 0.0])


def test_its_gate_admits_eta_plus_one_batches_and_one_more_for_each_version(loop: dict[str, Any]) -> None:
    gate = loop["Gate"](2)
    admitted = []
    for version in (0, 1, 2):
        n = 0
        while gate.admit(version):
            n += 1
        admitted.append(n)
    assert admitted == [3 * loop["BATCH"], loop["BATCH"], loop["BATCH"]]


@pytest.mark.slow
def test_the_algorithm_in_one_file_learns_at_a_lag(loop: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    history = loop["train"](eta=2, steps=40)
    assert max(lag for _, lag in history) == 2
    assert fmean(reward for reward, _ in history[-5:]) > fmean(reward for reward, _ in history[:5]) + 0.08
    assert len(capsys.readouterr().out.splitlines()) == 40


@pytest.mark.parametrize(
    ("package", "module", "history"),
    [("agents", "openai_agents_sdk", "refuse"), ("smolagents", "smolagents_tools", "new_trajectory")],
)
def test_an_agent_of_pypi_calls_its_tool_and_is_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, module: str, history: str
) -> None:
    pytest.importorskip(package, reason=f"the package with the module {package} is not installed")
    if package == "agents" and tuple(map(int, metadata.version("openai-agents").split(".")[:2])) < (0, 24):
        pytest.skip("an openai-agents before 0.24 does not fit this openai: InputTokensDetails needs another field")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(user_code, "_folders", [])
    add_user_folder(EXAMPLES / "agents")
    tree = tomllib.loads((EXAMPLES / "agents" / "openai-agents.toml").read_text(encoding="utf-8"))["workflow"]
    tree["agent"] |= {"function": f"{module}:solve", "rewritten": history}
    with talking(tmp_path, Config.model_validate({"workflow": tree})) as talk:
        row = {"question": "send 75 to cfc", "answer": "75 cfc"}
        found = talk.hold(row, ['[send(n=75, to="cfc")]<eos>', "done<eos>"])
    assert (found["reward"], found["correct"], found["parts"]) == (1.0, True, {"calls": 1})
    assert found["n_trajectories"] == (2 if history == "new_trajectory" else 1)


def test_a_gymnasium_environment_answers_the_letters_of_its_actions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    monkeypatch.setattr(sys, "path", [str(EXAMPLES / "environments"), *sys.path])
    tree = tomllib.loads((EXAMPLES / "environments" / "frozen-lake.toml").read_text(encoding="utf-8"))
    config = Config.model_validate(tree)
    assert config.model.scratch is not None
    write_scratch_folder(tmp_path, config.model.scratch)
    tokenizer = load_tokenizer(str(tmp_path))
    example = import_module("frozen_lake")
    for moves, end in (("rd", 1.0), ("d", 0.0), (" rrrrrrr", 0.0)):  # around the hole, into it, and never there
        row = {"question": "sf hg", "answer": "g"}
        run = EpisodeRun(example.FrozenLake(config), row, tokenizer)
        asked, letters = run.start(), iter(moves)
        while asked is not None:
            done = tokenizer.encode(next(letters))
            asked = run.answer(Completion(("", 0, 0, 0, 0), done, [-0.5], [[0, 1]], "length"))
        assert next(letters, None) is None
        assert run.episode is not None
        score = example.total(row | run.episode.row)
        assert (score.reward, score.correct) == (end, end > 0)
    assert run.turns()[:2] == [["sf hg0>", " "], ["0>", "r"]]


@pytest.fixture
def nim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, Config, Any]:
    """The example of self-play, its config and its tokenizer; its model is in `tmp_path`."""
    monkeypatch.setattr(sys, "path", [str(EXAMPLES / "self_play"), *sys.path])
    config = Config.model_validate(tomllib.loads((EXAMPLES / "self_play" / "nim.toml").read_text(encoding="utf-8")))
    assert config.model.scratch is not None
    write_scratch_folder(tmp_path, config.model.scratch)
    return import_module("nim"), config, load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("pile", "moves", "winner", "roles"),
    [("5", "131", "first", "first second"), ("2", "3", "second", "first"), ("6", "2x", "first", "first second")],
)
def test_nim_by_self_play_has_a_trajectory_and_a_reward_of_each_seat(
    nim: tuple[ModuleType, Config, Any], pile: str, moves: str, winner: str, roles: str
) -> None:
    example, config, tokenizer = nim
    row = {"question": pile, "against": "self"}
    run, letters = EpisodeRun(example.Nim(config), row, tokenizer), iter(moves)
    asked = run.start()
    while asked is not None:
        done = tokenizer.encode(next(letters))
        asked = run.answer(Completion(("", 0, 0, 0, 0), done, [-0.5], [[0, 1]], "length"))
    assert run.episode is not None
    assert roles_of(run.episode) == roles
    assert run.trajectories == [i % 2 for i in range(len(moves))]
    score = example.outcome(row | run.episode.row)
    assert score.role_rewards == {seat: 1.0 if seat == winner else -1.0 for seat in ("first", "second")}
    assert (score.reward, score.correct) == (score.role_rewards["first"], None)


def servers_of(mark: str) -> list[str]:
    """Pids of OpenEnv servers that inherited the environment variable MARK of this value."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_server = b"openenv_echo:app" in (process / "cmdline").read_bytes()
            if is_server and f"MARK={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(process.name)
    return found


@pytest.mark.slow
def test_an_openenv_server_is_an_environment_and_ends_with_its_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openenv", reason="openenv-core is not installed")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(user_code, "_folders", [])
    monkeypatch.setenv("MARK", str(tmp_path))
    add_user_folder(EXAMPLES / "environments")
    tree = tomllib.loads((EXAMPLES / "environments" / "openenv.toml").read_text(encoding="utf-8"))["workflow"]
    tree["agent"] |= {"workers": 1, "timeout_s": 300.0}
    with talking(tmp_path, Config.model_validate({"workflow": tree})) as talk:
        first, second = random.Random(3).choices("abcd", k=2)
        row = {"question": "3", "answer": "", "seed": 3}
        assert talk.hold(row, [first, second])["reward"] == 2.0
        assert talk.text == f"{first}>{first} {second}>{second}"
        assert talk.hold(row, [first, "no"])["reward"] == 1.0
        assert len(servers_of(str(tmp_path))) == 1
        with pytest.raises(WorkflowError, match="refused by the OpenEnv server"):
            talk.hold(row | {"seed": [3]}, [])
    wait_until(lambda: not servers_of(str(tmp_path)), "the server ends with its agent", 60.0)
