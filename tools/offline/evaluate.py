"""Evaluates a model without a ring, for `tools/evaluate.py`."""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from actors.data.loading import load_problems, read_rows
from actors.engines.builtin.engine import BuiltinEngine, EngineOptions
from actors.generator.rollout_runner import Outcome, RolloutLog, RolloutRunner
from actors.models.loading import check_model_path, load_model, load_tokenizer, stop_ids
from actors.models.scratch import is_scratch_folder
from actors.rewards.actor import scored, submit, with_roles
from actors.rewards.loading import reward_name, reward_options
from actors.rewards.pool import WorkerOrder, WorkerPool
from actors.runtime.context import dump
from actors.runtime.user_code import add_user_folder
from actors.workflows.loading import close_workflow, load_workflow
from areal_bus.config.names.named_tasks import evaluation_split
from areal_bus.config.sections import Config
from areal_bus.core.evaluation import Evaluation
from areal_bus.core.parts.reward_parts import mean_fields
from areal_bus.errors import ConfigError
from areal_bus.messages import Finish, Prompt, Trajectory
from areal_bus.storage.journal import Journal

NAME = "evaluate"
SHOW_S = 2.0  # interval between two lines of progress
WAIT_S = 0.5  # wait for a verdict when there is nothing to decode
AGENT_S = 0.01  # wait for a verdict when all samples wait for agents

Results = dict[str, float | int | str | None]


@dataclass(frozen=True, slots=True)
class EvaluateOrder:
    """Model, problems and settings of an evaluation."""

    model: str  # folder or Hugging Face id
    data: str  # JSON-lines file, or a Hugging Face data set
    config: Config
    folder: str  # base of user modules and relative paths
    name: str  # of the evaluation, a part of its seeds, as "before" and "after" in a ring
    device: str  # "auto", "cpu" or "cuda"


