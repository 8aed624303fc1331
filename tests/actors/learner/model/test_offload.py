"""actor.offload: the weights are those without it, on one rank and two, on a CPU that stands for GPU and host."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from actors.learner.batching import build
from actors.learner.link.rendezvous import LearnerRanks, meet, part
from actors.learner.model.policy import whole
from actors.learner.update.optimizers import move_states, offload
from areal_bus.config.sections import Config
from areal_bus.config.validation import check
from areal_bus.errors import ConfigError
from areal_bus.messages import Role
from areal_bus.weights.process_group import join_store
from launch.memory import DecoderShape, estimate
from tests.support.forked_ranks import run_ranks
from tests.support.learner_setup import random_shard, settings, tiny_actor

MODELS = {"advantage": "gae", "kl_ctl": 0.3, "ppo_epochs": 2, "lr": 1e-3, "adam_eps": 1e-4}
WAYS = ("none", "optimizer", "all")


def config_of(way: str) -> Config:
    return settings(actor=MODELS | {"offload": way}, critic={"lr": 1e-4}, learner={"max_tokens_per_mb": 24})


def trained(folder: Path, way: str, ranks: LearnerRanks) -> dict[str, Tensor]:
    actor = tiny_actor(folder / f"{way}-{ranks.index}", config_of(way), ranks=ranks)
    assert actor.policy.sharded == (ranks.size > 1 or way == "all")
    for version in range(2):
        drawn = [
            item for item in random_shard(version, clock=version, n_groups=4) if item.group % ranks.size == ranks.index
        ]
        batch = build(drawn, step=version, clock=version, n_groups=4, eta=0)
        actor.ppo_update(actor.compute_advantages_and_returns(batch))
    assert all(isinstance(one, DTensor) == actor.policy.sharded for one in actor.policy.parameters().values())
    assert actor.critic is not None
    named = {**actor.policy.parameters(), **{f"v.{k}": v for k, v in actor.critic.model.parameters().items()}}
    return {name: whole(one).detach().clone() for name, one in named.items()}


def one_rank(index: int, endpoint: str, folder: str, size: int) -> None:
    """FSDP2's group is the process's own: a fork has none yet."""
    for way in WAYS:
        save_file(trained(Path(folder), way, LearnerRanks()), Path(folder) / f"1-{way}.safetensors")
    part()


def two_ranks(index: int, endpoint: str, folder: str, size: int) -> None:
    store = join_store(endpoint, 60.0)
    ranks = meet(store, index=index, size=size, interface="lo", device="cpu", timeout_s=60.0)
    for way in WAYS:
        weights = trained(Path(folder), way, ranks)
        if index == 0:
            save_file(weights, Path(folder) / f"2-{way}.safetensors")
    part()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [("one_rank", 1), ("two_ranks", 2)])
def test_offloaded_learners_have_the_same_weights(tmp_path: Path, name: str, size: int) -> None:
    run_ranks(__name__, name, {"folder": str(tmp_path), "size": size})
    none, optimizer, everything = (load_file(tmp_path / f"{size}-{way}.safetensors") for way in WAYS)
    start = tiny_actor(tmp_path / "start", config_of("none")).policy.parameters()
    assert all(not torch.equal(none[name], value) for name, value in start.items())
    for name, value in none.items():
        assert torch.equal(optimizer[name], value), name
        torch.testing.assert_close(everything[name], value, atol=1e-6, rtol=0)


def test_states_are_elsewhere_between_steps_and_single_numbers_stay() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer, seen = torch.optim.AdamW([parameter]), []
    offload(optimizer, torch.device("cpu"))
    optimizer.register_step_post_hook(lambda *_: seen.append(optimizer.state[parameter]["exp_avg"].device.type))
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert seen == ["cpu"]
    move_states(optimizer, torch.device("meta"))  # stands for another place
    kinds = {kind: value.device.type for kind, value in optimizer.state[parameter].items()}
    assert kinds == {"exp_avg": "meta", "exp_avg_sq": "meta", "step": "cpu"}


@pytest.mark.parametrize("learners", [1, 2])
def test_the_plan_shows_both_places(learners: int) -> None:
    shape = DecoderShape(512, 4, 2048, 8, 8, 64, 1000, True)
    n, frozen = shape.n_parameters // learners, 0

    def need(way: str, **actor: Any) -> Any:
        made = settings(
            actor={"offload": way, **actor},
            topology={"gpus_per_host": 4, "learners": learners},
            data={"task": "sums", "batch_size": 2},
            gconfig={"n_samples": 2, "max_new_tokens": 4},
        )
        return estimate(made, shape, Role.LEARNER, 1, n_prompt=2)

    none, states, everything = need("none"), need("optimizer"), need("all")
    assert states.host - none.host == 8 * n
    assert none.device - states.device == 0 + frozen, "the peak is the step of the optimizer, which needs the states"
    assert everything.host - none.host == 16 * n
    assert everything.device < none.device - 11 * n
    critic = need("optimizer", advantage="gae")
    assert critic.host - need("none", advantage="gae").host == 16 * n


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"actor": {"offload": "all"}}, "without topology.gpus_per_host all of it is there"),
        (
            {"actor": {"offload": "optimizer", "optimizer": "sgd"}, "topology": {"gpus_per_host": 2}},
            'actor.optimizer = "sgd" has none',
        ),
    ],
)
def test_offloading_without_use_is_refused(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(settings(**sections, data={"task": "sums", "chat_template": False}))
