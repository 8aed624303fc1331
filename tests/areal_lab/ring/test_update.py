"""The update of [learner.simulated]: its time, its weights, and settings that contradict it."""

from pathlib import Path

import pytest
import torch

from actors.learner.batching import Batch, Item
from areal_bus.config.learner import SimulatedUpdateConfig
from areal_bus.config.loader import load
from areal_bus.errors import ConfigError
from areal_lab.ring.update import SimulatedUpdate, simulated_update
from tests.support.learner_setup import batch_of, random_shard, settings

SIMULATED = Path(__file__).parents[3] / "configs" / "sim512.toml"


def batch(n_trained: int, clock: int = 0) -> Batch:
    whole, trained = torch.arange(n_trained), torch.ones(n_trained, dtype=torch.bool)
    item = Item(
        uid=0, sample=0, group=0, reward=0.0, correct=None, finish="stop", text="", ids_T=whole, places_K=whole,
        behav_K=whole.float(), trained_K=trained, lags_K=torch.zeros_like(whole), n_trained=n_trained,
    )  # fmt: skip
    return Batch(step=clock, clock=clock, n_groups=1, items=[item])


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def wait(self, seconds: float) -> None:
        self.now += seconds


def updated(clock: int, *, seed: int = 1) -> list[torch.Tensor]:
    time, weights = Clock(), [torch.zeros(3, 2), torch.zeros(4)]
    made = SimulatedUpdate(
        SimulatedUpdateConfig(update_s=0.5, tokens_per_s=10.0), seed=seed, clock=lambda: time.now, wait=time.wait
    )
    n_ticks = 0

    def tick() -> None:
        nonlocal n_ticks
        n_ticks += 1

    made.run(batch(20, clock), weights, lr=0.1, tick=tick)
    assert time.now == pytest.approx(2.5)
    assert n_ticks >= 10, "it looks at its messages meanwhile"
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
        simulated = simulated_update(settings(learner={"simulated": {"update_s": 1.0, "tokens_per_s": 10.0}},
                                              actor={"ppo_epochs": n_epochs}))  # fmt: skip
        seconds.append(simulated.seconds(batch_of(random_shard(0))))
    assert seconds[1] - 1.0 == pytest.approx(3 * (seconds[0] - 1.0))
