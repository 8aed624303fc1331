"""The objectives against a plain float64 reference, token by token."""

import math

import pytest
import torch
from torch import Tensor

from actors.training.objectives import decoupled_ppo, effective_share, mismatch, ppo

EPS = 0.2


def tokens(seed: int, n: int = 200) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """theta (with gradient), prox, behav and advantages, far enough apart that every branch is taken."""
    draw = torch.Generator().manual_seed(seed)
    base = -3 + torch.randn(n, generator=draw, dtype=torch.float64)
    theta, prox, behav = (base + 0.3 * torch.randn(n, generator=draw, dtype=torch.float64) for _ in range(3))
    return theta.requires_grad_(), prox, behav, torch.randn(n, generator=draw, dtype=torch.float64)


def reference(theta: Tensor, prox: Tensor, behav: Tensor, advantage: Tensor, cap: float) -> tuple[float, list[float]]:
    """Loss and its gradient by theta, one token at a time: paper, eq. 5."""
    loss, gradient = 0.0, []
    for t, p, b, a in zip(theta.tolist(), prox.tolist(), behav.tolist(), advantage.tolist(), strict=True):
        weight, u = min(math.exp(p - b), cap), math.exp(t - p)
        clipped = min(max(u, 1 - EPS), 1 + EPS)
        loss -= weight * min(u * a, clipped * a)
        gradient.append(-weight * u * a if u * a <= clipped * a else 0.0)
    return loss, gradient


@pytest.mark.parametrize("cap", [None, 1.1])
def test_decoupled_ppo_is_equation_5(cap: float | None) -> None:
    theta, prox, behav, advantage = tokens(1)
    terms = decoupled_ppo(theta, prox, behav, advantage, eps_clip=EPS, cap=cap)
    terms.loss_N.sum().backward()
    loss, gradient = reference(theta, prox, behav, advantage, cap or math.inf)
    assert float(terms.loss_N.detach().sum()) == pytest.approx(loss, abs=1e-10)
    assert theta.grad is not None
    assert theta.grad.tolist() == pytest.approx(gradient, abs=1e-12)
    assert terms.clipped_N.tolist() == [g == 0.0 for g in gradient]


def test_float32_stays_within_a_millionth_of_float64() -> None:
    theta, prox, behav, advantage = tokens(2)
    exact = decoupled_ppo(theta, prox, behav, advantage, eps_clip=EPS, cap=None).loss_N
    single = decoupled_ppo(theta.float(), prox.float(), behav.float(), advantage.float(), eps_clip=EPS, cap=None).loss_N
    assert torch.allclose(single.double(), exact, atol=1e-5)


def test_the_gradient_agrees_with_finite_differences() -> None:
    theta, prox, behav, advantage = tokens(3, n=12)
    assert torch.autograd.gradcheck(
        lambda x: decoupled_ppo(x, prox, behav, advantage, eps_clip=EPS, cap=None).loss_N.sum(), (theta,)
    )


def test_the_weight_is_there_even_when_nothing_has_moved() -> None:
    _, prox, behav, advantage = tokens(4)
    terms = decoupled_ppo(prox.clone(), prox, behav, advantage, eps_clip=EPS, cap=None)
    assert torch.allclose(terms.loss_N, -torch.exp(prox - behav) * advantage)


def test_no_gradient_flows_into_the_proximal_policy() -> None:
    theta, prox, behav, advantage = tokens(5)
    prox.requires_grad_()
    decoupled_ppo(theta, prox, behav, advantage, eps_clip=EPS, cap=None).loss_N.sum().backward()
    assert prox.grad is None


def test_plain_ppo_is_the_decoupled_one_with_prox_at_the_sampler() -> None:
    theta, _, behav, advantage = tokens(6)
    plain = ppo(theta, behav, advantage, eps_clip=EPS).loss_N
    assert torch.allclose(plain, decoupled_ppo(theta, behav, behav, advantage, eps_clip=EPS, cap=None).loss_N)


def test_mismatch_is_k3_and_the_largest_distance() -> None:
    theta, prox, behav, _ = tokens(7)
    seen = mismatch(theta.detach(), prox, behav)
    gaps = [p - b for p, b in zip(prox.tolist(), behav.tolist(), strict=True)]
    assert seen.kl == pytest.approx(sum(math.exp(d) - 1 - d for d in gaps))
    assert seen.largest == pytest.approx(max(map(abs, gaps)))
    assert mismatch(theta.detach(), behav, behav).kl == 0.0


def test_effective_share_is_one_for_equal_weights_and_one_over_n_for_a_single_one() -> None:
    assert effective_share(10.0, 10.0, 10) == 1.0
    assert effective_share(3.0, 9.0, 10) == pytest.approx(0.1)
