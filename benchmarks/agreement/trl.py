"""TRL's side of the bench `agreement`: the loss of its GRPOTrainer, called without a model, on padded rows.

TRL computes the loss in a method of the trainer. Here the method runs on a record that has the settings it reads, and
that returns the log-probs of the rollouts where the trainer would ask its model. TRL's advantages are computed amid
generation and are not compared.
"""

import importlib
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.agreement import inputs
from benchmarks.agreement.inputs import Rollouts

Function = Callable[[Rollouts], Tensor]

trainer: Any = importlib.import_module("trl").GRPOTrainer


def loss(kind: str, *, level: str = "token", beta: float = 0.0, **keys: Any) -> Function:
    """Gradient of the whole loss by the log-prob of each token. `kind` is TRL's `loss_type`."""

    def compute(rollouts: Rollouts) -> Tensor:
        theta = rollouts.theta_BL.clone().requires_grad_()
        record = settings(theta, loss_type=kind, importance_sampling_level=level, beta=beta, **keys)
        total = trainer._compute_loss(record, None, batch(rollouts, only_kl=beta > 0))
        (found,) = torch.autograd.grad(total, theta)
        return found[rollouts.mask_BL]

    return compute


def batch(rollouts: Rollouts, *, only_kl: bool) -> dict[str, Tensor]:
    """What the trainer collects for a batch. `only_kl`: without advantages the KL term alone has a gradient."""
    ids = torch.zeros(rollouts.mask_BL.shape, dtype=torch.int64)
    advantages = rollouts.advantages_BL[:, 0]
    return {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1] + 1,
        "completion_ids": ids,
        "completion_mask": rollouts.mask_BL.long(),
        "advantages": torch.zeros_like(advantages) if only_kl else advantages,
        "old_per_token_logps": rollouts.prox_BL,
        "ref_per_token_logps": rollouts.reference_BL,
        "num_items_in_batch": rollouts.mask_BL.sum(),
    }


def settings(theta_BL: Tensor, *, delta: float | None = None, high: float = inputs.EPS_HIGHER, **keys: Any) -> Any:
    """The attributes of the trainer that its loss reads."""
    arguments = {
        "delta": delta,
        "use_bias_correction_kl": False,
        "sapo_temperature_pos": inputs.TAU_POS,
        "sapo_temperature_neg": inputs.TAU_NEG,
        "steps_per_generation": 1,
    }
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (theta_BL, torch.zeros_like(theta_BL), None),
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        accelerator=SimpleNamespace(num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x),
        args=SimpleNamespace(**arguments),
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        epsilon_high=high,
        epsilon_low=inputs.EPS,
        max_completion_length=inputs.L,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=False,
        **keys,
    )


FUNCTIONS: dict[str, Function] = {
    "loss ppo": loss("bnpo"),
    "loss ppo, dual clip": loss("bnpo", delta=inputs.DUAL),
    "loss gspo": loss("grpo", level="sequence"),
    "loss cispo, upper bound": loss("cispo", high=1 + inputs.EPS_HIGHER),
    "loss sapo": loss("sapo"),
    "aggregation token-mean": loss("dapo"),
    "aggregation seq-mean-token-mean": loss("grpo"),
    "aggregation seq-mean-token-sum-norm": loss("dr_grpo"),
    "kl k3 as a loss": loss("bnpo", beta=1.0),
}
