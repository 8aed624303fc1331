"""Divergences over the vocabulary against float64 autograd, and how those over the likeliest words grow with k."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from actors.learner.algorithms.divergence import by_logit, classes, divergence

V = 9
BETAS = (0.0, 0.1, 0.5, 1.0)


def pair(seed: int, spread: float) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    teacher, policy = (spread * torch.randn(3, V, generator=draw, dtype=torch.float64) for _ in range(2))
    return teacher, policy


def by_hand(p: Tensor, q: Tensor, beta: float) -> Tensor:
    """GKD's definition, term by term."""
    if beta in (0.0, 1.0):
        one, other = (p, q) if beta == 0.0 else (q, p)
        return (one * (one.log() - other.log())).sum(1)
    m = beta * p + (1 - beta) * q
    return (beta * p * (p.log() - m.log()) + (1 - beta) * q * (q.log() - m.log())).sum(1)


def merged(prob: Tensor, words: Tensor) -> Tensor:
    top = prob.gather(1, words)
    return torch.cat([top, 1 - top.sum(1, keepdim=True)], 1)


def found(teacher: Tensor, policy: Tensor, beta: float, k: int | None) -> tuple[Tensor, Tensor]:
    log_p, log_q = teacher.log_softmax(1), policy.log_softmax(1)
    words = None if k is None else log_p.topk(k).indices
    values, slopes = divergence(classes(log_p, words), classes(log_q, words), beta)
    return values, by_logit(log_q, words, slopes)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("k", [None, 1, 4, V - 1])
def test_divergence_and_its_gradient_by_the_logits_are_those_of_the_definition(beta: float, k: int | None) -> None:
    teacher, policy = pair(1, 1.5)
    theirs = policy.clone().requires_grad_()
    p, q = teacher.softmax(1), theirs.softmax(1)
    if k is not None:
        words = p.topk(k).indices
        p, q = merged(p, words), merged(q, words)
    wanted = by_hand(p, q, beta)
    wanted.sum().backward()  # type: ignore[no-untyped-call]
    values, gradient = found(teacher.float(), policy.float(), beta, k)
    torch.testing.assert_close(values.double(), wanted.detach(), atol=1e-6, rtol=0)
    torch.testing.assert_close(gradient.double(), theirs.grad, atol=1e-6, rtol=0)


@given(seed=st.integers(0, 10**6), spread=st.sampled_from([0.1, 2.0, 30.0]), beta=st.sampled_from(BETAS))
def test_divergence_grows_with_k_to_that_of_the_whole_vocabulary(seed: int, spread: float, beta: float) -> None:
    """Never negative, and its gradient adds up to 0 over the words, also where probabilities are 0 in float32."""
    teacher, policy = pair(seed, spread)
    ways = [found(teacher, policy, beta, k) for k in (*range(1, V), None)]
    values = torch.stack([value for value, _ in ways])
    assert bool((values >= -1e-12).all())
    assert bool((values.diff(dim=0) >= -1e-9 * (1 + values[1:])).all())
    torch.testing.assert_close(values[-2], values[-1], rtol=1e-9, atol=1e-9)  # V - 1 words and one other are all words
    assert all(float(gradient.sum(1).abs().max()) < 1e-9 * (1 + spread) for _, gradient in ways)
    narrow, slopes = found(teacher.float(), policy.float(), beta, 2)
    assert bool(torch.isfinite(narrow).all())
    assert bool(torch.isfinite(slopes).all())


@pytest.mark.parametrize("beta", BETAS)
def test_divergence_of_equal_distributions_is_exactly_zero_with_its_gradient(beta: float) -> None:
    _, policy = pair(2, 3.0)
    for k in (None, 3):
        values, gradient = found(policy, policy, beta, k)
        assert float(values.abs().max()) < 1e-15
        assert float(gradient.abs().max()) < 1e-15
