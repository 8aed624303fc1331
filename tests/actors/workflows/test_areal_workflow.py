"""Workflows of AReaL run as they are; their tokens are those that were sampled."""

import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from actors.engines.protocol import Completion
from actors.rewards.loading import load_reward
from actors.runtime import areal_stand_ins as stand_ins
from actors.workflows.areal_workflow import ArealWorkflow
from actors.workflows.episode_runner import Asked, Awaited, EpisodeRun
from actors.workflows.loading import close_workflow, continues, load_workflow
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError, WorkflowError
from tests.support.learner_setup import scratch_tokenizer

WORKFLOW = """
import asyncio

import torch

from areal.api import AsyncRewardWrapper, InferenceEngine, ModelRequest, RolloutWorkflow
from areal.api.cli_args import GenerationHyperparameters
from areal.utils import logging, stats_tracker
from areal import workflow_context
from areal.utils.hf_utils import apply_chat_template

logger = logging.getLogger("mine")


def reward(prompt, completions, prompt_ids, completion_ids, answer, **kwargs):
    assert len(completion_ids) == len(completions)
    return float(completions == answer)


class Retry(RolloutWorkflow):
    def __init__(self, reward_fn, gconfig: GenerationHyperparameters, tokenizer, max_turns=2):
        self.reward, self.tokenizer, self.max_turns = AsyncRewardWrapper(reward_fn), tokenizer, max_turns
        self.gconfig = gconfig.new_with_stop_and_pad_token_ids(tokenizer)

    async def arun_episode(self, engine: InferenceEngine, data):
        seq, mask, versions, logps = [], [], [], []
        ids = self.tokenizer(data["messages"][-1]["content"])["input_ids"]
        for turn in range(self.max_turns):
            response = await engine.agenerate(ModelRequest(input_ids=ids, gconfig=self.gconfig.new(n_samples=1)))
            new = response.input_len - len(seq)
            seq += response.input_tokens[-new:] + response.output_tokens
            mask += [0] * new + [1] * response.output_len
            versions += [-1] * new + response.output_versions
            logps += [0.0] * new + response.output_logprobs
            said = self.tokenizer.decode(response.output_tokens)
            prompt = self.tokenizer.decode(response.input_tokens)
            value = await self.reward(prompt, said, response.input_tokens, response.output_tokens, **data)
            stats_tracker.get(workflow_context.stat_scope()).scalar(reward=value)
            if value:
                break
            ids = seq + self.tokenizer("no")["input_ids"]
        if data.get("reject"):
            return None
        if data.get("forge"):
            mask = [1] * len(mask)
        one = {"input_ids": seq, "loss_mask": mask, "versions": versions, "logprobs": logps, "rewards": value}
        return {key: torch.tensor(x).unsqueeze(0) for key, x in one.items()}


class Stuck:
    def __init__(self, how):
        self.how = how

    async def arun_episode(self, engine, data):
        if self.how == "hang":
            await asyncio.sleep(60)
        if self.how == "twice":
            calls = [engine.agenerate(ModelRequest(input_ids=[1])) for _ in range(2)]
            await asyncio.gather(*calls)
        raise ValueError(self.how)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if name.partition(".")[0] in ("areal", "own_areal"):
            del sys.modules[name]


class Ring:
    """A workflow with a tokenizer, and what a generator's loop does: it answers calls and waits for events."""

    def __init__(self, folder: Path, made: str, arguments: dict[str, Any], timeout_s: float = 20.0) -> None:
        (folder / "own_areal.py").write_text(WORKFLOW)
        self.tokenizer = scratch_tokenizer(folder / "scratch")
        self.woken = threading.Event()
        workflow = {"function": f"own_areal:{made}", "arguments": arguments, "agent": {"timeout_s": timeout_s}}
        config = Config.model_validate({"workflow": workflow, "data": {"chat_template": False}})
        self.workflow = load_workflow(config, wake=self.woken.set)

    def run(self, row: dict[str, Any], *said: str) -> EpisodeRun:
        """Drive one episode; `said`: the answers, each sampled by the next two versions."""
        episode, answers = EpisodeRun(self.workflow, row, self.tokenizer), list(said)
        wish = episode.start()
        while wish is not None:
            if isinstance(wish, Asked):
                ids = self.tokenizer(answers.pop(0))["input_ids"]
                spans = [[10 - 2 * len(answers), 1], [11 - 2 * len(answers), len(ids) - 1]]
                wish = episode.answer(Completion(("", 0, 0, 0, 0), ids, [-0.5] * len(ids), spans, "stop"))
            else:
                assert isinstance(wish, Awaited)
                while not wish.ready():
                    assert self.woken.wait(30)
                    self.woken.clear()
                wish = episode.go_on()
        return episode


