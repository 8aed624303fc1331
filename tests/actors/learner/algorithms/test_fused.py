"""The fused PPO loss: C against torch, and the figures of the mismatch. test_objective.py compares it with the plain
definition, which test_losses.py and test_corrections.py hold to the formulas of the papers.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from actors.learner.algorithms.fused import decoupled_ppo, effective_share, gap, mismatch
from areal_cpu import loss as kernels
from areal_cpu.build import library
from tests.actors.learner.algorithms.test_losses import tokens as drawn

pytestmark = pytest.mark.usefixtures("as_kernels_run")

EPS = 0.2
NAN, INF = math.nan, math.inf

needs_library = pytest.mark.skipif(library() is None, reason="no C compiler")


def test_mismatch_is_k3_and_the_largest_distance() -> None:
    t = drawn(7, lengths=(50, 150))
    prox, behav = t.prox_N, t.behav_N
    importance = torch.exp(t.logprobs_N.detach() - behav)
    seen = mismatch(importance, gap(prox, behav))
    gaps = [p - b for p, b in zip(prox.tolist(), behav.tolist(), strict=True)]
    assert seen.kl == pytest.approx(sum(math.exp(d) - 1 - d for d in gaps))
    assert seen.largest == pytest.approx(max(map(abs, gaps)))
    assert (seen.weight, seen.weight_squared) == pytest.approx((float(importance.sum()), float((importance**2).sum())))
    assert mismatch(importance, gap(behav, behav)).kl == 0.0


def test_effective_share_is_one_for_equal_weights_and_one_over_n_for_a_single_one() -> None:
    assert effective_share(10.0, 10.0, 10) == 1.0
    assert effective_share(3.0, 9.0, 10) == pytest.approx(0.1)


class Told(NamedTuple):
    """All that a step has of its tokens."""

    weight: Tensor
    kl: Tensor
    largest: Tensor
    loss: Tensor
    clipped: Tensor
    ratio: Tensor
    grad: Tensor
    spread: Tensor  # sums of the importance and of its square


def told(
    theta: Tensor, prox: Tensor, behav: Tensor, advantage: Tensor, *, eps_clip: float = EPS, cap: float | None = None
) -> Told:
    theta = theta.detach().requires_grad_()
    apart = gap(prox, behav)
    terms = decoupled_ppo(theta, prox, apart.weight_N, advantage, eps_clip=eps_clip, cap=cap)
    terms.loss.backward()
    seen = mismatch(terms.ratio_N * apart.weight_N, apart)
    assert [seen.kl, seen.largest] == pytest.approx([float(apart.kl), float(apart.largest)], nan_ok=True)
    spread = torch.tensor([seen.weight, seen.weight_squared], dtype=torch.float64)
    return Told(
        apart.weight_N, apart.kl, apart.largest, terms.loss.detach(), terms.clipped, terms.ratio_N, theta.grad, spread
    )


def told_by_torch(*tokens: Tensor, eps_clip: float = EPS, cap: float | None = None) -> Told:
    """On two threads the kernels do not apply."""
    torch.set_num_threads(2)
    try:
        assert not kernels.applies(*tokens)
        return told(*tokens, eps_clip=eps_clip, cap=cap)
    finally:
        torch.set_num_threads(1)


Way = Callable[..., Told]
WAYS = [pytest.param(told, marks=needs_library, id="c"), pytest.param(told_by_torch, id="torch")]


def alike(one: Told, other: Told, *, within: float) -> None:
    """NaN where the other has it, infinite where it is; sums as means over tokens."""
    n = max(1, other.weight.numel())
    assert float(one.clipped) == float(other.clipped)
    for name, a, b in zip(Told._fields, one, other, strict=True):
        a, b = (x.double() if x.shape == other.weight.shape else x.double() / n for x in (a, b))
        assert torch.allclose(a, b, rtol=within, atol=within, equal_nan=True), name


def stepped(seed: int, n: int, nasty: list[float]) -> list[Tensor]:
    """theta, prox, behav and advantages: differences are exact, ratios at no bound; `nasty` ones in some places."""
    draw = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(-32, 33, (n,), generator=draw) / 64 for _ in range(4)]
    tokens[3] *= 4
    for number in nasty if n else []:
        tokens[int(torch.randint(4, (), generator=draw))][int(torch.randint(n, (), generator=draw))] = number
    return tokens


@needs_library
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(0, 40) | st.integers(250, 260) | st.integers(500, 530),
    nasty=st.lists(st.sampled_from([NAN, INF, -INF, 1000.0, -1000.0, -0.0, 1e-30]), max_size=4),
    eps_clip=st.sampled_from([0.0, EPS, 1.0]),
    cap=st.sampled_from([None, 1.0]),
)
def test_the_c_loss_equals_the_torch_loss_for_random_tokens(
    seed: int, n: int, nasty: list[float], eps_clip: float, cap: float | None
) -> None:
    tokens = stepped(seed, n, nasty)
    assert kernels.applies(*tokens)
    by_torch = told_by_torch(*tokens, eps_clip=eps_clip, cap=cap)
    by_c = told(*tokens, eps_clip=eps_clip, cap=cap)
    assert [x.dtype for x in by_c] == [x.dtype for x in by_torch]
    assert [x.shape for x in by_c] == [x.shape for x in by_torch]
    alike(by_c, by_torch, within=1e-5)
    if not nasty:
        alike(by_c, told(*(x.double() for x in tokens), eps_clip=eps_clip, cap=cap), within=1e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", [0, 7, 255, 256, 299])
@pytest.mark.parametrize("which", range(4))
def test_nan_in_one_token_is_seen_in_the_loss_and_in_that_tokens_gradient(way: Way, place: int, which: int) -> None:
    tokens = stepped(1, 300, [])
    tokens[which][place] = NAN
    found = way(*tokens)
    assert found.loss.isnan()
    assert found.grad.isnan().nonzero().tolist() == [[place]]
    assert [bool(found.kl.isnan()), bool(found.largest.isnan())] == [which in (1, 2)] * 2
    assert found.spread.isnan().tolist() == [which != 3] * 2


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("d", "weight", "kl"),
    [
        (88.5, math.exp(88.5), math.exp(88.5)),
        (89.0, INF, INF),
        (1e30, INF, INF),
        (INF, INF, NAN),
        (-88.0, 0.0, 87.0),
        (-1e30, 0.0, 1e30),
        (-INF, 0.0, INF),
    ],
)
def test_distant_log_probs_overflow_as_exp_does(way: Way, d: float, weight: float, kl: float) -> None:
    for n in (1, 9):  # alone, and in a vector
        zero, far = torch.zeros(n), torch.zeros(n)
        far[n // 2] = d
        found = way(zero, far, zero, torch.ones(n))
        assert float(found.weight[n // 2]) == pytest.approx(weight, rel=1e-6, abs=1e-30)
        assert float(found.kl) == pytest.approx(kl, rel=1e-6, nan_ok=True)
        assert float(found.largest) == abs(torch.tensor(d))


@needs_library
@pytest.mark.parametrize("sign", [1, -1])
def test_c_keeps_k3_however_close_the_log_probs_are(sign: int) -> None:
    for power in range(60):
        d = Fraction(sign, 2**power)
        k3 = sum(d**i / math.factorial(i) for i in range(2, 25))
        prox = torch.full((9,), float(d))
        near = 5e-7 if power >= 2 else 2e-6  # by the polynomial itself, or e^d within two units less 1 and d
        assert float(gap(prox, torch.zeros(9)).kl) == pytest.approx(9 * float(k3), rel=near), power


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("prox", [60.0, -60.0])
def test_an_importance_is_1_though_its_two_factors_are_far_from_it(way: Way, prox: float) -> None:
    nothing = torch.zeros(9)
    found = way(nothing, nothing + prox, nothing, torch.ones(9))
    assert found.spread.tolist() == pytest.approx([9.0, 9.0], rel=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_a_branch_that_ties_is_free(way: Way) -> None:
    same = torch.full((300,), -1.0)
    advantage = torch.linspace(-2, 2, 300)
    for eps_clip in (0.0, EPS):
        found = way(same, same, same, advantage, eps_clip=eps_clip)
        assert float(found.clipped) == 0
        assert torch.equal(found.grad, -advantage)
    found = way(same + 1, same, same, torch.zeros(300))  # without an advantage both branches are 0
    assert (float(found.clipped), float(found.loss)) == (0, 0)


@needs_library
def test_inputs_that_the_c_loss_does_not_support_use_torch() -> None:
    tokens = stepped(2, 400, [])
    strided = [x[::2] for x in tokens]
    assert not kernels.applies(*strided)
    alike(told(*strided), told(*(x.contiguous() for x in strided)), within=1e-5)
    one = [*tokens[:3], torch.tensor(1.5)]
    assert not kernels.applies(*one)
    alike(told(*one), told(*tokens[:3], torch.full((400,), 1.5)), within=1e-5)
    assert not kernels.applies(tokens[0], tokens[1].double())
    with pytest.raises(ValueError, match="one shape"):
        kernels.log_ratio(tokens[0], tokens[1][1:])
    with pytest.raises(ValueError, match="one shape"):
        kernels.clipped(*tokens[:3], tokens[3][1:], low=0.8, high=1.2)
    with pytest.raises(ValueError, match="contiguous float32"):
        kernels.weight_sums(tokens[0].double())


@pytest.mark.parametrize("way", WAYS)
@given(n=st.integers(1, 700), weight=st.floats(2**-9, 2**9, width=32))
def test_the_effective_share_is_never_above_1(way: Way, n: int, weight: float) -> None:
    found = way(*[torch.zeros(n)] * 2, torch.full((n,), -math.log(weight)), torch.ones(n))
    share = effective_share(*found.spread.tolist(), n)
    assert 1 - 1e-12 < share <= 1


def test_tiny_mismatches_survive_single_precision() -> None:
    behav = torch.full((1000,), -3.0)
    prox = behav + 2.0**-20
    assert float(gap(prox, behav).kl) == pytest.approx(1000 * 2.0**-41, rel=1e-3)
