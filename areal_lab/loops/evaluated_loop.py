"""A loop in one process with shared warm-ups, a journal of updates and evaluations, and a command line."""

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from actors.data.loading import load_sets
from actors.generator.rollout_runner import RolloutLog, RolloutRunner
from actors.head.shell import evaluation_sets
from actors.learner.model.policy import Policy
from actors.rewards.actor import scored
from actors.rewards.pool import Verdict
from actors.runtime.context import dump
from actors.workflows.loading import load_workflow
from areal_bus.config.sections import Config
from areal_bus.core.evaluation import STEP, Evaluation, EvaluationSet, name_of
from areal_bus.core.events import Event
from areal_bus.errors import ArealBusError, ConfigError
from areal_bus.messages import Prompt, Trajectory, VerdictStatus
from areal_bus.storage.versioned_dirs import temporary_folder
from areal_lab.settings import LabConfig, load
from tools.offline.synchronous_reference import ReferenceStep, SynchronousReference, sample_share

SHOW_S = 10.0  # interval between two lines of progress


class EvaluatedLoop(SynchronousReference):
    """Trains as its subclass says, and evaluates as [evaluate] says."""

    def __init__(
        self,
        config: LabConfig,
        config_folder: Path,
        folder: Path,
        *,
        n_generators: int = 1,
        warm_ups: Path | None = None,
    ) -> None:
        """`folder`: the run's folder. `warm_ups`: folder of weights after the warm-up, which runs with the same model,
        data, warm-up and seed share. Raises ConfigError for a config that this loop cannot run or that does not load.
        """
        self._warm_ups = warm_ups
        super().__init__(config, config_folder, folder, n_generators=n_generators)
        self._sets = evaluation_sets(config, load_sets(config, config_folder))
        self._evaluator = self._make_engine()

    def train(self) -> Iterator[ReferenceStep]:
        """Train to the last step or the end of the data, with the evaluations of [evaluate]."""
        evaluate = self.config.evaluate
        if evaluate.before:
            self._evaluate("before")
        for step in self.run():
            self.journal.write(Event.UPDATE, version=step.version, **step.stats)
            if evaluate.every_steps and step.version % evaluate.every_steps == 0:
                self._evaluate(f"{STEP}{step.version}")
            yield step
        if evaluate.after:
            self._evaluate("after")

    def summary(self) -> dict[str, Any]:
        """Further figures for summary.json."""
        return {}

    # warm-up

    def _warm_up(self, policy: Policy) -> None:
        """Read the weights that another run has written after the same warm-up; else warm up and write them."""
        if self._warm_ups is None:
            super()._warm_up(policy)
            return
        file = self._warm_ups / f"{warm_up_digest(self.config)}.safetensors"
        weights = {name: weight.detach() for name, weight in policy.parameters().items()}
        if file.is_file():
            for name, weight in load_file(file).items():
                weights[name].copy_(weight)
            return
        super()._warm_up(policy)
        with temporary_folder(file) as building:
            partial = building / file.name
            save_file({name: weight.contiguous() for name, weight in weights.items()}, partial)
            partial.replace(file)

    # evaluations

    def _evaluate(self, when: str) -> None:
        """Answer all problems of all sets with the newest weights; a line of the journal for each set."""
        if self._evaluator.version != self._actor.version:
            self._evaluator.update(self._actor.version, self._weights())
        for problems in self._sets:
            self.journal.write(Event.EVALUATION, **self._evaluated(name_of(when, problems), problems).figures())

    def _evaluated(self, name: str, problems: EvaluationSet) -> Evaluation:
        rows = list(problems.problems)
        evaluation = Evaluation(name, self._actor.version, problems.n_samples, rows, set_name=problems.name)
        runner = RolloutRunner(
            self._evaluator,
            load_workflow(self.config),
            self._tokenizer,
            self.config,
            RolloutLog("evaluator", self.journal),
        )
        prompts = []
        while evaluation.waiting:
            uid = evaluation.waiting[0]
            evaluation.lease(uid, "evaluator")
            prompts.append(Prompt(uid, 0, evaluation.version, evaluation.missing(uid), name, rows[uid]))
        failed = {prompt.uid for prompt in prompts}
        for trajectory in sample_share(runner, prompts):
            failed.discard(trajectory.uid)
            evaluation.deliver(scored(trajectory, self._verdict(trajectory)))
        for uid in failed:
            evaluation.fail(uid, 0, "its workflow failed")
        return evaluation

    def _verdict(self, trajectory: Trajectory) -> Verdict:
        """A reward function that fails gives an error, never a reward of 0 (I10)."""
        key, value = (trajectory.uid, trajectory.sample), self._value(trajectory)
        if value is None:
            return Verdict(key, VerdictStatus.ERROR, 0.0, None, "the reward function failed", 0.0)
        return Verdict(key, VerdictStatus.VALUE, *value, "", 0.0)


def warm_up_digest(config: Config) -> str:
    """A name for all settings that decide the weights after the warm-up."""
    sections = [section.model_dump(mode="json") for section in (config.model, config.data, config.learner)]
    if config.actor.lora is not None:
        sections.append(config.actor.lora.model_dump(mode="json"))
    text = json.dumps([config.run.seed, sections])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def run_command(loop_class: type[EvaluatedLoop], *, module: str, description: str) -> int:
    """The command line of a loop. Returns the exit code."""
    parser = argparse.ArgumentParser(f"python -m {module}", description=description.partition("\n")[0])
    parser.add_argument("config", type=Path, help="a TOML file")
    parser.add_argument("--out", type=Path, required=True, help="a new folder for the run")
    parser.add_argument("--warm-ups", type=Path, metavar="DIR", help="share the weights after the warm-up between runs")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="as of a launch")
    args = parser.parse_args()
    torch.set_num_threads(1)  # as every actor on CPU
    began = time.monotonic()
    try:
        config = load(args.config, args.set)
        if args.out.exists():
            raise ConfigError(f"--out must be a new folder: {args.out} exists; remove it, or name another")
        args.out.mkdir(parents=True)
        (args.out / "config.json").write_text(config.model_dump_json(indent=1), encoding="utf-8")
        loop = loop_class(config, args.config.resolve().parent, args.out, warm_ups=args.warm_ups)
        version = train(loop, began)
        seconds = round(time.monotonic() - began, 3)
        summary = {"outcome": "finished", "wall_s": seconds, "version": version, "digest": loop.digest}
        loop.journal.close()
        (args.out / "summary.json").write_text(json.dumps(summary | loop.summary(), indent=1), encoding="utf-8")
    except ArealBusError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def train(loop: EvaluatedLoop, began: float) -> int:
    """Run the loop with a line of progress every ten seconds; returns the number of versions."""
    shown, version = began, 0
    for step in loop.train():
        version = step.version
        if time.monotonic() - shown >= SHOW_S:
            shown = time.monotonic()
            total = loop.config.run.total_train_steps
            reward = round(step.stats["reward"], 4)
            line = {"version": version, "of": total, "reward": reward, "seconds": round(shown - began)}
            print(dump(line), flush=True)
    return version
