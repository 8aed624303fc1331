"""The losses of the Tinker API: sums over all positions of all data. Pure functions of log-probs.

N positions (times targets) of all data, end to end. A position whose weight or advantage is 0 adds exactly 0.
Definitions: https://tinker-docs.thinkingmachines.ai/tinker/losses.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from areal_serve.rejection import Rejected

Inputs = Mapping[str, Tensor]  # each (N,)
Config = Mapping[str, float]
Loss = Callable[[Tensor, Inputs, Config, Sequence[int]], Tensor]


def cross_entropy(logp_N: Tensor, inputs: Inputs, config: Config, lengths: Sequence[int]) -> Tensor:
    weight_N = inputs["weights"]
    kept = weight_N != 0
    return -(logp_N[kept] * weight_N[kept]).sum()


def importance_sampling(logp_N: Tensor, inputs: Inputs, config: Config, lengths: Sequence[int]) -> Tensor:
    kept = inputs["advantages"] != 0
    return -((logp_N - inputs["logprobs"])[kept].exp() * inputs["advantages"][kept]).sum()


def ppo(logp_N: Tensor, inputs: Inputs, config: Config, lengths: Sequence[int]) -> Tensor:
    kept = inputs["advantages"] != 0
    ratio_N = (logp_N - inputs["logprobs"])[kept].exp()
    return _clipped(ratio_N, inputs, config, kept)


def cispo(logp_N: Tensor, inputs: Inputs, config: Config, lengths: Sequence[int]) -> Tensor:
    kept = inputs["advantages"] != 0
    ratio_N = (logp_N.detach() - inputs["logprobs"])[kept].exp()
    low, high = _bounds(inputs, config, kept)
    return -(ratio_N.clamp(low, high) * logp_N[kept] * inputs["advantages"][kept]).sum()


def dro(logp_N: Tensor, inputs: Inputs, config: Config, lengths: Sequence[int]) -> Tensor:
    """The quadratic term counts every position, those with advantage 0 too."""
    gap_N = logp_N - inputs["logprobs"]
    kept = inputs["advantages"] != 0
    return -(logp_N[kept] * inputs["advantages"][kept]).sum() + 0.5 * config["beta"] * gap_N.square().sum()


def gspo(logp_N: Tensor, inputs: Inputs, config: Config, lengths: Sequence[int]) -> Tensor:
    """Each token has the ratio of its sequence, and the gradient of its own log-prob (arXiv 2507.18071, GSPO-token)."""
    mask_N = inputs["sequence_ratio_mask"] != 0
    gap_N = logp_N.detach() - inputs["logprobs"]
    means = [
        gap[mask].mean() if mask.any() else gap.new_zeros(())
        for gap, mask in zip(torch.split(gap_N, list(lengths)), torch.split(mask_N, list(lengths)), strict=True)
    ]
    mean_N = torch.stack(means).repeat_interleave(torch.tensor(lengths, device=logp_N.device))
    kept = inputs["advantages"] != 0
    ratio_N = (mean_N + logp_N - logp_N.detach())[kept].exp()
    return _clipped(ratio_N, inputs, config, kept)


def _clipped(ratio_N: Tensor, inputs: Inputs, config: Config, kept: Tensor) -> Tensor:
    advantage_N = inputs["advantages"][kept]
    low, high = _bounds(inputs, config, kept)
    return -torch.minimum(ratio_N * advantage_N, ratio_N.clamp(low, high) * advantage_N).sum()


def _bounds(inputs: Inputs, config: Config, kept: Tensor) -> tuple[Tensor, Tensor]:
    """The thresholds of each position: of the datum if it has its own."""
    low, high = (
        inputs[name][kept] if name in inputs else torch.full((), config[name], device=kept.device)
        for name in ("clip_low_threshold", "clip_high_threshold")
    )
    return low, high


CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
SAMPLED = ("logprobs", "advantages")
LOSSES: Mapping[str, tuple[Loss, tuple[str, ...], Mapping[str, float]]] = {  # with inputs that it needs, and its config
    "cross_entropy": (cross_entropy, ("weights",), {}),
    "importance_sampling": (importance_sampling, SAMPLED, {}),
    "ppo": (ppo, SAMPLED, CLIP),
    "cispo": (cispo, SAMPLED, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": (dro, SAMPLED, {"beta": 0.05}),
    "gspo": (gspo, (*SAMPLED, "sequence_ratio_mask"), CLIP),
}


def find_loss(name: str, config: Mapping[str, float | str]) -> tuple[Loss, tuple[str, ...], Config]:
    """The loss, the inputs that it needs, and its config with defaults. Raises Rejected."""
    if name not in LOSSES:
        raise Rejected(f"unknown loss {name!r}: this server has {', '.join(LOSSES)}")
    loss, needed, defaults = LOSSES[name]
    for key, value in config.items():
        if key not in defaults:
            known = f"its keys are {', '.join(defaults)}" if defaults else "it has none"
            raise Rejected(f"unknown key {key!r} in the config of loss {name}: {known}")
        if not isinstance(value, float) or value != value or abs(value) == float("inf"):
            raise Rejected(f"invalid {key} of loss {name}: it must be a finite number, not {value!r}")
    return loss, needed, {**defaults, **{key: float(value) for key, value in config.items()}}
