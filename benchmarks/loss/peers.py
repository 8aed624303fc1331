"""AReaL's and verl's sides of the bench `loss`, each imported on first use."""

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.bare_import import absent, bare
from benchmarks.harness.worker_main import seconds, serve
from benchmarks.loss.inputs import draw

EPS = 0.2
NO_CAP = 1e6  # cap of the behaviour weight: never reached, so the loss is equation 5

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@cache
def areal_modules() -> tuple[Any, Any, Any]:
    """The functions of an AReaL step, with its options and statistics, without its controllers."""
    parts = ("", ".api", ".engine", ".engine.fsdp_utils", ".infra", ".trainer", ".trainer.ppo", ".utils")
    bare(*("areal" + part for part in parts))
    absent("areal.api", "TrainEngine")
    absent("areal.infra", "TrainController")
    absent("areal.infra.rpc.serialization", "serialize_value")
    absent("areal.experimental.training_service.controller.controller", "GatewayTrainController")
    names = ("areal.trainer.ppo.actor", "areal.api.cli_args", "areal.utils.stats_tracker")
    actor, options, tracker = map(importlib.import_module, names)
    return actor, options, tracker


def sampling(options: Any) -> Any:
    """Asks for the behaviour weight; nothing is over its bound, so nothing is rejected."""
    return options.RejectionSamplingConfig(level="token", action="clamp", upper=NO_CAP)


@cache
def areal_alone() -> Loss:
    actor, options, _ = areal_modules()
    rejection = sampling(options)

    def loss(theta: Tensor, prox: Tensor, behav: Tensor, advantage: Tensor) -> Tensor:
        mask = torch.ones(theta.shape, dtype=torch.bool)
        total, _ = actor.ppo_actor_loss_fn(theta, prox, behav, advantage, EPS, mask, rejection_sampling=rejection)
        found: Tensor = total
        return found

    return loss


@cache
def areal_step() -> Loss:
    """The loss with its statistics, recorded and reduced, as a step has them."""
    actor, options, tracker = areal_modules()
    rejection = sampling(options)

    def loss(theta: Tensor, prox: Tensor, behav: Tensor, advantage: Tensor) -> Tensor:
        mask = torch.ones(theta.shape, dtype=torch.bool)
        batch = {"logprobs": behav, "advantages": advantage, "loss_mask": mask, "prox_logp": prox}
        total: Tensor = actor.grpo_loss_fn(
            theta, torch.zeros_like(theta), batch, EPS, None, None, rejection, use_decoupled_loss=True
        )
        if len(tracker.export_all()) < 10:
            raise RuntimeError("the statistics of a step are more than these")
        return total

    return loss


@cache
def verl() -> Loss:
    algorithms: Any = importlib.import_module("verl.trainer.ppo.core_algos")
    options: Any = importlib.import_module("verl.workers.config")
    config = options.ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio=EPS, clip_ratio_c=NO_CAP
    )

    def loss(theta: Tensor, prox: Tensor, behav: Tensor, advantage: Tensor) -> Tensor:
        mask = torch.ones(1, len(theta))
        weight = torch.exp(prox - behav).unsqueeze(0)
        rows = (x.unsqueeze(0) for x in (prox, theta, advantage))
        total, _ = algorithms.compute_policy_loss_vanilla(*rows, mask, config=config, rollout_is_weights=weight)
        found: Tensor = total
        return found

    return loss


LOSSES: dict[str, Callable[[], Loss]] = {"areal": areal_step, "areal_alone": areal_alone, "verl": verl}


def loss(of: str, n: int, seed: int) -> dict[str, float]:
    compute = LOSSES[of]()
    theta, prox, behav, advantage = draw(n, seed)
    theta.requires_grad_()
    last = [0.0]

    def work() -> None:
        theta.grad = None
        total = compute(theta, prox, behav, advantage)
        total.backward()  # type: ignore[no-untyped-call]
        last[0] = float(total.detach())

    return {"seconds": seconds(work), "loss": last[0]}


torch.set_num_threads(1)

if __name__ == "__main__":
    serve({"loss": loss})
