"""Sampling: uniforms by position, and the inverse of the distribution."""

import math
import random
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engines.builtin.prefill import plan
from actors.engines.builtin.sampler import filtered, invert, nucleus, sample
from actors.engines.builtin.sequence import FilteredRow, Uniforms
from actors.engines.protocol import SamplingControls


def draw(
    logits: torch.Tensor, *, temperature: float = 1.0, top_p: float = 1.0, n: int = 4000
) -> tuple[torch.Tensor, list[float]]:
    rows = logits.expand(n, -1)
    uniforms = [Uniforms((1, 2)).at(i) for i in range(n)]
    tokens, logps = sample(rows, temperatures=[temperature] * n, top_ps=[top_p] * n, uniforms=uniforms)
    return torch.tensor(tokens), logps


@pytest.mark.slow
@pytest.mark.parametrize("size", [8, 2000])
@pytest.mark.parametrize("is_filtered", [False, True])
def test_an_absent_token_is_never_drawn_and_the_others_keep_their_shares(size: int, is_filtered: bool) -> None:
    logits = torch.zeros(1, size)
    logits[0, 4:] = 2.0 - math.log(size - 4)  # most of the weight is absent
    logits[0, 1] = math.log(2.0)
    drawn, n = [0] * 4, 1200
    numbers = random.Random(0)
    for _ in range(n):
        (token,), (logp,) = sample(
            logits, temperatures=[1.0], top_ps=[0.9999 if is_filtered else 1.0], uniforms=[numbers.random()],
            absent=frozenset(range(4, size)),
        )  # fmt: skip
        drawn[token] += 1
        assert logp == pytest.approx(float(logits.log_softmax(-1)[0, token]), abs=1e-5)
    assert [count / n for count in drawn] == pytest.approx([0.2, 0.4, 0.2, 0.2], abs=0.04)
    greedy, _ = sample(logits, temperatures=[0.0], top_ps=[1.0], uniforms=[0.5], absent=frozenset(range(4, size)))
    assert greedy == [1]


def test_uniforms_are_a_function_of_seed_and_position() -> None:
    assert Uniforms((1, 23)).at(4) == Uniforms((1, 23)).at(4)
    numbers = {Uniforms(seed).at(i) for seed in [(1, 23), (12, 3), (1, 2, 3), ()] for i in range(100)}
    assert len(numbers) == 400
    assert all(0 <= u < 1 for u in numbers)
    assert abs(sum(numbers) / 400 - 0.5) < 0.05
    assert Uniforms((5,)).at(9) == 0.04585439130490998  # the same in every process and on every machine
    one = Uniforms((5,))
    for first, n in ((0, 3), (3, 1), (4, 20), (9, 7), (16, 8), (2, 0)):
        assert one.run(first, n) == [Uniforms((5,)).at(first + i) for i in range(n)]


def test_sampled_shares_are_the_probabilities_at_the_temperature() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    for temperature in (0.5, 1.0, 2.0):
        expected = torch.softmax(logits / temperature, -1)
        tokens, logps = draw(logits, temperature=temperature)
        shares = torch.bincount(tokens, minlength=4) / len(tokens)
        assert (shares - expected).abs().max() < 0.03
        assert abs(logps[0] - expected.log()[tokens[0]].item()) < 1e-6


def test_top_p_takes_the_nucleus_and_records_whole_log_probs() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    tokens, logps = draw(logits, top_p=0.7)
    assert set(tokens.tolist()) == {0, 1}
    assert abs((tokens == 0).float().mean().item() - 0.625) < 0.03
    assert all(abs(logp - logits[token].item()) < 1e-6 for token, logp in zip(tokens.tolist(), logps, strict=True))
    kept = nucleus(torch.tensor([[0.05, 0.5, 0.3, 0.15]]), torch.tensor([0.5]))
    assert kept.tolist() == [[0.0, 0.5, 0.0, 0.0]]


def test_temperature_zero_gives_a_log_prob_to_the_likeliest_of_equals_whatever_top_p() -> None:
    logits = torch.zeros(40)
    for likeliest in range(40):
        near = logits.clone()
        near[likeliest] = 1e-9  # of equal weight after rounding
        tokens, logps = draw(near, temperature=0.0, top_p=0.01, n=1)
        assert tokens.tolist() == [likeliest]
        assert abs(logps[0] - torch.tensor(1 / 40).log().item()) < 1e-6


def test_no_token_of_weight_zero_is_ever_taken() -> None:
    weight = torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.3, 0.0, 0.0]])
    uniform = torch.tensor([0.0, 1.0 - 2.0**-53, 1.0 - 2.0**-53], dtype=torch.float64)
    assert invert(weight, uniform).tolist() == [1, 1, 0]
    for before in (0, 700, 2000):  # zeros, also more than there are in a part of a large vocabulary
        wide = F.pad(weight, (before, 2000))
        assert invert(wide, uniform).tolist() == [before + 1, before + 1, before]


