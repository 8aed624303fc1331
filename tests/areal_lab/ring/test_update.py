"""The update of [learner.simulated]: its time, its weights, and settings that contradict it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from areal_bus.config.learner import SimulatedUpdateConfig
from areal_bus.config.loader import load
from areal_bus.errors import ConfigError
from areal_lab.ring.update import SimulatedUpdate, simulated_update
from tests.support.learner_setup import batch_of, random_shard, settings, shard_item

SIMULATED = Path(__file__).parents[3] / "configs" / "sim512.toml"


def updated(clock: int) -> list[torch.Tensor]:
    """Weights after an update of 20 tokens, which takes its time in slices."""
    waits, weights = list[float](), [torch.zeros(3, 2), torch.zeros(4)]
    how: dict[str, Any] = {"seed": 1, "clock": lambda: sum(waits), "wait": waits.append}
    made = SimulatedUpdate(SimulatedUpdateConfig(update_s=0.5, tokens_per_s=10.0), **how)
    shard, ticks = [shard_item(group=g, n_groups=5, clock=clock) for g in range(5)], list[int]()
    made.run(batch_of(shard, clock=clock), weights, lr=0.1, tick=lambda: ticks.append(1))
    assert sum(waits) == pytest.approx(2.5)
    assert len(ticks) >= 10, "it looks at its messages meanwhile"
    return weights


def test_all_ranks_compute_the_same_weights_and_each_version_other_ones() -> None:
    assert all(torch.equal(a, b) for a, b in zip(updated(3), updated(3), strict=True))
    assert not torch.equal(updated(3)[0], updated(4)[0])
    assert 0 < float(updated(3)[0].abs().max()) < 1


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (["rollout.engine=builtin", "topology.tensor_parallel=1"], "trains nothing"),
        (["learner.warmup.steps=3"], "learner.warmup.steps"),
        (["actor.kl_ctl=0.1"], "a reference model"),
    ],
)
def test_a_simulated_update_runs_no_model(changes: list[str], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        load(SIMULATED, changes)


def test_a_simulated_update_takes_the_time_of_its_passes() -> None:
    seconds = []
    for n_epochs in (1, 3):
        learner = {"simulated": {"update_s": 1.0, "tokens_per_s": 10.0}}
        simulated = simulated_update(settings(learner=learner, actor={"ppo_epochs": n_epochs}))
        seconds.append(simulated.seconds(batch_of(random_shard(0))))
    assert seconds[1] - 1.0 == pytest.approx(3 * (seconds[0] - 1.0))
