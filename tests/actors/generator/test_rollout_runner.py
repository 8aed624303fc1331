"""The episodes of a generator: each has a row of its own."""

import asyncio
import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.engines.protocol import Completion, Request, SamplingControls
from actors.generator.rollout_runner import RolloutLog, RolloutRunner
from actors.runtime.user_failures import MIN_FAILURES, Failures
from actors.workflows.protocol import Ask, Episode, Row
from areal_bus.config.loader import load
from areal_bus.config.sections import Config
from areal_bus.config.stages import largest
from areal_bus.errors import EngineError, UserCodeFailed
from areal_bus.messages import ATTEMPTS, Prompt, SampleFailed
from areal_bus.storage.journal import Journal


class Requests:
    """An engine that keeps requests and ends none."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def submit(self, request: Request) -> None:
        self.requests.append(request)

    def abort(self, key: object) -> None:
        """It ends none."""


def runner_of(
    folder: Path, episode: Any, engine: Any = None, config: Config | None = None, tokenizer: Any = None
) -> RolloutRunner:
    """Of a workflow with these episodes."""
    workflow: Any = SimpleNamespace(episode=episode)
    journal = Journal(folder, role="generator", index=0, incarnation=0)
    failures = Failures(folder / "logs", "generator-0.0", "workflow.function")
    log = RolloutLog("generator-0.0", journal, failures)
    return RolloutRunner(engine or Requests(), workflow, tokenizer, config or Config(), log)


async def ask_once(row: Row, ask: Ask) -> Episode:
    """The episode of a workflow that is right."""
    return Episode((await ask([65])).text)


def test_a_samples_change_of_its_row_is_not_seen_by_the_next_sample(tmp_path: Path) -> None:
    seen: list[Any] = []

    async def change(row: Any, ask: Ask) -> Episode:
        seen.append((row["question"], list(row["hints"])))
        row["hints"].append("used")
        row["question"] += "!"
        return await ask_once(row, ask)

    engine = Requests()
    runner = runner_of(tmp_path, change, engine)
    assert list(runner.begin(Prompt(0, 0, 0, [0, 1, 2], "", '{"question": "q", "hints": []}'))) == []
    assert seen == [("q", [])] * 3
    assert len(engine.requests) == 3


RAISING = """
async def episode(row, ask):
    raise ValueError("bad row")
