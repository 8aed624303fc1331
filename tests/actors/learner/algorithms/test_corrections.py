"""Each correction against a float64 reference written token by token from its paper."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.learner.algorithms.corrections import CORRECTIONS, loglinear_prox, second_moment_threshold
from actors.learner.algorithms.parts import Tokens
from areal_bus.config.learner import ActorConfig
from tests.actors.learner.algorithms.test_losses import LENGTHS, tokens


def binary_kl(p: float, q: float) -> float:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def expected_weight(name: str, t: Tokens, i: int) -> float:
    d = (t.prox_N - t.behav_N).tolist()
    own = [y for y, s in zip(d, t.sequences_N.tolist(), strict=True) if s == int(t.sequences_N[i])]
    w = math.exp(d[i])
    now = [x - b for x, b in zip(t.logprobs_N.tolist(), t.behav_N.tolist(), strict=True)]
    now = [y for y, s in zip(now, t.sequences_N.tolist(), strict=True) if s == int(t.sequences_N[i])]
    p, q = math.exp(float(t.prox_N[i])), math.exp(float(t.behav_N[i]))
    return {
        "decoupled": min(w, 1.3),
        "decoupled, mask": w if w <= 1.3 else 0.0,
        "tis": min(w, 1.1),
        "tis_sequence": min(math.exp(sum(own)), 1.1),
        "icepop": w if 0.9 <= w <= 1.1 else 0.0,
        "kpop": w if max(binary_kl(p, q), binary_kl(q, p)) <= 0.05 else 0.0,
        "entropy_scaled": w if abs(d[i]) <= 1.5 * float(t.entropy_N[i]) else 0.0,  # type: ignore[index]
        "vcpo": min(math.exp(sum(now)), 1.4),
        "none": 1.0,
    }[name]


KEYS: dict[str, dict[str, Any]] = {
    "decoupled": {"behav_imp_weight_cap": 1.3},
    "decoupled, mask": {"behav_imp_weight_cap": 1.3, "correction_action": "mask"},
    "tis": {"correction_upper": 1.1},
    "tis_sequence": {"correction_upper": 1.1},
    "icepop": {"correction_lower": 0.9, "correction_upper": 1.1},
    "kpop": {"correction_upper": 0.05},
    "entropy_scaled": {"correction_upper": 1.5},
    "vcpo": {"correction_upper": 1.4},
    "none": {},
}


@pytest.mark.parametrize("name", KEYS)
def test_a_correction_is_its_formula(name: str) -> None:
    t, correction = tokens(4), name.partition(",")[0]
    found = CORRECTIONS[correction](t, ActorConfig(correction=correction, **KEYS[name]))
    expected = [expected_weight(name, t, i) for i in range(len(found))]
    assert found.tolist() == pytest.approx(expected, abs=1e-9)
    assert not found.requires_grad
    assert name == "none" or len(set(expected)) > 2  # some are bounded, some are not


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


@given(st.lists(st.floats(0, 4, width=32), min_size=1, max_size=40), st.floats(0.001, 2.0), st.booleans())
def test_m2po_keeps_as_many_tokens_as_the_second_moment_allows(squares: list[float], limit: float, low: bool) -> None:
    values = torch.tensor(squares, dtype=torch.float32 if low else torch.float64)
    bound = second_moment_threshold(values, limit, list)
    kept, above = (values[chosen].double() for chosen in (values <= bound, values > bound))
    assert not len(kept) or float(kept.mean()) <= limit * (1 + 1e-9)
    if len(above):  # one more value would exceed the limit
        more = values[values <= above.min()].double()
        assert float(more.mean()) > limit * (1 - 1e-6)
