"""A batch shared out among learner ranks."""

import random

from hypothesis import given
from hypothesis import strategies as st

from areal_bus.core.transitions.batcher import EVEN, even_out, split


def spread(shares: list[list[int]], weights: list[int]) -> int:
    tokens = [sum(weights[i] for i in share) for share in shares]
    return max(tokens) - min(tokens)


@given(st.lists(st.integers(1, 300), max_size=80), st.integers(1, 10))
def test_shares_differ_by_at_most_the_longest_group(weights: list[int], n_ranks: int) -> None:
    shares = split(weights, n_ranks)
    assert len(shares) == n_ranks
    assert sorted(index for share in shares for index in share) == list(range(len(weights)))
    assert all(share == sorted(share) for share in shares)
    assert spread(shares, weights) <= max(weights, default=0)


@given(st.lists(st.integers(1, 300), max_size=80), st.integers(1, 10), st.randoms(use_true_random=False))
def test_exchanges_never_make_shares_more_uneven(weights: list[int], n_ranks: int, dice: random.Random) -> None:
    shares: list[list[int]] = [[] for _ in range(n_ranks)]
    for index in sorted(range(len(weights)), key=lambda i: -weights[i]):
        dice.choice(shares).append(index)
    before = spread(shares, weights)
    even_out(shares, weights)
    assert spread(shares, weights) <= before
    assert sorted(index for share in shares for index in share) == list(range(len(weights)))


def test_exchanges_balance_the_split_of_longest_first() -> None:
    assert spread(split([5, 5, 4, 3, 3], 2), [5, 5, 4, 3, 3]) == 0  # longest first ends with 8 and 12, or 9 and 11
    draw = random.Random(1)
    weights = [int(draw.lognormvariate(7, 1)) + 1 for _ in range(2000)]
    assert spread(split(weights, 16), weights) <= 4 * EVEN


def test_a_share_may_be_empty() -> None:
    assert split([7], 3) == [[0], [], []]