"""


@pytest.mark.parametrize("term", [0, 1])
def test_only_first_tries_of_a_prompt_in_its_term_count_as_failures_of_the_workflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, term: int
) -> None:
    """A prompt that failed elsewhere comes as the next attempt: the row may be the cause, not the workflow."""
    (tmp_path / f"raising_{term}.py").write_text(RAISING, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    runner = runner_of(tmp_path, importlib.import_module(f"raising_{term}").episode)

    def fail(uid: int, attempt: int) -> None:
        (outcome,) = runner.begin(Prompt(uid, term * ATTEMPTS + attempt, 0, [0], "", "{}"))
        assert isinstance(outcome, SampleFailed)

    for uid in range(5 * MIN_FAILURES):
        fail(uid, 1)
    for uid in range(MIN_FAILURES - 1):
        fail(uid, 0)
    with pytest.raises(UserCodeFailed, match="bad row"):
        fail(100, 0)


class Broken(Requests):
    """An engine whose device is in error."""

    def submit(self, request: Request) -> None:
        raise EngineError("the device is in error")


def test_an_engine_that_fails_is_no_failure_of_the_workflow_and_ends_no_job(tmp_path: Path) -> None:
    """Alone at the start, while other generators still load: the head pauses it when others succeed."""
    runner = runner_of(tmp_path, ask_once, Broken())
    for uid in range(5 * MIN_FAILURES):
        (outcome,) = runner.begin(Prompt(uid, 0, 0, [0], "", "{}"))
        assert isinstance(outcome, SampleFailed)
        assert "the device is in error" in outcome.error


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("error", [SystemExit(2), asyncio.CancelledError(), RuntimeError("\ud83d")], ids=repr)
def test_a_workflow_that_exits_fails_its_sample_and_not_its_generator(
    tmp_path: Path, error: BaseException, at_once: bool
) -> None:
    """At once, or while it is cancelled."""

    async def end(row: Row, ask: Ask) -> Episode:
        try:
            return Episode("") if at_once else await ask_once(row, ask)
        finally:
            raise error

    runner = runner_of(tmp_path, end)
    outcomes = list(runner.begin(Prompt(0, 0, 0, [0, 1], "", "{}")))
    assert len(outcomes) == int(at_once)
    for outcome in outcomes:
        assert isinstance(outcome, SampleFailed)
        assert outcome.error.startswith(type(error).__name__)
    runner.cancel("", 0, 0)
    assert runner.n_live == 0


def test_the_samples_of_a_prompt_are_its_own_in_every_attempt_and_evaluation(tmp_path: Path) -> None:
    """By the seeds: another generator draws them again; an evaluation with a uid of training has others."""
    engine = Requests()
    runner = runner_of(tmp_path, ask_once, engine)
    for attempt, evaluation in ((0, ""), (1, ""), (0, "before"), (0, "after")):
        assert list(runner.begin(Prompt(0, attempt, 0, [0, 1], evaluation, "{}"))) == []
    first, again, *others = [tuple(one.seed for one in engine.requests[at : at + 2]) for at in range(0, 8, 2)]
    assert first == again
    assert len({*first, *others[0], *others[1]}) == 6


async def ask_for_more(row: Row, ask: Ask) -> Episode:
    """With limits of its own."""
    return Episode((await ask([65], max_new_tokens=6, controls=SamplingControls(min_new_tokens=5))).text)


@pytest.mark.parametrize("evaluation", ["", "step-3"])
def test_a_request_has_the_limit_of_the_stage_that_its_prompt_was_admitted_in(tmp_path: Path, evaluation: str) -> None:
    """A problem of an evaluation that of the version that it evaluates. What a workflow asks for yields to it."""
    stage = [{"from_step": 2, "gconfig": {"max_new_tokens": 9}}]
    config = Config.model_validate({"run": {"stage": stage}, "gconfig": {"max_new_tokens": 3}})
    for episode, limits in ((ask_once, {1: (3, 0), 2: (9, 0), 3: (9, 0)}), (ask_for_more, {1: (3, 3), 2: (6, 5)})):
        engine = Requests()
        runner = runner_of(tmp_path / episode.__name__, episode, engine, config)
        for born in limits:
            assert list(runner.begin(Prompt(born, 0, born, [0], evaluation, "{}"))) == []
        found = [(one.max_new_tokens, one.controls.min_new_tokens) for one in engine.requests]
        assert found == list(limits.values())


MIX = """
[model]
path = "m"
[gconfig]
n_samples = 4
max_new_tokens = 20
top_p = 0.9
stop = [";"]
[evaluate]
after = true
temperature = 0
n_samples = 1
[[data.source]]
name = "a"
path = "a.jsonl"
weight = 1
evaluate_path = "a.jsonl"
gconfig = { max_new_tokens = 5, temperature = 0.3, stop = ["."] }
evaluate = { max_new_tokens = 7, top_p = 0.8 }
[[data.source]]
name = "b"
path = "b.jsonl"
weight = 1
[[evaluate.sets]]
name = "c"
path = "c.jsonl"
temperature = 0.6
"""


def test_each_sample_is_drawn_as_its_source_says_and_in_an_evaluation_never_as_in_training(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(MIX, encoding="utf-8")
    engine, config = Requests(), load(tmp_path / "c.toml", (), {})
    runner = runner_of(tmp_path, ask_once, engine, config)
    for uid, (source, evaluation) in enumerate(
        [("a", ""), ("b", ""), ("a", "after:a"), ("c", "after:c"), ("", "after")]
    ):
        assert list(runner.begin(Prompt(uid, 0, 0, [0], evaluation, f'{{"source_name": "{source}"}}'))) == []
    assert [(r.max_new_tokens, r.temperature, r.top_p, r.controls.stop) for r in engine.requests] == [
        (5, 0.3, 0.9, (".",)),
        (20, 1.0, 0.9, (";",)),
        (7, 0.0, 0.8, (".",)),
        (20, 0.6, 1.0, (";",)),
        (20, 0.0, 1.0, (";",)),
    ]
    assert largest(config).gconfig.max_new_tokens == 20


class Answering(Requests):
    """Answers the newest request by a token; of the prompt of each turn but the first it knew all but a token."""

    def step(self) -> list[Completion]:
        key, ids = self.requests[-1].key, self.requests[-1].ids
        return [Completion(key, [7], [-1.0], [[0, 1]], "stop", n_reused=len(ids) - 1 if key[4] else 0)]


class Bytes:
    """A tokenizer."""

    def decode(self, ids: list[int], **_: object) -> str:
        return bytes(ids).decode()


async def ask_twice(row: Row, ask: Ask) -> Episode:
    await ask([65, 66, 67])
    return Episode((await ask([65, 66, 67, 7, 68])).text)


def test_the_journal_has_how_many_prompt_tokens_of_an_episode_were_reused(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, ask_twice, Answering(), tokenizer=Bytes())
    assert list(runner.begin(Prompt(0, 0, 0, [0], "", "{}"))) == []
    assert [one.uid for one in [*runner.step(), *runner.step()]] == [0]
    lines = map(json.loads, (tmp_path / "generator-0.0.jsonl").read_text(encoding="utf-8").splitlines())
    (done,) = (line for line in lines if line["event"] == "completion")
    assert (done["n_prompt"], done["n_reused"], done["n_tokens"]) == (3 + 5, 4, 2)
