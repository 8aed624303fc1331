"""The shape of the tree of groups."""

from hypothesis import given
from hypothesis import strategies as st

from areal_bus.weights.broadcast_tree import FAN_OUT, receivers_of, sender_to


@given(st.integers(2, 5000))
def test_each_rank_receives_once_from_a_rank_before_it(size: int) -> None:
    receives = [receiver for rank in range(size) for receiver in receivers_of(rank, size)]
    assert receives == list(range(1, size))
    for rank in range(1, size):
        assert sender_to(rank) < rank
        assert rank in receivers_of(sender_to(rank), size)


@given(st.integers(2, 5000))
def test_no_group_has_more_than_fan_out_receivers(size: int) -> None:
    assert max(len(receivers_of(rank, size)) for rank in range(size)) == min(size - 1, FAN_OUT)


def test_a_view_of_512_is_two_groups_deep() -> None:
    assert sender_to(sender_to(511)) == 0
