"""Plants a collapse in a run that learns, and measures forecast and rollback (docs/alarms.md, "Collapse ahead").

Each seed trains three branches of one run: clean to the end; planted, in which from version PLANT on the learning rate
is 30 times as high and the sampler stays where it is (its lag grows to 64), evaluated at each version; and rolled back,
which goes on from the version and with the learning rate that the head would order, the sampler staying there.
Versions of which a ring would have a checkpoint are multiples of 5.

python -m areal_lab.loops.collapse CONFIG --out FOLDER --seeds 1 2 3

writes FOLDER/SEED/journal and a line for each seed to FOLDER/seeds.jsonl.
"""

import argparse
import copy
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actors.generator.rollout_runner import RolloutLog, RolloutRunner
from actors.runtime.context import dump
from actors.runtime.process import leave
from areal_bus.config.sections import Config
from areal_bus.core.events import Event
from areal_bus.core.parts.collapse import MARGIN, CollapseForecast, Rollback
from areal_bus.errors import ArealBusError
from areal_lab.loops.evaluated_loop import EvaluatedLoop
from areal_lab.settings import LabConfig, load
from tools.offline.synchronous_reference import ReferenceStep, check_loop

PLANT, LAG, FACTOR, WARM = 20, 64, 30.0, 10  # WARM: updates in which the learning rate rises at the start
CHECKPOINT = 5
AFTER_FALL = 2  # versions that must stay low before a fall counts


@dataclass(frozen=True, slots=True)
class Kept:
    """The state of a version."""

    weights: Mapping[str, Tensor]
    moments: list[dict[str, Tensor]]  # of the optimizer


class PlantedLoop(EvaluatedLoop):
    """A loop of which versions can be gone back to, with a learning rate and a lag for each update."""

    def __init__(self, config: LabConfig, config_folder: Path, folder: Path, *, warm_ups: Path) -> None:
        """As EvaluatedLoop."""
        self._sampled: dict[int, Mapping[str, Tensor]] = {}  # version -> weights
        self._kept: dict[int, Kept] = {}
        self.lr, self.planted_at, self.most_lr = config.actor.lr / FACTOR, config.run.total_train_steps, config.actor.lr
        self._stays_at = 0  # version of the sampler, from planted_at on
        super().__init__(config, config_folder, folder, warm_ups=warm_ups)

    def _check(self, config: Config, n_generators: int) -> None:
        check_loop(config, n_generators)

    def _update_engines(self) -> None:
        """The sampler's version, and the learning rate of the next update."""
        version = self._actor.version
        self._sampled[version] = self._weights()
        if version % CHECKPOINT == 0 or version == PLANT:
            self._kept[version] = Kept(self._sampled[version], copy.deepcopy(self._moments))
        is_planted = version >= self.planted_at
        sampled = max(version - LAG, self._stays_at) if is_planted else max(version - 1, 0)
        if self._engines[0].version != sampled:
            self._engines[0].update(sampled, self._sampled[sampled])
        lr = self.lr * (FACTOR if is_planted else min((version + 1) / WARM, 1.0))
        self._actor.rollback = Rollback(0, 0, 0, min(lr, self.most_lr), "")

    @property
    def _moments(self) -> list[dict[str, Tensor]]:
        return list(self._actor.optimizer.state.values())

    def plant(self, at: int, *, stays_at: int, most_lr: float) -> None:
        """Go back to version `at`; from there on the sampler stays at a version, and the learning rate is high."""
        state = self._kept[at]
        for name, weight in self._actor.policy.parameters().items():
            weight.detach().copy_(state.weights[name])
        for moments, kept in zip(self._moments, state.moments, strict=True):
            for name, tensor in moments.items():
                tensor.copy_(kept[name])
        self._actor.version, self.planted_at, self._stays_at, self.most_lr = at, at, stays_at, most_lr
        self._engines = [self._make_engine()]
        log = RolloutLog("generator-0.0", self.journal)
        self._runners = [RolloutRunner(self._engines[0], self._workflow, self._tokenizer, self.config, log)]
        self._evaluator = self._make_engine()

    def score(self) -> float:
        """Share of right answers on the held-out problems."""
        if self._evaluator.version != self._actor.version:
            self._evaluator.update(self._actor.version, self._weights())
        (problems,) = self._sets
        found = self._evaluated("held-out", problems).figures()["accuracy"]
        assert isinstance(found, float)
        return found

    def steps(self, forecast: CollapseForecast) -> Iterator[tuple[ReferenceStep, str]]:
        """Train to the last step; each step with what announces a collapse."""
        for step in self.run():
            self.journal.write(Event.UPDATE, version=step.version, **step.stats)
            yield step, forecast.see(step.stats)


def fallen_at(scores: Mapping[int, float]) -> int | None:
    """The first version from which on all scores are below nine tenths of the best one before; None if none is."""
    for version in sorted(scores)[1:-AFTER_FALL]:
        best = max(score for other, score in scores.items() if other < version)
        if all(score < 0.9 * best for other, score in scores.items() if other >= version):
            return version
    return None


def measure(loop: PlantedLoop, versions: int) -> dict[str, Any]:
    """Train the three branches of a seed. `versions`: of the planted branch."""
    forecast, at_plant, scores, false = CollapseForecast(), CollapseForecast(), {}, []
    for step, why in loop.steps(forecast):
        false += [step.version] if why else []
        if step.version == PLANT:
            at_plant, scores[PLANT] = copy.deepcopy(forecast), loop.score()
    found: dict[str, Any] = {"clean": loop.score(), "false_alarms": false}
    loop.plant(PLANT, stays_at=PLANT - 1, most_lr=loop.config.actor.lr)
    alarm: dict[str, Any] = {}
    for step, why in loop.steps(at_plant):
        scores[step.version] = loop.score()
        if why and not alarm:
            to = (step.version - MARGIN) // CHECKPOINT * CHECKPOINT
            lr = at_plant.smaller_lr(step.stats, step.version - to)
            alarm = {"alarm": step.version, "why": why, "to": to, "max_lr": lr}
        if step.version == PLANT + versions:
            break
    found |= {"scores": scores, "fallen": fallen_at(scores)} | alarm
    if alarm:
        loop.plant(alarm["to"], stays_at=alarm["to"], most_lr=alarm["max_lr"])
        for _ in loop.run():
            pass
        found["rolled_back"] = loop.score()
    return found


def main() -> int:
    """The command line. Exit code."""
    parser = argparse.ArgumentParser("python -m areal_lab.loops.collapse", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("config", type=Path, help="a TOML file")
    parser.add_argument("--out", type=Path, required=True, help="a folder; seeds that it has are left out")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--planted", type=int, default=8, help="updates of the planted branch")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="as of a launch")
    args = parser.parse_args()
    torch.set_num_threads(1)  # as every actor on CPU
    try:
        for seed in args.seeds:
            folder = args.out / str(seed)
            if folder.exists():
                continue
            config = load(args.config, [*args.set, f"run.seed={seed}"])
            config = load(args.config, [*args.set, f"run.seed={seed}", f"actor.lr={config.actor.lr * FACTOR}"])
            folder.mkdir(parents=True)
            loop = PlantedLoop(config, args.config.resolve().parent, folder, warm_ups=args.out)
            line = dump({"seed": seed} | measure(loop, args.planted))
            loop.close()
            with (args.out / "seeds.jsonl").open("a", encoding="utf-8") as file:
                file.write(line + "\n")
            print(line, flush=True)
    except ArealBusError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    leave(main())
