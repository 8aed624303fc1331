"""Each loss, correction and aggregation against a float64 reference written token by token from its paper."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from actors.learner.algorithms.corrections import CORRECTIONS, loglinear_prox, second_moment_threshold
from actors.learner.algorithms.losses import AGGREGATIONS, LOSSES
from actors.learner.algorithms.parts import Streams, Tokens, Totals, select, sequences_of
from actors.learner.algorithms.registry import find_algorithm, split
from actors.learner.update.objective import MicroBatchTokens, micro_batch_loss
from areal_bus.config import algorithms as names
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


def binary_kl(p: float, q: float) -> float:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def expected_weight(name: str, t: Tokens, i: int) -> float:
    d = (t.prox_N - t.behav_N).tolist()
    own = [y for y, s in zip(d, t.sequences_N.tolist(), strict=True) if s == int(t.sequences_N[i])]
    w = math.exp(d[i])
    p, q = math.exp(float(t.prox_N[i])), math.exp(float(t.behav_N[i]))
    return {
        "decoupled": min(w, 1.3),
        "tis": min(w, 1.1),
        "tis_sequence": min(math.exp(sum(own)), 1.1),
        "icepop": w if 0.9 <= w <= 1.1 else 0.0,
        "kpop": w if max(binary_kl(p, q), binary_kl(q, p)) <= 0.05 else 0.0,
        "none": 1.0,
    }[name]


KEYS: dict[str, dict[str, Any]] = {
    "decoupled": {"behav_imp_weight_cap": 1.3},
    "tis": {"correction_upper": 1.1},
    "tis_sequence": {"correction_upper": 1.1},
    "icepop": {"correction_lower": 0.9, "correction_upper": 1.1},
    "kpop": {"correction_upper": 0.05},
    "none": {},
}


@pytest.mark.parametrize("name", KEYS)
def test_a_correction_is_its_formula(name: str) -> None:
    t = tokens(4)
    found = CORRECTIONS[name](t, ActorConfig(correction=name, **KEYS[name]))
    expected = [expected_weight(name, t, i) for i in range(len(found))]
    assert found.tolist() == pytest.approx(expected, abs=1e-9)
    assert not found.requires_grad
    assert name == "none" or len(set(expected)) > 2  # some are bounded, some are not


def test_the_five_cases_of_the_decoupled_loss() -> None:
    """Peers' example: one token with weight 6.6, others near 1."""
    t = tokens(7)
    settings = ActorConfig(behav_imp_weight_cap=1.2, behav_imp_weight_mode="mask")
    weights = CORRECTIONS["decoupled"](t, settings)
    exact = (t.prox_N - t.behav_N).exp()
    assert torch.equal(weights, torch.where(exact <= 1.2, exact, 0.0))
    assert 0 < int((weights == 0).sum()) < len(weights)


@pytest.mark.parametrize("metric", ["k1", "k2", "k3"])
@pytest.mark.parametrize("aggregate", ["mean", "sum", "max"])
def test_whole_trajectories_are_masked_by_their_divergence(metric: str, aggregate: str) -> None:
    t = tokens(5, spread=0.8)
    keys = {"correction_action": "mask", "correction_metric": metric, "correction_aggregate": aggregate}
    found = CORRECTIONS["tis_sequence"](
        t, ActorConfig(correction="tis_sequence", correction_upper=0.3, correction_lower=0.0, **keys)
    )
    d = t.prox_N - t.behav_N
    by_token = {"k1": -d, "k2": d.square() / 2, "k3": d.exp() - 1 - d}[metric]
    at = 0
    for n in LENGTHS:
        own = by_token[at : at + n]
        value = float({"mean": own.mean(), "sum": own.sum(), "max": own.max()}[aggregate])
        expected = d[at : at + n].exp() if 0.0 <= value <= 0.3 else torch.zeros(n, dtype=torch.float64)
        assert torch.allclose(found[at : at + n], expected)
        at += n


@pytest.mark.parametrize("lag", [0, 1, 2, 8])
def test_loglinear_prox_lies_between_sampler_and_current_policy(lag: int) -> None:
    theta, behav = torch.tensor([-1.0, -2.0]), torch.tensor([-3.0, -1.0])
    share = 1 / lag if lag else 0.0
    expected = share * behav + (1 - share) * theta
    assert torch.allclose(loglinear_prox(theta, behav, torch.full((2,), lag)), expected)


@given(st.lists(st.floats(0, 4), min_size=1, max_size=40), st.floats(0.001, 2.0))
def test_m2po_keeps_as_many_tokens_as_the_second_moment_allows(squares: list[float], limit: float) -> None:
    values = torch.tensor(squares, dtype=torch.float64)
    bound = second_moment_threshold(values, limit, list)
    kept = values[values <= bound]
    assert not len(kept) or float(kept.mean()) <= limit * (1 + 1e-9)
    above = values[values > bound]
    if len(above):  # one more value would exceed the limit
        more = values[values <= above.min()]
        assert float(more.mean()) > limit * (1 - 1e-6)


@given(st.lists(st.floats(0, 4, width=32), min_size=1, max_size=40), st.floats(0.001, 2.0))
def test_m2po_keeps_no_float32_value_that_exceeds_the_second_moment(squares: list[float], limit: float) -> None:
    values = torch.tensor(squares, dtype=torch.float32)
    kept = values[values <= second_moment_threshold(values, limit, list)].double()
    assert not len(kept) or float(kept.mean()) <= limit * (1 + 1e-9)


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


# identities of gradients


