"""Generation alone and training alone with the settings of a whole job: the bounds of its throughput.

Generation: the generator's episodes over the builtin engine with full slots; no bus, reward or push. Training: updates
of recorded batches one after the other; no waits, snapshots or pushes.
"""

import itertools
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from actors.data.loading import load_rows
from actors.data.tasks import Row
from actors.engines.builtin.engine import AHEAD_S, BuiltinEngine, EngineOptions
from actors.engines.protocol import Done, Request
from actors.generator.rollout_runner import RolloutLog, RolloutRunner
from actors.learner.batching import Batch, build
from actors.learner.link.rendezvous import LearnerRanks
from actors.learner.model.policy import Policy
from actors.learner.update.ppo import PPOActor, UpdateContext
from actors.models.loading import load_model, load_tokenizer
from actors.models.scratch import SCRATCH_FILE, write_scratch_folder
from actors.runtime.context import HeartbeatState
from actors.workflows.loading import load_workflow
from areal_bus.config import loader as settings
from areal_bus.config.sections import Config, ScratchConfig
from areal_bus.messages import Prompt, ShardItem, Trajectory, recast
from areal_bus.storage.journal import Journal
from benchmarks.harness.worker_main import serve
from benchmarks.jobs.lengths_reward import LETTERS, n_recorded, score


def make_model(folder: str, hidden_size: int, layers: int, heads: int, max_positions: int) -> int:
    """A character model with random weights and no end of text, so that lengths are as drawn; its parameters."""
    scratch = ScratchConfig(
        characters=LETTERS, hidden_size=hidden_size, layers=layers, heads=heads, max_positions=max_positions
    )
    write_scratch_folder(Path(folder), scratch)
    for name in (SCRATCH_FILE, "generation_config.json"):
        (Path(folder) / name).unlink()
    for name, key in (("config.json", "eos_token_id"), ("tokenizer_config.json", "eos_token")):
        path = Path(folder) / name
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {key: None}), encoding="utf-8")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    return int(model.num_parameters())


