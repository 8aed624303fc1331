"""The peers' side of the bench `agreement`: verl's, AReaL's and TRL's own functions on padded rows."""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.agreement import inputs, trl
from benchmarks.agreement.inputs import Rollouts, draw
from benchmarks.harness.worker_main import serve
from benchmarks.loss.peers import areal_modules

Function = Callable[[Rollouts], Tensor]

algorithms: Any = importlib.import_module("verl.trainer.ppo.core_algos")
corrections: Any = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
options: Any = importlib.import_module("verl.workers.config")
areal_actor, areal_options, _ = areal_modules()
areal: Any = importlib.import_module("areal.utils.functional.functional")


def verl_config(**keys: Any) -> Any:
    return options.ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio=inputs.EPS,
        clip_ratio_low=inputs.EPS,
        clip_ratio_high=inputs.EPS_HIGHER,
        tau_pos=inputs.TAU_POS,
        tau_neg=inputs.TAU_NEG,
        **{"clip_ratio_c": 1e6} | keys,
    )


def verl_advantage(name: str, **keys: Any) -> Function:
    def compute(rollouts: Rollouts) -> Tensor:
        last = rollouts.lengths_B - 1
        scores = torch.zeros_like(rollouts.theta_BL).scatter(1, last.unsqueeze(1), rollouts.rewards_B.unsqueeze(1))
        function = getattr(algorithms, f"compute_{name}_outcome_advantage")
        index = {} if name == "reinforce_plus_plus" else {"index": rollouts.groups_B.numpy().astype(np.int64)}
        found, _ = function(
            token_level_rewards=scores, response_mask=rollouts.mask_BL.double(), config=_Gamma(), **index, **keys
        )
        values: Tensor = found[rollouts.mask_BL]
        return values

    return compute


class _Gamma(dict[str, float]):
    """The configuration that verl's estimators read."""

    gamma = 1.0


def verl_loss(name: str, aggregation: str = "token-mean", **keys: Any) -> Function:
    config = verl_config(**keys)
    config.global_batch_info.update(loss_scale_factor=inputs.L)
    function = getattr(algorithms, f"compute_policy_loss_{name}")

    def compute(rollouts: Rollouts) -> Tensor:
        def total(theta_BL: Tensor) -> Tensor:
            rows = (rollouts.prox_BL, theta_BL, rollouts.advantages_BL)
            mask = rollouts.mask_BL.double()
            return function(*rows, mask, loss_agg_mode=aggregation, config=config)[0]  # type: ignore[no-any-return]

        return gradient(total, rollouts)

    return compute


def areal_loss(**keys: Any) -> Function:
    def compute(rollouts: Rollouts) -> Tensor:
        def total(theta_BL: Tensor) -> Tensor:
            rows = (theta_BL, rollouts.prox_BL, rollouts.behav_BL, rollouts.advantages_BL)
            return areal.ppo_actor_loss_fn(  # type: ignore[no-any-return]
                *rows, inputs.EPS, rollouts.mask_BL, eps_clip_higher=inputs.EPS_HIGHER, **keys
            )[0]

        return gradient(total, rollouts)

    return compute


def rejection(**keys: Any) -> Any:
    return areal_options.RejectionSamplingConfig(**keys)


def areal_weight(**keys: Any) -> Function:
    """Its weight where the token is kept, else 0."""
    config = rejection(**keys)

    def compute(rollouts: Rollouts) -> Tensor:
        found = areal.apply_rejection_sampling(rollouts.prox_BL, rollouts.behav_BL, rollouts.mask_BL, None, config)
        weights: Tensor = found.behave_imp_weight * found.loss_mask
        return weights[rollouts.mask_BL]

    return compute


def verl_weight(level: str, threshold: float | str) -> Function:
    def compute(rollouts: Rollouts) -> Tensor:
        log_ratio = rollouts.prox_BL - rollouts.behav_BL
        weights, _ = corrections.compute_rollout_correction_weights(
            log_ratio, rollouts.mask_BL.double(), level, threshold
        )
        found: Tensor = weights[rollouts.mask_BL]
        return found

    return compute


def gradient(total: Callable[[Tensor], Tensor], rollouts: Rollouts) -> Tensor:
    theta = rollouts.theta_BL.clone().requires_grad_()
    (found,) = torch.autograd.grad(total(theta), theta)
    return found[rollouts.mask_BL]


def areal_sapo(rollouts: Rollouts) -> Tensor:
    """Per token; its mean is over tokens, ours over trajectories."""
    mask = rollouts.mask_BL

    def total(theta: Tensor) -> Tensor:
        loss, _ = areal.sapo_loss_fn(
            theta, rollouts.prox_BL, rollouts.advantages_BL, inputs.TAU_POS, inputs.TAU_NEG, mask
        )
        return loss  # type: ignore[no-any-return]

    by_token = gradient(total, rollouts) * mask.sum()
    return by_token / (inputs.B * rollouts.lengths_B.unsqueeze(1).expand_as(mask)[mask])


def areal_gspo(rollouts: Rollouts) -> Tensor:
    """As `areal_sapo`. Its gradient of a trajectory's ratio goes to all tokens, which adds up to ours."""
    mask = rollouts.mask_BL
    by_token = areal_loss(importance_sampling_level="sequence")(rollouts) * mask.sum()
    return by_token / (inputs.B * rollouts.lengths_B.unsqueeze(1).expand_as(mask)[mask])


def areal_m2po(rollouts: Rollouts) -> Tensor:
    kept = areal_actor._apply_m2po_masking(rollouts.behav_BL, rollouts.prox_BL, rollouts.mask_BL, inputs.M2)
    found: Tensor = kept[rollouts.mask_BL].double()
    return found


