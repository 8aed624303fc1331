"""Each loss, aggregation and KL estimator against a float64 reference written token by token from its paper."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.learner.algorithms.losses import AGGREGATIONS, KL_ESTIMATORS, LOSSES
from actors.learner.algorithms.parts import Tokens, Totals, sequences_of
from actors.learner.algorithms.registry import split
from areal_bus.config.learner import ActorConfig

LENGTHS = (3, 1, 5, 2)


def tokens(seed: int = 0, lengths: tuple[int, ...] = LENGTHS, spread: float = 0.4) -> Tokens:
    """Float64; far enough apart that every branch is taken."""
    draw = torch.Generator().manual_seed(seed)
    n, lengths_M = sum(lengths), torch.tensor(lengths)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(n, generator=draw, dtype=torch.float64)

    prox = (-1.5 + noise(0.5)).clamp(max=-0.05)
    behav = (prox + noise(spread)).clamp(max=-0.01)
    sequences = sequences_of(lengths_M)
    advantages = torch.randn(len(lengths), generator=draw, dtype=torch.float64)[sequences]
    return Tokens(
        logprobs_N=(prox + noise(spread)).requires_grad_(),
        anchor_N=prox,
        prox_N=prox,
        behav_N=behav,
        advantages_N=advantages,
        lags_N=torch.randint(0, 5, (n,), generator=draw),
        sequences_N=sequences,
        lengths_M=lengths_M,
        entropy_N=0.5 * torch.rand(n, generator=draw, dtype=torch.float64),
    )


def gradient(loss: Tensor, by: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(loss, by, retain_graph=True)
    return found


def clip(u: float, low: float, high: float) -> float:
    return min(max(u, low), high)


def by_token(t: Tokens, formula: Callable[[float, float, list[float]], tuple[float, float]]) -> tuple[Tensor, Tensor]:
    """(losses, gradients by the own log-prob) from `formula(theta - anchor, advantage, log-ratios of the sequence)`."""
    d = (t.logprobs_N - t.anchor_N).tolist()
    rows = []
    for i, (x, a) in enumerate(zip(d, t.advantages_N.tolist(), strict=True)):
        own = [y for y, s in zip(d, t.sequences_N.tolist(), strict=True) if s == int(t.sequences_N[i])]
        rows.append(formula(x, a, own))
    losses, gradients = zip(*rows, strict=True)
    return torch.tensor(losses, dtype=torch.float64), torch.tensor(gradients, dtype=torch.float64)


EPS, HIGH, DUAL = 0.2, 0.28, 1.5


def ppo_formula(x: float, a: float, _: list[float]) -> tuple[float, float]:
    u = math.exp(x)
    loss = max(-u * a, -clip(u, 1 - EPS, 1 + HIGH) * a)
    slope = -u * a if loss == -u * a else 0.0
    return (-DUAL * a, 0.0) if a < 0 and loss > -DUAL * a else (loss, slope)


def gspo_formula(x: float, a: float, own: list[float]) -> tuple[float, float]:
    s = math.exp(sum(own) / len(own))
    loss = max(-s * a, -clip(s, 1 - EPS, 1 + HIGH) * a)
    return loss, -s * a if loss == -s * a else 0.0


def cispo_formula(x: float, a: float, _: list[float]) -> tuple[float, float]:
    return math.nan, -clip(math.exp(x), 1 - EPS, 1 + HIGH) * a  # its value has log pi in it: see the gradient


def sapo_formula(x: float, a: float, _: list[float]) -> tuple[float, float]:
    u, tau = math.exp(x), 1.0 if a > 0 else 1.05
    gate = 1 / (1 + math.exp(-tau * (u - 1)))
    return -4 / tau * gate * a, -4 * gate * (1 - gate) * u * a


def reinforce_formula(x: float, a: float, _: list[float]) -> tuple[float, float]:
    return math.nan, -a


FORMULAS: dict[str, tuple[Callable[[float, float, list[float]], tuple[float, float]], dict[str, Any]]] = {
    "ppo": (ppo_formula, {"eps_clip_higher": HIGH, "c_clip": DUAL}),
    "gspo": (gspo_formula, {"eps_clip_higher": HIGH}),
    "cispo": (cispo_formula, {"eps_clip_higher": HIGH}),
    "sapo": (sapo_formula, {}),
    "reinforce": (reinforce_formula, {}),
}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("seed", range(5))
def test_a_loss_is_its_formula_and_so_is_its_gradient(name: str, seed: int) -> None:
    t, (formula, keys) = tokens(seed, spread=0.6), FORMULAS[name]
    losses, statistics = split(LOSSES[name](t, ActorConfig(loss=name, **keys)))
    expected, slopes = by_token(t, formula)
    known = ~expected.isnan()
    assert torch.allclose(losses.detach()[known], expected[known], atol=1e-12)
    assert torch.allclose(gradient(losses.sum(), t.logprobs_N), slopes, atol=1e-12)
    assert all(values.shape == losses.shape for values in statistics.values())


def test_gmpo_is_the_geometric_mean_of_clipped_ratios() -> None:
    t, settings = tokens(3, spread=0.6), ActorConfig(loss="gmpo", eps_clip=0.3, eps_clip_higher=0.5)
    losses, _ = split(LOSSES["gmpo"](t, settings))
    at = 0
    for n in LENGTHS:
        own = range(at, at + n)
        advantage = float(t.advantages_N[at])
        ratios = [float(t.ratio_N[i].detach()) for i in own]
        bounded = [min(u, math.exp(0.5)) if advantage > 0 else max(u, math.exp(-0.3)) for u in ratios]
        expected = -(math.prod(bounded) ** (1 / n)) * advantage
        assert losses[at : at + n].tolist() == pytest.approx([expected] * n, abs=1e-12)
        at += n


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_an_aggregation_weighs_each_token_as_its_formula(name: str) -> None:
    lengths = torch.tensor(LENGTHS)
    totals = Totals(n_tokens=11.0, n_sequences=4.0)
    found = AGGREGATIONS[name](lengths, totals, ActorConfig(aggregation=name, aggregation_length=16))
    expected = {
        "token-mean": [1 / 11] * 4,
        "seq-mean-token-mean": [1 / (4 * n) for n in LENGTHS],
        "seq-mean-token-sum": [1 / 4] * 4,
        "seq-mean-token-sum-norm": [1 / (4 * 16)] * 4,
    }[name]
    assert found.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_an_estimator_and_its_gradient_are_those_of_the_formula(name: str) -> None:
    current = torch.tensor([-0.1, -2.0, -3.5, -1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.4, -2.0, -1.5, -7.0], dtype=torch.float64)
    values = KL_ESTIMATORS[name](current, reference)
    values.sum().backward()  # type: ignore[no-untyped-call]
    for value, slope, a, b in zip(
        values.tolist(), current.grad.tolist(), current.tolist(), reference.tolist(), strict=True
    ):
        r = b - a
        wanted = {"k1": (-r, 1.0), "k2": (r * r / 2, -r), "k3": (math.exp(r) - 1 - r, 1 - math.exp(r))}[name]
        assert (value, slope) == pytest.approx(wanted, abs=1e-12)


def test_oapl_fits_the_log_ratio_of_a_trajectory_to_its_advantage() -> None:
    t = tokens(6, spread=0.6)
    losses, _ = split(LOSSES["oapl"](t, ActorConfig(loss="oapl", reward_scaling=4.0)))
    slopes, at = gradient(losses.sum(), t.logprobs_N), 0
    for n in LENGTHS:
        own = slice(at, at + n)
        error = math.fsum((t.logprobs_N.detach() - t.behav_N)[own].tolist()) - float(t.advantages_N[at])
        assert losses[own].tolist() == pytest.approx([error**2 / 8] * n, abs=1e-12)
        assert slopes[own].tolist() == pytest.approx([n * error / 4] * n, abs=1e-12)
        at += n


LOGITS = torch.tensor([0.3, -1.2, 2.0, 0.7], dtype=torch.float64)
OTHER = torch.tensor([-0.5, 0.4, 1.1, 0.2], dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "is_unbiased", "direction"), [("k1", True, "none"), ("k2", False, "reverse"), ("k3", True, "forward")]
)
def test_mean_of_an_estimator_and_of_its_gradient_over_the_policy(name: str, is_unbiased: bool, direction: str) -> None:
    """By enumeration of all four tokens, so exact: what the docstrings state."""
    logits = LOGITS.clone().requires_grad_()
    current, reference = logits.log_softmax(0), OTHER.log_softmax(0)
    weights = current.detach().exp()  # how often each token is sampled
    estimate = (weights * KL_ESTIMATORS[name](current, reference)).sum()
    divergence = (current.exp() * (current - reference)).sum()
    assert (estimate.item() == pytest.approx(divergence.item())) == is_unbiased
    (found,) = torch.autograd.grad(estimate, logits, retain_graph=True)
    forward = (reference.exp() * (reference - current)).sum()
    target = {"none": 0 * logits.sum(), "reverse": divergence, "forward": forward}[direction]
    (wanted,) = torch.autograd.grad(target, logits)
    assert torch.allclose(found, wanted, atol=1e-12)
