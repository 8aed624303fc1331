"""The synchronous reference: the algorithm as one loop in one process (draw, sample, score, train).

It uses the ring's data order, workflow, engine, reward function and PPOActor, without head, gate, ledger and bus. At
eta = 0 the ring must give the same batches and the same bits (docs/staleness.md). With n generators, engine uid mod n
samples prompt uid, because an engine's rounding depends on the composition of its decode batch.

python -m tools.offline.synchronous_reference CONFIG --generators N --out FOLDER

writes FOLDER/reference.jsonl with one line for each version. With --recorded RUN it takes the tokens that the engine of
that run sampled, and its batches hold the learner's own log-probs of them, too.
"""

import argparse
import json
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from actors.data.source import make_source
from actors.engines.builtin.connect import open_builtin
from actors.engines.protocol import Engine
from actors.generator.rollout_runner import RolloutLog, RolloutRunner
from actors.head.shell import declared
from actors.learner.batching import Batch, build
from actors.learner.update.forward_passes import ForwardPasses
from actors.rewards.actor import n_before
from actors.rewards.binding.values import read_value, with_ids
from actors.rewards.loading import all_options, load_group, load_reward, reward_name
from actors.runtime.context import dump
from actors.runtime.process import leave
from actors.workflows.loading import close_workflow, load_workflow
from areal_bus.config.learner import LearnerConfig
from areal_bus.config.loader import load
from areal_bus.config.sections import Config
from areal_bus.core.parts.ledger import LEAST
from areal_bus.core.parts.reward_parts import ROLE, broken_roles
from areal_bus.core.parts.stages import stage_at
from areal_bus.core.rows import Row as DrawnRow
from areal_bus.errors import ArealBusError, ConfigError
from areal_bus.messages import Prompt, ShardItem, Trajectory, recast
from tools.offline.offline_learner import OfflineLearner
from tools.offline.recorded_engine import RecordedEngine

OWN = "own/logps"  # name of the learner's log-probs in the batches of a loop with recorded tokens
Parts = dict[tuple[int, int], Mapping[str, float]]  # of the verdict of (uid, sample)
Group = list[tuple[Trajectory, float, bool | None]]  # trained samples of a prompt: trajectory, reward, correctness


@dataclass(frozen=True, slots=True)
class ReferenceStep:
    """The result of one training step."""

    version: int
    stats: dict[str, float]
    digest: str
    groups: Sequence[Group]


