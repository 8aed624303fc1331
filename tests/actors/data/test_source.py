import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_bus.core.rows import RowOrder


@given(n_rows=st.integers(1, 60), seed=st.integers(0, 10**6), passes=st.integers(1, 4), shuffle=st.booleans())
def test_each_pass_visits_every_row_exactly_once(n_rows, seed, passes, shuffle):
    order = RowOrder(n_rows, seed=seed, shuffle=shuffle, passes=passes)
    draws = [order.row(k) for k in range(order.total)]
    assert [pass_ for pass_, _ in draws] == [k // n_rows for k in range(passes * n_rows)]
    for pass_ in range(passes):
        assert sorted(row for p, row in draws if p == pass_) == list(range(n_rows))


@given(n_rows=st.integers(1, 60), seed=st.integers(0, 10**6), start=st.integers(0, 200))
def test_an_order_that_is_resumed_goes_on_as_if_it_had_never_stopped(n_rows, seed, start):
    whole = [RowOrder(n_rows, seed=seed).row(k) for k in range(start + 20)]
    resumed = RowOrder(n_rows, seed=seed)
    assert [resumed.row(k) for k in range(start, start + 20)] == whole[start:]


def test_passes_and_seeds_have_orders_of_their_own_and_without_shuffle_there_is_one():
    order = RowOrder(50, seed=1)
    first, second = ([order.row(k)[1] for k in range(start, start + 50)] for start in (0, 50))
    assert first != second
    assert first != [RowOrder(50, seed=2).row(k)[1] for k in range(50)]
    assert [RowOrder(50, seed=1, shuffle=False).row(k) for k in (0, 49, 50)] == [(0, 0), (0, 49), (1, 0)]


def test_an_order_ends_after_its_passes_and_one_without_number_never():
    assert RowOrder(5, seed=1, passes=2).total == 10
    with pytest.raises(IndexError, match="asked for 10"):
        RowOrder(5, seed=1, passes=2).row(10)
    assert RowOrder(5, seed=1).total is None
    assert RowOrder(5, seed=1).row(10**9)[0] == 2 * 10**8


def test_an_order_of_no_rows_is_refused():
    with pytest.raises(ValueError, match="at least one row"):
        RowOrder(0, seed=1)