ROW = {"question": "ab", "answer": "cd"}


def test_a_workflow_of_areal_runs_as_it_is_with_exact_tokens(folder: Path) -> None:
    ring = Ring(folder, "Retry", {"reward_fn": "own_areal:reward"})
    try:
        assert isinstance(ring.workflow, ArealWorkflow)
        assert not continues(ring.workflow)
        episode = ring.run(ROW, "xyz", "cd")
        assert ring.tokenizer.decode(episode.ids) == "abxyznocd"
        assert (episode.segments, episode.spans) == ([[2, 3], [2, 2]], [[8, 1], [9, 2], [10, 1], [11, 1]])
        assert episode.episode is not None
        assert (episode.episode.text, episode.prompt_text()) == ("cd", "abxyzno")
        assert episode.episode.row == {"agent": {"reward": 1.0}}
        assert ring.run(ROW, "x", "y").episode.row == {"agent": {"reward": 0.0}}  # type: ignore[union-attr]
        rejected = ring.run({**ROW, "reject": True}, "cd").episode
        with pytest.raises(ValueError, match="returned None"):
            load_reward("agent", folder)("", "", {**rejected.row})  # type: ignore[union-attr]
        with pytest.raises(WorkflowError, match="1 for the sampled tokens and 0 for all others"):
            ring.run({**ROW, "forge": True}, "cd")
    finally:
        close_workflow(ring.workflow)


@pytest.mark.parametrize(
    ("how", "text"),
    [("hang", "workflow.agent.timeout_s = 0.2 s"), ("twice", "await each"), ("no luck", "ValueError: no luck")],
)
def test_a_workflow_that_fails_fails_its_sample(folder: Path, how: str, text: str) -> None:
    ring = Ring(folder, "Stuck", {"how": how}, timeout_s=0.2)
    try:
        with pytest.raises(WorkflowError, match=text) as caught:
            ring.run(ROW, "x", "y")
        assert (".py:" in caught.value.place) == (how != "hang")
    finally:
        close_workflow(ring.workflow)


def test_arguments_that_do_not_fit_and_parts_without_a_stand_in_are_refused_at_the_start(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs 'reward_fn': set workflow\.arguments\.reward_fn"):
        Ring(folder, "Retry", {})
    with pytest.raises(ConfigError, match="takes no 'turns'"):
        Ring(folder, "Retry", {"reward_fn": "x:y", "turns": 3})
    (folder / "own_areal_more.py").write_text("from areal.engine import RemoteSGLangEngine\n")
    with pytest.raises(ConfigError, match="no stand-in here"):
        stand_ins.import_module("own_areal_more")


def test_a_reward_that_imports_areal_is_its_reward_here(folder: Path) -> None:
    (folder / "own_areal.py").write_text(
        "from areal.reward import get_math_verify_worker\n"
        "def score(prompt, completions, prompt_ids, completion_ids, answer, **kwargs):\n"
        "    return get_math_verify_worker().verify(str(completions), str(answer))\n"
    )
    score = load_reward("own_areal:score", folder)
    tokens = {"token_ids": {"prompt": [1], "completion": [2]}}
    assert [score("", text, {"answer": "0.5", **tokens}) for text in (r"\boxed{\frac12}", r"\boxed{3}")] == [1.0, 0.0]