class SynchronousReference(OfflineLearner):
    """Policy and engines of one run, in this process: on the first GPU with topology.gpus_per_host, else on the CPU."""

    def __init__(
        self, config: Config, config_folder: Path, folder: Path, *, n_generators: int, recorded: Path | None = None
    ) -> None:
        """`folder`: the run's folder; `recorded`: the run whose tokens are taken. Raises ConfigError for a config that
        is not synchronous or does not load.
        """
        self._check(config, n_generators)
        self._recorded = recorded
        super().__init__(config, config_folder, folder, journal_role="reference")
        self._source = make_source(config, config_folder)
        options = all_options(config, config_folder, folder)
        self._reward = load_reward(reward_name(config), config_folder, options=options)
        self._compare = load_group(config.reward.group, config_folder, options=options) if config.reward.group else None
        self._next_uid = 0
        self._parts: Parts = {}  # of the samples of the present batch
        self._drawn: dict[int, DrawnRow] = {}  # uid -> its row, until its group is trained or replaced
        self._has_ended = False  # the data
        self._engines = [self._make_engine() for _ in range(self._n_engines(n_generators))]
        self._woken = threading.Event()  # a conversation in a worker process can go on
        self._workflow = load_workflow(config, wake=self._woken.set)
        self._runners = [
            RolloutRunner(engine, self._workflow, self._tokenizer, config, RolloutLog(f"generator-{i}.0", self.journal))
            for i, engine in enumerate(self._engines)
        ]

    def run(self) -> Iterator[ReferenceStep]:
        """Train until the last step or the end of the data."""
        config = self.config
        while (step := self._actor.version) < config.run.total_train_steps:
            self._update_engines()
            groups = self._sample_batch()
            if not groups or (config.data.drop_last and len(groups) < config.data.batch_size):
                return
            eta = config.rollout.max_head_offpolicyness
            batch = build(items(groups, step, self._parts), step=step, clock=step, n_groups=len(groups), eta=eta)
            self._parts.clear()
            batch = self._actor.compute_advantages_and_returns(batch)
            if self._recorded is not None:
                batch.streams[OWN] = self._logprobs(batch)
            stats = self._actor.ppo_update(batch)
            yield ReferenceStep(self._actor.version, stats, self.digest, groups)

    def _logprobs(self, batch: Batch) -> dict[int, Tensor]:
        """Item index -> (n_trained,) log-probs of its sampled tokens by the policy, before the update."""
        passes = ForwardPasses(self._policy, self._stages, beat=lambda: None)
        trained = [index for index, item in enumerate(batch.items) if item.n_trained]
        return passes.logprobs(self._policy, batch, trained, self._actor.version)

    def close(self) -> None:
        """Stop the worker processes of the workflow, and end the journal."""
        close_workflow(self._workflow)
        self.journal.close()

    # which engine samples a prompt, and with which weights

    def _check(self, config: Config, n_generators: int) -> None:
        check(config, n_generators)

    def _n_engines(self, n_generators: int) -> int:
        return n_generators

    def _engine_of(self, prompt: Prompt) -> int:
        """Index of the engine that samples a prompt."""
        return prompt.uid % len(self._engines)

    def _update_engines(self) -> None:
        """Give every engine a copy of the newest weights."""
        for engine in self._engines:
            engine.update(self._actor.version, self._weights())

    # models

    def _make_engine(self) -> Engine:
        if self._recorded is not None:
            return RecordedEngine(self._recorded)
        return open_builtin(self.config, self._model_folder, self._tokenizer, device=self._device)

    # a batch

    def _sample_batch(self) -> list[Group]:
        """B groups in the order of their prompts, or fewer at the end of the data. Failed groups, and up to max_refill
        without signal, are replaced after the others are done.
        """
        groups: list[Group] = []
        left = self.config.data.max_refill
        while len(groups) < self.config.data.batch_size:
            prompts = self._draw(self.config.data.batch_size - len(groups))
            if not prompts:
                break
            groups += self._sample(prompts)
            flat = [] if self._has_ended else [group for group in groups if len({r for _, r, _ in group}) == 1]
            self._learn(flat[:left])
            groups = [group for group in groups if not any(group is one for one in flat[:left])]
            left -= min(left, len(flat))
        self._learn(groups)
        return groups

    def _learn(self, groups: Sequence[Group]) -> None:
        """These groups leave, trained or replaced: a curriculum counts their right samples."""
        for group in groups:
            judged = [correct for _, _, correct in group if correct is not None]
            self._source.learn(self._drawn.pop(group[0][0].uid), sum(judged), len(judged))

    def _n_samples(self, uid: int) -> int:
        """Samples of a group at the version of the learner, of the source of its row."""
        return stage_at(self._stages, self._actor.version, self._drawn[uid].source).n_samples

    def _draw(self, n: int) -> list[Prompt]:
        prompts: list[Prompt] = []
        while len(prompts) < n and not self._has_ended:
            drawn = self._source.draw()
            if drawn is None:
                self._has_ended = True
                break
            self._drawn[self._next_uid] = drawn
            samples = list(range(self._n_samples(self._next_uid)))
            prompts.append(Prompt(self._next_uid, 0, self._actor.version, samples, "", drawn.text))
            self._next_uid += 1
        return prompts

    def _sample(self, prompts: Sequence[Prompt]) -> Iterator[Group]:
        """Sample the prompts, one engine after the other. Yields the groups that could be sampled and scored."""
        made: dict[int, list[Trajectory]] = {prompt.uid: [] for prompt in prompts}
        for index, runner in enumerate(self._runners):
            share = [prompt for prompt in prompts if self._engine_of(prompt) == index]
            for outcome in sample_share(runner, share, self._woken):
                made[outcome.uid].append(outcome)
        for uid, trajectories in made.items():
            trajectories.sort(key=lambda trajectory: trajectory.sample)
            group = [(trajectory, *verdict) for trajectory in trajectories if (verdict := self._score(trajectory))]
            n_samples = self._n_samples(uid)
            least = min(LEAST, n_samples) if self.config.reward.partial_groups else n_samples
            if len(trajectories) == n_samples and len(group) >= least:
                yield self._compared(group) if self._compare is not None else group

    def _compared(self, group: Group) -> Group:
        """The group with the rewards of `reward.group`."""
        assert self._compare is not None
        samples = [{"completion": t.text, "reward": reward, "correct": correct} for t, reward, correct in group]
        first = group[0][0]
        for t, _, _ in group:
            self._parts.pop((t.uid, t.sample), None)  # it replaces the rewards of roles, too
        rewards = self._compare(first.prompt_text, samples, json.loads(first.row))
        return [(t, reward, correct) for (t, _, correct), reward in zip(group, rewards, strict=True)]

    def _score(self, trajectory: Trajectory) -> tuple[float, bool | None] | None:
        """Reward and correctness; None when the reward function fails and reward.on_error is "refund"."""
        value = self._value(trajectory)
        if value is None and (reward := declared(self.config.reward.on_error)) is not None:
            return reward, None
        return value

    def _value(self, trajectory: Trajectory) -> tuple[float, bool | None] | None:
        """What the reward function returns: reward and correctness; None when it fails."""
        try:
            row = with_ids(self._reward, json.loads(trajectory.row), trajectory.ids, n_before(trajectory))
            value = self._reward(trajectory.prompt_text, trajectory.text, row)
            result = read_value(value)
            if broken := broken_roles(trajectory.roles, result.get("parts", {})):
                raise ValueError(broken)
        except Exception as error:  # noqa: BLE001  user code: reward.on_error applies
            why = f"{type(error).__name__}: {error}"
            print(f"no score of prompt {trajectory.uid}, sample {trajectory.sample}: {why}", file=sys.stderr)
            return None
        self._parts[trajectory.uid, trajectory.sample] = result.get("parts", {})
        return result["reward"], result["correct"]


