"""The objectives against a plain float64 reference, token by token."""

import math

import pytest
import torch
from torch import Tensor

from actors.training.objectives import Mismatch, Terms, decoupled_ppo, effective_share, gap, mismatch, ppo

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


def decoupled(theta: Tensor, prox: Tensor, behav: Tensor, advantage: Tensor, cap: float | None = None) -> Terms:
    return decoupled_ppo(theta, prox, gap(prox, behav).weight_N, advantage, eps_clip=EPS, cap=cap)


@pytest.mark.parametrize("cap", [None, 1.1])
def test_decoupled_ppo_is_equation_5(cap: float | None) -> None:
    theta, prox, behav, advantage = tokens(1)
    terms = decoupled(theta, prox, behav, advantage, cap)
    terms.loss.backward()
    loss, gradient = reference(theta, prox, behav, advantage, cap or math.inf)
    assert float(terms.loss.detach()) == pytest.approx(loss, abs=1e-10)
    assert theta.grad is not None
    assert theta.grad.tolist() == pytest.approx(gradient, abs=1e-12)
    assert 10 < float(terms.clipped) == sum(g == 0.0 for g in gradient)


def test_float32_stays_within_a_millionth_of_float64() -> None:
    theta, prox, behav, advantage = (x.detach().float() for x in tokens(2, n=5000))
    exact = [x.double() for x in (theta, prox, behav, advantage)]
    terms = decoupled(theta.requires_grad_(), prox, behav, advantage)
    (terms.loss / 5000).backward()
    reference = decoupled(exact[0].requires_grad_(), *exact[1:])
    (reference.loss / 5000).backward()
    assert float(terms.loss.detach()) / 5000 == pytest.approx(float(reference.loss.detach()) / 5000, abs=1e-6)
    assert theta.grad is not None
    assert exact[0].grad is not None
    assert torch.allclose(theta.grad.double(), exact[0].grad, rtol=1e-6, atol=0)


def test_the_gradient_agrees_with_finite_differences() -> None:
    theta, prox, behav, advantage = tokens(3, n=12)
    assert torch.autograd.gradcheck(lambda x: decoupled(x, prox, behav, advantage).loss, (theta,))


def test_the_gradient_goes_on_through_what_made_the_log_probs() -> None:
    theta, prox, behav, advantage = tokens(8)
    scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    (3 * decoupled(scale * theta.detach(), prox, behav, advantage).loss).backward()
    made = (1.5 * theta.detach()).requires_grad_()
    decoupled(made, prox, behav, advantage).loss.backward()
    assert scale.grad is not None
    assert made.grad is not None
    assert float(scale.grad) == pytest.approx(3 * float((made.grad * theta.detach()).sum()))


def test_the_weight_is_there_even_when_nothing_has_moved() -> None:
    _, prox, behav, advantage = tokens(4)
    loss = decoupled(prox.clone(), prox, behav, advantage).loss
    assert float(loss) == pytest.approx(float(-(torch.exp(prox - behav) * advantage).sum()))


def test_no_gradient_flows_into_the_proximal_policy() -> None:
    theta, prox, behav, advantage = tokens(5)
    prox.requires_grad_()
    decoupled(theta, prox, behav, advantage).loss.backward()
    assert prox.grad is None


def test_plain_ppo_is_the_decoupled_one_with_prox_at_the_sampler() -> None:
    theta, _, behav, advantage = tokens(6)
    plain = ppo(theta, behav, advantage, eps_clip=EPS).loss
    assert float(plain.detach()) == pytest.approx(float(decoupled(theta, behav, behav, advantage).loss.detach()))


def test_mismatch_is_k3_and_the_largest_distance() -> None:
    theta, prox, behav, _ = tokens(7)
    importance = torch.exp(theta.detach() - behav)
    seen = mismatch(importance, gap(prox, behav))
    gaps = [p - b for p, b in zip(prox.tolist(), behav.tolist(), strict=True)]
    assert seen.kl == pytest.approx(sum(math.exp(d) - 1 - d for d in gaps))
    assert seen.largest == pytest.approx(max(map(abs, gaps)))
    assert (seen.weight, seen.weight_squared) == pytest.approx((float(importance.sum()), float((importance**2).sum())))
    assert mismatch(importance, gap(behav, behav)).kl == 0.0


def test_tiny_mismatches_survive_single_precision() -> None:
    behav = torch.full((1000,), -3.0)
    prox = behav + 2.0**-20
    assert float(gap(prox, behav).kl) == pytest.approx(1000 * 2.0**-41, rel=1e-3)


def test_no_tokens_have_no_mismatch() -> None:
    nothing = torch.empty(0)
    assert mismatch(nothing, gap(nothing, nothing)) == Mismatch(0, 0.0, 0.0, 0.0, 0.0)


def test_effective_share_is_one_for_equal_weights_and_one_over_n_for_a_single_one() -> None:
    assert effective_share(10.0, 10.0, 10) == 1.0
    assert effective_share(3.0, 9.0, 10) == pytest.approx(0.1)
