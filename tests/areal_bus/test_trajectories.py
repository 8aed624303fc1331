"""Which tokens of a sample belong to which trajectory of its episode."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_bus.trajectories import broken_roles, broken_rule, split, within


@st.composite
def episodes(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    """Segments, and the trajectory that each extends; each trajectory keeps the rules."""
    segments, numbers, n_begun = [], [], 0
    for _ in range(draw(st.integers(1, 8))):
        number = draw(st.integers(0, n_begun))
        is_new = number == n_begun
        n_begun += is_new
        segments.append([draw(st.integers(int(is_new), 4)), draw(st.integers(int(is_new), 4))])
        numbers.append(number)
    return segments, numbers


@given(episodes())
def test_I1_each_token_is_in_exactly_one_trajectory(episode: tuple[list[list[int]], list[int]]) -> None:
    segments, numbers = episode
    assert broken_rule(segments, numbers) == ""
    found = split(segments, numbers)
    assert sorted(i for one in found for i in within(one.tokens)) == list(range(sum(map(sum, segments))))
    assert sorted(i for one in found for i in within(one.sampled)) == list(range(sum(n for _, n in segments)))
    assert [one.n for one in found] == [len(list(within(one.tokens))) for one in found]


@given(episodes())
def test_sampled_tokens_of_a_trajectory_are_at_its_places(episode: tuple[list[list[int]], list[int]]) -> None:
    segments, numbers = episode
    tokens = [sampled for given, n in segments for sampled in [None] * given + ["sampled"] * n]
    k, order = 0, []  # number of each sampled token among all of them
    for token in tokens:
        order.append(k if token else None)
        k += token is not None
    for one in split(segments, numbers):
        of_it = [order[i] for i in within(one.tokens)]
        assert [of_it[place] for place in within(one.places)] == list(within(one.sampled))
        assert sum(number is not None for number in of_it) == len(list(within(one.places)))


def test_a_sample_without_numbers_is_one_trajectory() -> None:
    (one,) = split([[3, 2], [1, 4]], [])
    assert list(within(one.places)) == [3, 4, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("segments", "numbers", "words"),
    [
        ([[2, 1]], [0, 0], "mismatch of trajectories"),
        ([[2, 1]], [1], "unknown trajectory 1"),
        ([[2, 1], [2, 1]], [0, 2], "unknown trajectory 2"),
        ([[2, 1], [2, 1]], [0, -1], "unknown trajectory -1"),
        ([[2, 1], [0, 1]], [0, 1], "missing prompt: trajectory 1"),
        ([[2, 1], [2, 0]], [0, 1], "empty trajectory 1"),
    ],
)
def test_numbers_that_no_episode_has_are_refused(segments: list[list[int]], numbers: list[int], words: str) -> None:
    assert words in broken_rule(segments, numbers)


@pytest.mark.parametrize(
    ("numbers", "roles", "words"),
    [
        ([], "", ""),
        ([], "black", ""),
        ([0, 1, 0], "black white", ""),
        ([0, 1], "black", "mismatch of roles: each of 2 trajectories has one"),
        ([], "black white", "mismatch of roles: each of 1 trajectories"),
        ([0, 1], "black -1", "invalid role '-1'"),
        ([0, 1], "black ", "invalid role ''"),
    ],
)
def test_each_trajectory_has_a_role_or_none_has(numbers: list[int], roles: str, words: str) -> None:
    found = broken_roles(numbers, roles)
    assert words in found if words else not found