def policy_gradient(t: Tokens, loss: str, **keys: Any) -> Tensor:
    losses, _ = split(LOSSES[loss](t, ActorConfig(loss=loss, **keys)))
    return gradient(losses.sum(), t.logprobs_N)


def test_gspo_of_trajectories_of_one_token_is_ppo() -> None:
    t = tokens(8, lengths=(1,) * 12)
    assert torch.allclose(policy_gradient(t, "gspo"), policy_gradient(t, "ppo"))


def test_every_loss_has_the_gradient_of_reinforce_on_policy() -> None:
    t = tokens(9)
    same = Tokens(**{**vars_of(t), "anchor_N": t.logprobs_N.detach()})
    expected = policy_gradient(same, "reinforce")
    for loss in ("ppo", "gspo", "cispo", "sapo"):
        assert torch.allclose(policy_gradient(same, loss), expected), loss


def vars_of(t: Tokens) -> dict[str, Tensor]:
    return {name: getattr(t, name) for name in Tokens.__dataclass_fields__}


def test_cispo_is_reinforce_times_a_constant_by_token() -> None:
    t = tokens(10)
    weight = t.ratio_N.detach().clamp(0.8, 1.2)
    assert torch.allclose(policy_gradient(t, "cispo"), weight * policy_gradient(t, "reinforce"))


# the objective as a whole


def part_of(t: Tokens) -> MicroBatchTokens:
    return MicroBatchTokens(
        behav_N=t.behav_N,
        advantages_N=t.advantages_N,
        lags_N=t.lags_N,
        sequences_N=t.sequences_N,
        lengths_M=t.lengths_M,
        streams=Streams({"prox": t.prox_N}),
    )


@pytest.mark.parametrize("correction", ["decoupled", "none"])
@pytest.mark.parametrize("seed", range(3))
def test_the_fused_way_agrees_with_the_plain_definition(correction: str, seed: int) -> None:
    t, totals = tokens(seed), Totals(11.0, 4.0)
    keys: dict[str, Any] = {"correction": correction, "eps_clip_higher": 0.28, "behav_imp_weight_cap": 1.5}
    found = []
    for c_clip in (None, 1e9):  # a bound that is never reached takes the plain way
        algorithm = find_algorithm(ActorConfig(c_clip=c_clip, **keys))
        assert algorithm.is_fused == (c_clip is None)
        done = micro_batch_loss(algorithm, part_of(t), t.logprobs_N, None, totals)
        found.append((float(done.loss.detach()), gradient(done.loss, t.logprobs_N), done.n_clipped, done.importance_N))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-12)
    assert torch.allclose(found[0][1], found[1][1], atol=1e-12)
    assert found[0][2] == found[1][2]
    assert torch.allclose(found[0][3], found[1][3])


def test_decoupled_ppo_whose_sampler_is_the_proximal_policy_is_ppo() -> None:
    t = tokens(11)
    same = Tokens(**{**vars_of(t), "behav_N": t.prox_N})
    assert torch.equal(CORRECTIONS["decoupled"](same, ActorConfig()), torch.ones_like(t.prox_N))


def allowed() -> list[tuple[str, str, str]]:
    """All combinations that the checks accept."""
    return [
        (loss, correction, aggregation)
        for loss in LOSSES
        for correction in CORRECTIONS
        for aggregation in AGGREGATIONS
        if not (loss == "sapo" and correction != "none")
    ]


@pytest.mark.parametrize(("loss", "correction", "aggregation"), allowed())
def test_two_halves_of_a_micro_batch_add_up_to_the_whole(loss: str, correction: str, aggregation: str) -> None:
    t, totals = tokens(12), Totals(11.0, 4.0)
    settings = ActorConfig(loss=loss, correction=correction, aggregation=aggregation, aggregation_length=8)
    algorithm = find_algorithm(settings)
    whole = micro_batch_loss(algorithm, part_of(t), t.logprobs_N, None, totals)
    parts = []
    for chosen, lengths in ((t.sequences_N < 2, LENGTHS[:2]), (t.sequences_N >= 2, LENGTHS[2:])):
        part = MicroBatchTokens(
            behav_N=t.behav_N[chosen],
            streams=Streams({"prox": t.prox_N[chosen]}),
            advantages_N=t.advantages_N[chosen],
            lags_N=t.lags_N[chosen],
            sequences_N=sequences_of(torch.tensor(lengths)),
            lengths_M=torch.tensor(lengths),
        )
        parts.append(micro_batch_loss(algorithm, part, t.logprobs_N[chosen], None, totals).loss)
    total = parts[0] + parts[1]
    assert torch.allclose(gradient(total, t.logprobs_N), gradient(whole.loss, t.logprobs_N), atol=1e-9)
    assert float(total.detach()) == pytest.approx(float(whole.loss.detach()), abs=1e-9)


def test_names_of_the_settings_and_of_the_functions_are_the_same() -> None:
    from actors.learner.algorithms.advantages import ESTIMATORS

    assert tuple(ESTIMATORS) == names.ADVANTAGES
    assert tuple(LOSSES) == names.LOSSES
    assert tuple(CORRECTIONS) == names.CORRECTIONS
    assert tuple(AGGREGATIONS) == names.AGGREGATIONS
    assert {name for name, one in ESTIMATORS.items() if one.has_group_baseline} == set(names.GROUP_BASELINES)
    assert {name for name, one in ESTIMATORS.items() if one.normalization} == set(names.BATCH_BASELINES)


def test_select_gives_each_token_its_trajectorys_value() -> None:
    t = tokens()
    assert select(torch.arange(4), t).tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 2, 3, 3]