def check(config: Config, n_generators: int) -> None:
    """Raises ConfigError for a config that the synchronous loop cannot reproduce."""
    if config.rollout.max_head_offpolicyness != 0:
        raise ConfigError(
            "the reference is synchronous: set rollout.max_head_offpolicyness = 0 (it is "
            f"{config.rollout.max_head_offpolicyness})"
        )
    check_loop(config, n_generators, converses=True)


def check_loop(config: Config, n_generators: int, *, converses: bool = False) -> None:
    """Raises ConfigError for a config that no loop in one process can run. `converses`: it waits for agents."""
    rules = [
        (config.topology.learners != 1, f"the reference has one learner: topology.learners is "
         f"{config.topology.learners}"),
        (config.learner.loop != LearnerConfig().loop, f"the reference is a loop of its own: learner.loop is "
         f"{config.learner.loop!r}"),
        (config.workflow.uses_endpoint and not converses, "this loop runs no conversations in worker processes: "
         f"workflow.function is {config.workflow.function!r}"),
        (n_generators < 1, f"at least one generator samples; got {n_generators}"),
    ]  # fmt: skip
    for is_broken, sentence in rules:
        if is_broken:
            raise ConfigError(sentence)


def sample_share(
    runner: RolloutRunner, share: Sequence[Prompt], woken: threading.Event | None = None
) -> Iterator[Trajectory]:
    """Sample a share; all of its prompts begin before the first decode step. `woken`: set when an episode that waits
    for an event outside the engine can go on.
    """
    for prompt in share:
        yield from (outcome for outcome in runner.begin(prompt) if isinstance(outcome, Trajectory))
    while runner.n_live:
        if woken is not None:
            woken.clear()
            yield from (outcome for outcome in runner.go_on() if isinstance(outcome, Trajectory))
            if runner.n_live and runner.is_idle:
                woken.wait()
                continue
        yield from (outcome for outcome in runner.step() if isinstance(outcome, Trajectory))


def items(groups: Sequence[Group], step: int, parts: Parts | None = None) -> Iterator[ShardItem]:
    """The batch as the messages that a learner receives. `parts`: with the rewards of roles."""
    for index, group in enumerate(groups):
        for t, reward, correct in group:
            place = {"step": step, "clock": step, "group": index, "n_groups": len(groups), "born": step}
            own = (parts or {}).get((t.uid, t.sample), {})
            rewards = [own.get(f"{ROLE}{role}", reward) for role in t.roles.split()]
            yield recast(t, ShardItem, reward=reward, correct=correct, rewards=rewards, **place)


def write_lines(learner: OfflineLearner, steps: Iterable[ReferenceStep], out: Path) -> None:
    """Write out/reference.jsonl: a line for each version, with the fields of the head's `update` event."""
    with (out / "reference.jsonl").open("w", encoding="utf-8") as file:
        file.write(dump({"version": learner.version, "digest": learner.digest}) + "\n")
        for step in steps:
            samples = [
                {"uid": t.uid, "sample": t.sample, "n_tokens": len(t.logps) // 4} for g in step.groups for t, _, _ in g
            ]
            line = {"version": step.version, "digest": step.digest, **step.stats, "samples": samples}
            file.write(dump(line) + "\n")
            print(f"version {step.version}", flush=True)


def exit_code(train: Callable[[], None]) -> int:
    """Of a program that trains on one thread, as every actor on CPU: 0, 2 for invalid input, or 1."""
    torch.set_num_threads(1)
    try:
        train()
    except (ArealBusError, FileExistsError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | FileExistsError) else 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m tools.offline.synchronous_reference", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("config", type=Path, help="a TOML file with rollout.max_head_offpolicyness = 0")
    parser.add_argument("--generators", type=int, default=1, help="whose shares are emulated")
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument(
        "--recorded", type=Path, metavar="RUN", help="a run with journal.replay, whose tokens are taken"
    )
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="as of a launch")
    args = parser.parse_args()

    def train() -> None:
        config, folder = load(args.config, args.set), args.config.resolve().parent
        args.out.mkdir(parents=True)
        reference = SynchronousReference(config, folder, args.out, n_generators=args.generators, recorded=args.recorded)
        write_lines(reference, reference.run(), args.out)
        reference.close()

    return exit_code(train)


if __name__ == "__main__":
    leave(main())