def test_a_plan_keeps_to_the_budget_and_shares_each_prompt() -> None:
    a, b = (1, 2, 3, 4), (5, 6)
    packs = list(plan([(0, a, [7]), (1, b, []), (2, a, [8, 9]), (3, b, []), (4, a, [1] * 8)], budget=12))
    assert [pack.ids for pack in packs] == [[1, 2, 3, 4, 7, 8, 9], [1, 2, 3, 4] + [1] * 8, [5, 6]]
    assert [pack.rows for pack in packs] == [[0, 2], [4], [1, 3]]
    assert packs[0].positions == [0, 1, 2, 3, 4, 4, 5]
    assert packs[0].last == [4, 6]
    mask = packs[0].mask(torch.float32, torch.device("cpu"))
    assert mask is not None
    sees = (mask[0, 0] == 0).int().tolist()
    assert sees[5] == [1, 1, 1, 1, 0, 1, 0]  # the prompt and itself, not its sibling
    assert packs[1].mask(torch.float32, torch.device("cpu")) is None  # plain causal


def test_a_token_is_where_the_running_sum_passes_the_uniform() -> None:
    torch.manual_seed(1)
    for vocabulary in (3, 1024, 1025, 4000):
        weight = torch.softmax(torch.randn(500, vocabulary) * 4, -1)
        weight[:, ::7] = 0
        weight[0, :] = 0
        weight[0, -1] = 0.1
        uniform = torch.rand(500, dtype=torch.float64)
        cdf = weight.double().cumsum(-1)
        token = invert(weight, uniform)[:, None]
        target, share, upto = uniform[:, None] * cdf[:, -1:], weight.gather(-1, token), cdf.gather(-1, token)
        assert (share > 0).all()
        assert ((upto - share - 1e-6 <= target) & (target <= upto + 1e-6)).all()


def reference(logits: list[float], row: FilteredRow) -> list[float]:
    """Probabilities under sampling controls by vLLM's definitions, token by token in plain Python."""
    c, out = row.controls, Counter(row.sampled)
    adjusted = list(logits)
    for token, bias in c.logit_bias:
        adjusted[token] += bias
    for token in range(len(logits)):
        if token in row.stops and len(row.sampled) < c.min_new_tokens:
            adjusted[token] = -math.inf
        if token in row.prompt or token in out:
            rate = c.repetition_penalty
            adjusted[token] = adjusted[token] / rate if adjusted[token] > 0 else adjusted[token] * rate
        adjusted[token] -= c.frequency_penalty * out[token] + c.presence_penalty * (out[token] > 0)
    if not row.temperature:
        return [float(token == adjusted.index(max(adjusted))) for token in range(len(logits))]
    weight = [math.exp((x - max(adjusted)) / row.temperature) for x in adjusted]
    kept = [w if w >= c.min_p * max(weight) else 0.0 for w in weight]
    last = sorted(kept, reverse=True)[min(c.top_k or len(kept), len(kept)) - 1]
    kept = [w if w >= last else 0.0 for w in kept]
    total, before = sum(kept), 0.0
    for token in sorted(range(len(kept)), key=lambda token: -kept[token]):
        share = kept[token] / total
        kept[token] = share if before < row.top_p - 1e-9 else 0.0
        before += share
    return [w / sum(kept) for w in kept]


@given(
    st.lists(st.integers(-60, 60), min_size=8, max_size=8, unique=True),
    st.builds(
        SamplingControls,
        top_k=st.integers(0, 9),
        min_p=st.sampled_from([0.0, 0.013, 0.2, 1.0]),
        min_new_tokens=st.integers(0, 4),
        repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
        presence_penalty=st.sampled_from([0.0, 0.51, -0.33]),
        frequency_penalty=st.sampled_from([0.0, 0.27, -0.41]),
        logit_bias=st.sampled_from([(), ((3, 2.17), (5, -100.0))]),
    ),
    st.sampled_from([0.0, 0.6, 1.0, 1.7]),
    st.sampled_from([1.0, 0.83, 0.31]),
    st.lists(st.integers(0, 7), max_size=5),
    st.lists(st.integers(0, 7), max_size=5),
)
@settings(deadline=None, max_examples=150)
def test_tokens_are_drawn_from_the_reference_distribution_and_log_probs_are_the_models(
    tenths: list[int], controls: SamplingControls, heat: float, top_p: float, prompt: list[int], sampled: list[int]
) -> None:
    logits = [x / 10 + i / 1000 for i, x in enumerate(tenths)]
    row = FilteredRow(controls, heat, top_p, prompt, sampled, frozenset({0, 2}))
    expected = torch.tensor(reference(logits, row))
    given_logits = torch.tensor([logits, logits])
    found = filtered(given_logits[:1], [row])[0]
    tiny = torch.finfo(torch.float32).tiny  # below it, float32 may round to 0
    assert ((found >= tiny) == (expected >= tiny)).all()  # exactly these tokens can be drawn
    assert (found / found.sum() - expected).abs().max() < 1e-5
    tokens, logps = sample(
        given_logits, temperatures=[heat, 1.0], top_ps=[top_p, 1.0], uniforms=[0.37, 0.37], filters={0: row}
    )
    plain = torch.log_softmax(given_logits[0] / (heat or 1.0), -1)
    assert expected[tokens[0]] > 0
    assert abs(logps[0] - plain[tokens[0]].item()) < 1e-5
    alone = sample(given_logits[1:], temperatures=[1.0], top_ps=[1.0], uniforms=[0.37])
    assert ([tokens[1]], [logps[1]]) == alone  # a row without controls is drawn as ever


def test_top_k_keeps_all_tokens_that_equal_the_last_one() -> None:
    row = FilteredRow(SamplingControls(top_k=2), 1.0, 1.0, [], [], frozenset())
    assert (filtered(torch.tensor([[1.0, 3.0, 2.0, 2.0]]), [row])[0] > 0).tolist() == [False, True, True, True]