class Alone:
    """A generator without a learner and a learner without a generator, of one config."""

    def __init__(self, config: Config, folder: Path) -> None:
        path = str(config.model.path)
        journal = Journal(folder / "journal", role="generator", index=0, incarnation=0)
        self._config = config
        self._model = load_model(path, "float32", "cpu")
        self._engine = BuiltinEngine(
            self._model,
            EngineOptions(n_slots=config.rollout.max_concurrent_rollouts, ahead_s=AHEAD_S),
            stop_ids=frozenset(),
            version=0,
        )
        self._tokenizer = load_tokenizer(path)
        workflow = load_workflow(config)
        self._sampling = RolloutRunner(self._engine, workflow, self._tokenizer, config, RolloutLog("alone", journal))
        self._rows = load_rows(config, ".")
        self._prompts = prompts(self._rows, config.gconfig.n_samples)
        self._actor = PPOActor(
            Policy(load_model(path, "float32", "cpu"), ranks=LearnerRanks(), device="cpu", temperature=1.0),
            config,
            UpdateContext(journal, HeartbeatState(), folder),
        )
        self.recorded = self._record()  # batches to train in turn
        self._batches = itertools.cycle(self.recorded)

    def generate(self, n_tokens: int) -> float:
        """Seconds a sampled token, over at least `n_tokens`."""
        began, first = time.monotonic(), self._engine.n_tokens
        while self._engine.n_tokens < first + n_tokens:
            self._step()
        return (time.monotonic() - began) / (self._engine.n_tokens - first)

    def train(self, n_updates: int) -> float:
        """Seconds a token that was trained or needed no gradient, over `n_updates`."""
        began, n_tokens = time.monotonic(), 0.0
        for _ in range(n_updates):
            batch = fresh(next(self._batches), self._actor.version)
            stats = self._actor.ppo_update(self._actor.compute_advantages_and_returns(batch))
            n_tokens += stats["n_tokens_trained"] + stats["n_tokens_skipped"]
        return (time.monotonic() - began) / n_tokens

    def prefill(self) -> float:
        """Seconds a token of computing the keys of full slots anew, as at new weights; half of each sample is there."""
        n_slots, longest = self._config.rollout.max_concurrent_rollouts, self._config.gconfig.max_new_tokens
        engine = BuiltinEngine(self._model, EngineOptions(n_slots=n_slots), stop_ids=frozenset(), version=0)
        n_tokens = 0
        for index, (ids, n) in enumerate(itertools.islice(self._drawn(), n_slots)):
            n_done = max(1, n // 2)
            done = Done([ids[0]] * n_done, [-1.0] * n_done, [[0, n_done]])
            engine.submit(Request(("", index, 0, 0, 0), ids, (index,), longest, 1.0, 1.0, done))
            n_tokens += len(ids) + n_done
        began = time.monotonic()
        engine.step()
        return (time.monotonic() - began) / n_tokens

    def _drawn(self) -> Iterator[tuple[list[int], int]]:
        """Prompt and length of every sample, a group's samples not side by side."""
        for sample in itertools.count():
            for row in self._rows:
                yield self._tokenizer(row["question"])["input_ids"], row["lengths"][sample % len(row["lengths"])]

    def _step(self) -> list[Trajectory]:
        """One decode step, with as many samples waiting for a slot as there are slots."""
        while self._sampling.n_live < 2 * self._config.rollout.max_concurrent_rollouts:
            list(self._sampling.begin(next(self._prompts)))
        return [outcome for outcome in self._sampling.step() if isinstance(outcome, Trajectory)]

    def _record(self) -> list[Batch]:
        """Batches of groups in the order in which they were complete."""
        n_groups, n_samples = self._config.data.batch_size, self._config.gconfig.n_samples
        n_batches = n_recorded(n_groups)
        begun: dict[int, list[Trajectory]] = {}
        whole: list[list[Trajectory]] = []
        while len(whole) < n_batches * n_groups:
            for t in self._step():
                group = begun.setdefault(t.uid, [])
                group.append(t)
                if len(group) == n_samples:
                    whole.append(group)
        return [self._batch(whole[i * n_groups : (i + 1) * n_groups]) for i in range(n_batches)]

    def _batch(self, groups: list[list[Trajectory]]) -> Batch:
        items = [
            item(t, index, len(groups), self._rows[t.uid % len(self._rows)])
            for index, group in enumerate(groups)
            for t in group
        ]
        return build(items, step=0, clock=0, n_groups=len(groups), eta=0, n_samples=self._config.gconfig.n_samples)


def prompts(rows: list[Row], n_samples: int) -> Iterator[Prompt]:
    """The rows in turn, without end."""
    samples = list(range(n_samples))
    for uid, row in enumerate(itertools.cycle(rows)):
        yield Prompt(uid, attempt=0, born=0, samples=samples, evaluation="", row=json.dumps(row))


def item(t: Trajectory, group: int, n_groups: int, row: Row) -> ShardItem:
    """As a learner gets it."""
    place = {"step": 0, "clock": 0, "group": group, "n_groups": n_groups, "born": 0}
    return recast(t, ShardItem, reward=score("", t.text, row), correct=None, **place)


def fresh(batch: Batch, clock: int) -> Batch:
    """The batch as if it had come just now."""
    return replace(batch, step=clock, clock=clock, advantages=None, signal=None, streams=defaultdict(dict))


FOUND: list[Alone] = []  # the opened one


def opened(config: str) -> int:
    """Load the workload of this file and record its batches. Returns the number of slots."""
    folder = Path(tempfile.mkdtemp())
    found = settings.load(config)
    FOUND[:] = [Alone(found, folder)]
    return found.rollout.max_concurrent_rollouts


def generate(n_tokens: int) -> float:
    return FOUND[0].generate(n_tokens)


def train(n_updates: int) -> float:
    return FOUND[0].train(n_updates)


def prefill() -> float:
    return FOUND[0].prefill()


torch.set_num_threads(1)

if __name__ == "__main__":
    serve({"make_model": make_model, "opened": opened, "generate": generate, "train": train, "prefill": prefill})
