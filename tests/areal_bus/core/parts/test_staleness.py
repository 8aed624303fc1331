"""Which tokens each policy trains."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_bus.core.parts.staleness import StalenessPolicy, runs_under, trained_runs
from areal_bus.errors import ImpossibleEvent

YOUNG = [[1, 4], [2, 3]]
OLD = [[0, 5], [1, 4], [2, 3]]


@pytest.mark.parametrize("policy", [StalenessPolicy.HOLD, StalenessPolicy.DROP])
def test_hold_and_drop_train_all_and_refuse_a_staleness_beyond_their_gate(policy: StalenessPolicy) -> None:
    assert runs_under(policy, YOUNG, 2, 1) == [(4, True), (3, True)]
    with pytest.raises(ImpossibleEvent, match=f"under {policy} no token of a batch is older than eta = 1"):
        runs_under(policy, OLD, 2, 1)


@pytest.mark.parametrize("policy", StalenessPolicy)
@pytest.mark.parametrize("spans", [[[2, 1], [1, 1]], [[3, 1]], [[0, 0]], [[-1, 2]]])
def test_spans_that_no_generator_stamps_are_refused_under_every_policy(
    policy: StalenessPolicy, spans: list[list[int]]
) -> None:
    with pytest.raises(ValueError):
        runs_under(policy, spans, 2, 9)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 20)), min_size=1).map(sorted),
    st.integers(9, 12),
    st.integers(0, 9),
)
def test_a_token_is_trained_exactly_when_it_is_within_eta(spans: list[tuple[int, int]], clock: int, eta: int) -> None:
    for (version, n), (n_tokens, trained) in zip(spans, trained_runs(spans, clock, eta), strict=True):
        assert n_tokens == n
        assert trained == (clock - version <= eta)
