"""Our halves of the comparisons, small, and the figures made of what both sides say. Nothing here is timed."""

import pytest

from areal_bus.errors import ConfigError
from tools.bench import pack, side


def test_our_half_of_pack_makes_partitions() -> None:
    with side.ours("pack") as ours:
        assert ours.ask("micro_batches", lengths=[6, 5, 4, 3], capacity=10)["parts"] == [[0, 2], [1, 3]]
        assert ours.ask("shares", lengths=[5, 3, 2], n_ranks=2)["parts"] == [[0], [1, 2]]


def test_parts_are_judged_by_their_tokens() -> None:
    assert pack.totals([[0, 2], [1]], [3, 4, 5]) == [8, 4]
    assert pack.spread([8, 4]) == pytest.approx(4 / 6)
    assert pack.excess([pack.CAPACITY, 1, 1]) == 1
    with pytest.raises(ConfigError, match="exactly one part"):
        pack.totals([[0], [0, 1]], [1, 2])