class Scorer:
    """Samples and scores all problems, as many at once as the engine has slots."""

    def __init__(self, evaluation: Evaluation, runner: RolloutRunner, pool: WorkerPool, *, n_slots: int) -> None:
        self.evaluation = evaluation
        self._runner, self._pool, self._n_slots = runner, pool, n_slots
        self._at_reward: dict[tuple[int, int], Trajectory] = {}

    def run(self, show: Callable[[Evaluation], None]) -> None:
        """Run until every problem has its verdicts; `show` is called in every iteration."""
        while not self.evaluation.is_over:
            self._begin_problems()
            self._take(self._runner.go_on())
            self._take(self._runner.step())
            for verdict in self._pool.poll(self._patience_s):
                trajectory = self._at_reward.pop(verdict.key)
                if trajectory.uid in self.evaluation.leased:  # its group may have failed since
                    self.evaluation.deliver(scored(trajectory, with_roles(trajectory, verdict)))
            show(self.evaluation)

    @property
    def _patience_s(self) -> float:
        """How long to wait for a verdict: not while there is something to decode."""
        if not self._runner.n_live:
            return WAIT_S
        return AGENT_S if self._runner.is_idle else 0.0

    def _begin_problems(self) -> None:
        evaluation = self.evaluation
        while evaluation.waiting and self._runner.n_live < self._n_slots:
            uid = evaluation.waiting[0]
            evaluation.lease(uid, NAME)
            samples, row = evaluation.missing(uid), evaluation.rows[uid]
            prompt = Prompt(uid, evaluation.attempts[uid], evaluation.version, samples, evaluation.name, row)
            self._take(self._runner.begin(prompt))

    def _take(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            if isinstance(outcome, Trajectory):
                key = (outcome.uid, outcome.sample)
                self._at_reward[key] = outcome
                submit(self._pool, key, outcome)
            else:
                self.evaluation.fail(outcome.uid, outcome.attempt, outcome.error)


def evaluate(order: EvaluateOrder, show: Callable[[Evaluation], None]) -> Evaluation:
    """Evaluate the model. Raises ConfigError when model, problems, reward or workflow cannot be used."""
    config = order.config
    folder = find_model(order.model)
    rows = find_rows(order)
    add_user_folder(order.folder)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pool = stack.enter_context(
            WorkerPool(
                WorkerOrder(
                    reward_name(config),
                    order.folder,
                    options=reward_options(config.reward, scratch, data=config.data),
                    fresh_process=config.reward.fresh_process,
                ),
                n_workers=config.reward.workers,
                timeout_s=config.reward.timeout_s,
                max_failed_starts=1,
            )
        )
        workflow, tokenizer = load_workflow(config), load_tokenizer(folder)
        stack.callback(close_workflow, workflow)
        engine = load_engine(folder, config, order.device, tokenizer)
        journal = Journal(scratch, role=NAME, index=0, incarnation=0)
        stack.callback(journal.close)
        runner = RolloutRunner(engine, workflow, tokenizer, config, RolloutLog(NAME, journal))
        evaluation = Evaluation(order.name, 0, config.evaluate.n_samples, [dump(row) for row in rows])
        Scorer(evaluation, runner, pool, n_slots=config.rollout.max_concurrent_rollouts).run(show)
    return evaluation


def find_rows(order: EvaluateOrder) -> list[dict[str, Any]]:
    """The problems of the file, else those that the generated task holds out. Raises ConfigError."""
    config = order.config
    if not order.data:
        return load_problems(config, order.folder)
    split = evaluation_split(order.data)
    return read_rows(order.data, config.data, Path.cwd(), split=split)[: config.evaluate.limit]


def find_model(path: str) -> str:
    """The model's folder or id. Raises ConfigError, also for a scratch folder without weights."""
    folder = check_model_path(path, Path.cwd())
    if is_scratch_folder(Path(folder)):
        raise ConfigError(f"missing weights (*.safetensors) in {folder}: it describes an untrained model")
    return folder


def load_engine(folder: str, config: Config, device: str, tokenizer: Any) -> BuiltinEngine:
    """The builtin engine with the model's weights."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(folder, config.model.dtype, device)
    n_slots, stops = config.rollout.max_concurrent_rollouts, stop_ids(model, tokenizer)
    return BuiltinEngine(model, EngineOptions(n_slots=n_slots), stop_ids=stops, tokenizer=tokenizer, version=0)


def results_of(evaluation: Evaluation, *, seconds: float) -> Results:
    """The results as one flat record. Answers without a verdict are counted separately (I10)."""
    answers = list(evaluation.scored.values())
    cut = sum(answer.finish == Finish.LENGTH for answer in answers)
    return {
        "problems": len(evaluation.rows),
        "n_samples": evaluation.n_samples,
        "answers": len(answers),
        "answers_without_reward": len(answers) - len(evaluation.values),
        "problems_not_sampled": len(evaluation.failed),
        "accuracy": evaluation.accuracy,
        "completed_accuracy": evaluation.completed_accuracy,
        "reward": evaluation.reward,
        **evaluation.metrics(),
        **mean_fields(evaluation.values),
        "truncated_share": cut / len(answers) if answers else None,
        "tokens": sum(answer.n_sampled for answer in answers),
        "seconds": round(seconds, 2),
    }


class EvaluateProgress:
    """Prints progress to standard error."""

    def __init__(self) -> None:
        self._began = self._shown = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def show(self, evaluation: Evaluation) -> None:
        if time.monotonic() - self._shown < SHOW_S:
            return
        self._shown = time.monotonic()
        accuracy = "" if evaluation.accuracy is None else f", accuracy so far {evaluation.accuracy:.3f}"
        n_all = len(evaluation.rows) * evaluation.n_samples
        print(
            f"{len(evaluation.scored)} of {n_all} answers{accuracy}, {self.seconds:.0f} s", file=sys.stderr, flush=True
        )


def report(results: Results, failed: dict[int, str]) -> list[str]:
    width = max(len(key) for key in results)
    lines = []
    for key, value in results.items():
        shown = "-" if value is None else f"{value:.4f}" if isinstance(value, float) else value
        lines.append(f"{key.replace('_', ' ').ljust(width)}  {shown}")
    first = next(iter(failed.items()), None)
    return lines if first is None else [*lines, f"problem {first[0]} could not be sampled: {first[1]}"]


def run(order: EvaluateOrder, *, as_json: bool) -> int:
    """Evaluate and print the results; with `as_json` one JSON object on standard output. Returns the exit code."""
    progress = EvaluateProgress()
    evaluation = evaluate(order, progress.show)
    results = results_of(evaluation, seconds=progress.seconds)
    for line in report(results, evaluation.failed):
        print(line, file=sys.stderr if as_json else sys.stdout)
    if as_json:
        print(json.dumps(results | {"model": order.model, "data": order.data}))
    return 0
