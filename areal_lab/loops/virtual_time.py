"""Training in virtual time: real sampling and updates of a model, along the events of a ring with given durations.

It compares staleness policies at equal wall time: [virtual_time] gives the times of tokens, updates and pushes, so the
result depends on no machine and repeats bit for bit. `virtual_ring.py` decides with the production gate which version
samples each token and which groups form a batch. A sample is decoded to its end with the weights at its begin. When
new weights arrive, the tokens that would begin later are sampled again with them.

python -m areal_lab.loops.virtual_time CONFIG --out FOLDER

writes FOLDER/config.json, FOLDER/journal (the events `update` and `evaluation`) and FOLDER/summary.json.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from actors.learner.batching import build
from actors.runtime.process import leave
from areal_bus.config.capacity import slots
from areal_bus.config.sections import Config
from areal_bus.core.parts.gate import Gate
from areal_bus.core.parts.staleness import StalenessPolicy
from areal_bus.core.rows import DataCursor
from areal_bus.core.rules import MAX_REISSUES
from areal_bus.errors import ConfigError
from areal_bus.messages import Partial, Prompt, Trajectory
from areal_lab.loops.evaluated_loop import EvaluatedLoop, run_command
from areal_lab.loops.virtual_ring import Key, VirtualRing
from areal_lab.settings import LabConfig
from tools.offline.synchronous_reference import Group, ReferenceStep, check_loop, items


class VirtualTimeLoop(EvaluatedLoop):
    """The worker of a virtual ring: one engine samples, one learner trains."""

    def __init__(self, config: LabConfig, config_folder: Path, folder: Path, *, warm_ups: Path | None = None) -> None:
        """As EvaluatedLoop. Raises ConfigError for a config without virtual_time.seconds."""
        super().__init__(config, config_folder, folder, warm_ups=warm_ups)
        (self._runner,) = self._runners
        self._staleness = StalenessPolicy(config.rollout.staleness_policy)
        self._cursor = DataCursor(self._source, max_reissues=MAX_REISSUES)
        self._prompts: dict[int, Prompt] = {}  # of live groups
        self._sampled: dict[Key, Trajectory] = {}  # of live groups, to the end as far as their weights reach
        self._groups: dict[int, Group] = {}  # scored
        self._pushed: Mapping[str, Tensor] = {}
        self._stats: dict[str, float] = {}
        self._trained: list[Group] = []
        self._length = LengthCount()
        gate = Gate(
            batch_size=config.data.batch_size,
            eta=config.rollout.max_head_offpolicyness,
            policy=self._staleness,
        )
        self.ring = VirtualRing(
            config.virtual_time,
            gate,
            self,
            slots=slots(config),
            n_samples=config.gconfig.n_samples,
            seed=config.run.seed,
        )

    def run(self) -> Iterator[ReferenceStep]:
        """Train until the last virtual second, the last step or the end of the data."""
        self._engines[0].update(0, self._weights())
        n_dropped = 0
        for now in self.ring.run():
            stats = self._stats | self._length.of_update(self._trained, self._stats)
            stats |= {"virtual_s": now, "n_dropped": float(self.ring.waste.dropped - n_dropped)}
            n_dropped = self.ring.waste.dropped
            yield ReferenceStep(self._actor.version, stats, self.digest, self._trained)
            if self._actor.version >= self.config.run.total_train_steps:
                return

    def summary(self) -> dict[str, Any]:
        """Virtual seconds, groups that were sampled for nothing, and lengths over the whole run."""
        return {
            "virtual_s": self.ring.now,
            "n_dropped": self.ring.waste.dropped,
            "n_failed": self.ring.waste.failed,
            "length_trained": self._length.trained,
            "length_sampled": self._length.sampled,
        }

    def _check(self, config: Config, n_generators: int) -> None:
        assert isinstance(config, LabConfig)
        check_loop(config, n_generators)
        rules = [
            (config.virtual_time.seconds is None, "give the virtual seconds of the run: set virtual_time.seconds"),
            (config.data.max_refill > 0, "the loop in virtual time replaces no group: set data.max_refill = 0"),
            (config.reward.partial_groups, "the loop in virtual time trains whole groups: set reward.partial_groups = "
             "false"),
            (bool(config.run.stage), "the loop in virtual time has one stage: remove [[run.stage]]"),
        ]  # fmt: skip
        for is_broken, sentence in rules:
            if is_broken:
                raise ConfigError(sentence)

    # the worker of the ring

    def begin(self, n: int) -> Mapping[int, Sequence[int]]:
        """Draw and sample `n` prompts."""
        begun: list[Prompt] = []
        while len(begun) < n and (issue := self._cursor.draw()) is not None:
            uid, born = self._next_uid, self._engines[0].version
            assert born is not None
            samples = list(range(self.config.gconfig.n_samples))
            self._prompts[uid] = Prompt(uid, 0, born, samples, "", issue.drawn.text)
            self._cursor.issue(uid, issue)
            begun.append(self._prompts[uid])
            self._next_uid += 1
        lengths = self._sample_to_the_end([(prompt, {}) for prompt in begun])
        self._length.begin(lengths.values())
        found = {p.uid: [lengths[p.uid, s] for s in p.samples if (p.uid, s) in lengths] for p in begun}
        failed = [prompt for prompt in begun if len(found[prompt.uid]) < len(prompt.samples)]
        for prompt in failed:
            self._forget(prompt.uid)
            self._cursor.close(prompt.uid)
            found[prompt.uid] = []
        return found

    def continue_from(self, kept: Mapping[Key, int]) -> Mapping[Key, int]:
        """Sample behind the kept tokens with the loaded weights."""
        by_prompt: dict[int, dict[int, int]] = {}
        for (uid, sample), n in kept.items():
            by_prompt.setdefault(uid, {})[sample] = n
        return self._sample_to_the_end([(self._prompts[uid], samples) for uid, samples in by_prompt.items()])

    def is_scored(self, uid: int) -> bool:
        """Score a complete group."""
        prompt = self._prompts[uid]
        verdicts = [(t, self._score(t)) for t in (self._sampled[uid, sample] for sample in prompt.samples)]
        group = [(t, *verdict) for t, verdict in verdicts if verdict is not None]
        self._forget(uid)
        if len(group) < len(prompt.samples):
            self._cursor.close(uid)
            return False
        self._groups[uid] = group
        return True

    def drop(self, uid: int) -> None:
        """Issue the row again."""
        del self._groups[uid]
        self._cursor.again(self._cursor.close(uid))

    def train_batch(self, uids: Sequence[int]) -> None:
        """One update."""
        config, clock = self.config, self._actor.version
        self._trained = [self._groups.pop(uid) for uid in uids]
        for uid, group in zip(uids, self._trained, strict=True):
            judged = [correct for _, _, correct in group if correct is not None]
            self._cursor.learn(uid, sum(judged), len(judged))
            self._cursor.close(uid)
        batch = build(
            items(self._trained, clock),
            step=clock,
            clock=clock,
            n_groups=len(self._trained),
            eta=config.rollout.max_head_offpolicyness,
            policy=self._staleness,
        )
        self._stats = self._actor.ppo_update(self._actor.compute_advantages_and_returns(batch))

    def copy_weights(self) -> None:
        """Of the newest version, for a push."""
        self._pushed = self._weights()

    def load(self, version: int) -> None:
        """Load the copied weights."""
        self._engines[0].update(version, self._pushed)

    # samples

    def _sample_to_the_end(self, wanted: Sequence[tuple[Prompt, Mapping[int, int]]]) -> dict[Key, int]:
        """Sample prompts: all samples, or those given with the tokens to keep of each. Returns their lengths."""
        outcomes = []
        for prompt, kept in wanted:
            for sample, n in kept.items():
                if n:
                    self._runner.add_partial(beginning_of(self._sampled[prompt.uid, sample], n))
            outcomes += list(self._runner.begin(part_of(prompt, list(kept) or prompt.samples)))
        while self._runner.n_live:
            outcomes += list(self._runner.step())
        lengths = {}
        for t in outcomes:
            if isinstance(t, Trajectory):
                check_one_turn(t)
                self._sampled[t.uid, t.sample] = t
                lengths[t.uid, t.sample] = t.segments[0][1]
        return lengths

    def _forget(self, uid: int) -> None:
        for sample in self._prompts.pop(uid).samples:
            self._sampled.pop((uid, sample), None)


class LengthCount:
    """Tokens of a sample: of those that were begun, and those that enter the loss."""

    def __init__(self) -> None:
        self._begun = [0, 0]  # samples, tokens
        self._since_update = [0, 0]
        self._taken = [0, 0]  # samples of batches, their tokens that are trained

    @property
    def sampled(self) -> float:
        """Mean length of all samples that were begun."""
        return self._begun[1] / max(1, self._begun[0])

    @property
    def trained(self) -> float:
        """Mean number of trained tokens of the samples in batches."""
        return self._taken[1] / max(1, self._taken[0])

    def begin(self, lengths: Iterable[int]) -> None:
        """Samples were begun; their lengths under the weights at their begin."""
        for length in lengths:
            for count in (self._begun, self._since_update):
                count[0] += 1
                count[1] += length

    def of_update(self, groups: Sequence[Group], stats: Mapping[str, float]) -> dict[str, float]:
        """Figures of an update: `length_trained` and, of the samples begun since the last one, `length_sampled`."""
        n, tokens = sum(map(len, groups)), int(stats["n_tokens"] - stats["n_tokens_masked"])
        self._taken[0] += n
        self._taken[1] += tokens
        begun, self._since_update = self._since_update, [0, 0]
        return {"length_trained": tokens / n} | ({"length_sampled": begun[1] / begun[0]} if begun[0] else {})


def part_of(prompt: Prompt, samples: list[int]) -> Prompt:
    return Prompt(prompt.uid, prompt.attempt, prompt.born, samples, "", prompt.row)


def beginning_of(t: Trajectory, n_tokens: int) -> Partial:
    """The first tokens of a sample, to continue it."""
    n_given = t.segments[0][0]
    return Partial(
        uid=t.uid,
        sample=t.sample,
        attempt=t.attempt,
        term=t.term,
        segments=[[n_given, n_tokens]],
        spans=first_spans(t.spans, n_tokens),
        ids=np.frombuffer(t.ids, dtype="<i4")[: n_given + n_tokens].tobytes(),
        logps=np.frombuffer(t.logps, dtype="<f4")[:n_tokens].tobytes(),
    )


def first_spans(spans: Sequence[Sequence[int]], n_tokens: int) -> list[list[int]]:
    """The version spans of the first tokens."""
    found: list[list[int]] = []
    for version, n in spans:
        if n_tokens <= 0:
            break
        found.append([version, min(n, n_tokens)])
        n_tokens -= n
    return found


def check_one_turn(t: Trajectory) -> None:
    """Raises ConfigError for a sample of several turns, whose beginning cannot be continued."""
    if len(t.segments) != 1:
        raise ConfigError(
            f"the loop in virtual time samples answers of one turn: prompt {t.uid} has {len(t.segments)} turns; use "
            "another workflow.function"
        )


def main() -> int:
    """The command line. Exit code."""
    return run_command(VirtualTimeLoop, module="areal_lab.loops.virtual_time", description=__doc__ or "")


if __name__ == "__main__":
    leave(main())
