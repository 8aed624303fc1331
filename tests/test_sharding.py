"""A batch shared out among learner ranks."""

from hypothesis import given
from hypothesis import strategies as st

from areal_bus.sharding import split


@given(st.lists(st.integers(1, 300), max_size=80), st.integers(1, 10))
def test_shares_differ_by_at_most_the_longest_group(weights: list[int], n_ranks: int) -> None:
    shares = split(weights, n_ranks)
    assert len(shares) == n_ranks
    assert sorted(index for share in shares for index in share) == list(range(len(weights)))
    assert all(share == sorted(share) for share in shares)
    totals = [sum(weights[i] for i in share) for share in shares]
    assert max(totals) - min(totals) <= max(weights, default=0)