def areal_loglinear(rollouts: Rollouts) -> Tensor:
    found = areal_actor.compute_prox_logp_approximations(
        rollouts.behav_BL, rollouts.theta_BL, 9 - rollouts.lags_BL, 9, "loglinear"
    )
    values: Tensor = found["loglinear"][rollouts.mask_BL]
    return values


def areal_overlong(rollouts: Rollouts) -> Tensor:
    data = {
        "rewards": torch.zeros(inputs.B, dtype=torch.float64),
        "input_ids": rollouts.mask_BL.long(),
        "loss_mask": rollouts.mask_BL,
    }
    found: Tensor = areal.reward_overlong_penalty(data, inputs.OVERLONG, inputs.PENALTY, inputs.L)["rewards"]
    return found


def verl_gae(rollouts: Rollouts) -> Tensor:
    last = rollouts.lengths_B - 1
    scores = torch.zeros_like(rollouts.theta_BL).scatter(1, last.unsqueeze(1), rollouts.rewards_B.unsqueeze(1))
    _, returns = algorithms.compute_gae_advantage_return(
        scores, rollouts.values_BL, rollouts.mask_BL.double(), inputs.DISCOUNT, inputs.LAMBDA
    )
    found: Tensor = returns[rollouts.mask_BL]
    return found


def verl_value_loss(rollouts: Rollouts) -> Tensor:
    new = rollouts.new_values_BL.clone().requires_grad_()
    returns = rollouts.rewards_B.unsqueeze(1).expand_as(new)
    total, _ = algorithms.compute_value_loss(
        new, returns, rollouts.values_BL, rollouts.mask_BL.double(), inputs.VALUE_CLIP
    )
    (found,) = torch.autograd.grad(total, new)
    return found[rollouts.mask_BL]


def verl_kl(name: str) -> Function:
    def compute(rollouts: Rollouts) -> Tensor:
        found: Tensor = algorithms.kl_penalty_forward(rollouts.theta_BL, rollouts.reference_BL, name)
        return found[rollouts.mask_BL]

    return compute


BY_MEAN = "seq-mean-token-mean"
UNBOUNDED = 1e6
KL = {"level": "token", "action": "mask", "lower": 0.0, "upper": inputs.KL_UPPER}

FUNCTIONS: dict[str, dict[str, Function]] = {
    "advantage grpo": {"verl": verl_advantage("grpo")},
    "advantage dr_grpo": {"verl": verl_advantage("grpo", norm_adv_by_std_in_grpo=False)},
    "advantage rloo": {"verl": verl_advantage("rloo")},
    "advantage opo": {"verl": verl_advantage("opo")},
    "advantage reinforce_plus_plus": {"verl": verl_advantage("reinforce_plus_plus")},
    "advantage reinforce_plus_plus_baseline": {"verl": verl_advantage("reinforce_plus_plus_baseline")},
    "loss ppo": {"verl": verl_loss("vanilla"), "areal": areal_loss()},
    "loss ppo, dual clip": {
        "verl": verl_loss("vanilla", clip_ratio_c=inputs.DUAL),
        "areal": areal_loss(c_clip=inputs.DUAL),
    },
    "loss gspo": {"verl": verl_loss("gspo", BY_MEAN), "areal": areal_gspo},
    "loss gmpo": {"verl": verl_loss("geo_mean")},
    "loss cispo": {"verl": verl_loss("cispo")},
    "loss sapo": {"verl": verl_loss("sapo", BY_MEAN), "areal": areal_sapo},
    **{
        f"aggregation {name}": {"verl": verl_loss("vanilla", name)}
        for name in ("token-mean", BY_MEAN, "seq-mean-token-sum", "seq-mean-token-sum-norm")
    },
    "decoupled, unbounded": {
        "areal": areal_loss(rejection_sampling=rejection(level="token", action="clamp", upper=UNBOUNDED))
    },
    "decoupled, clamped": {
        "areal": areal_loss(rejection_sampling=rejection(level="token", action="clamp", upper=inputs.CAP))
    },
    "decoupled, masked": {
        "areal": areal_loss(rejection_sampling=rejection(level="token", action="mask", upper=inputs.CAP))
    },
    "weight tis": {"verl": verl_weight("token", inputs.CAP)},
    "weight tis_sequence": {"verl": verl_weight("sequence", inputs.CAP)},
    "weight icepop": {
        "verl": verl_weight("token", f"{inputs.LOWER}_{inputs.UPPER}"),
        "areal": areal_weight(level="token", action="mask", lower=inputs.LOWER, upper=inputs.UPPER),
    },
    "weight by sequence, masked": {
        "areal": areal_weight(level="sequence", action="mask", lower=inputs.SEQUENCE_LOWER, upper=inputs.SEQUENCE_UPPER)
    },
    "weight by k2, masked": {"areal": areal_weight(metric="kl_k2", **KL)},
    "m2po mask": {"areal": areal_m2po},
    "loglinear prox": {"areal": areal_loglinear},
    "overlong penalty": {"areal": areal_overlong},
    "gae returns": {"verl": verl_gae},
    "value loss, clipped": {"verl": verl_value_loss},
    **{f"kl {name}": {"verl": verl_kl(name)} for name in ("k1", "k2", "k3")},
}


for name, function in trl.FUNCTIONS.items():
    FUNCTIONS.setdefault(name, {})["trl"] = function


def compute(seed: int) -> dict[str, dict[str, list[float]]]:
    return {
        name: {peer: function(draw(seed)).detach().tolist() for peer, function in sides.items()}
        for name, sides in FUNCTIONS.items()
    }


torch.set_num_threads(1)

if __name__ == "__main__":
    serve({"compute": compute})
