"""Several sources and a curriculum: what is drawn, how often, and that a resumed run draws the same."""

import copy
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_bus.core.rows import Curriculum, DataSource, Mixture, PassRateWindow, Row, RowOrder
from areal_lab.staleness.simulator.sources import SimulatedSource, mixture

WINDOWS = st.builds(PassRateWindow, st.sampled_from([0.0, 0.25]), st.sampled_from([0.75, 1.0]), st.integers(2, 4))
WEIGHTS = st.sampled_from([0.1, 0.5, 1.0, 1.0, 3.0])
NAMES = ("a", "b", "c")


@st.composite
def several(draw: st.DrawFn) -> list[SimulatedSource]:
    return [SimulatedSource(name, draw(WEIGHTS), draw(st.integers(1, 6))) for name in NAMES[: draw(st.integers(1, 3))]]


def step(source: DataSource, drawn: list[Row], act: tuple[int, int]) -> None:
    """Draw a row, or learn of one that was drawn: of the next in order of `act`, 0 to 4 right samples of 4."""
    which, n_right = act
    if n_right < 0 or not drawn:
        row = source.draw()
        assert row is not None
        drawn.append(row)
    else:
        source.learn(drawn.pop(which % len(drawn)), n_right, 4)


ACTS = st.lists(st.tuples(st.integers(0, 9), st.integers(-3, 4)), max_size=60)


@given(several(), st.none() | WINDOWS, st.integers(0, 99), ACTS, ACTS, st.data())
def test_a_source_that_crashed_goes_on_as_if_it_had_not(
    sources: list[SimulatedSource],
    window: PassRateWindow | None,
    seed: int,
    before: list[tuple[int, int]],
    after: list[tuple[int, int]],
    data: st.DataObject,
) -> None:
    """Its state at any moment is all that it needs; what it did after that moment leaves no trace."""
    source, drawn = mixture(sources, window, seed=seed), list[Row]()
    for act in before:
        step(source, drawn, act)
    kept, position, state = copy.deepcopy((source, drawn)), source.position, source.state()
    for act in data.draw(ACTS):  # lost with the crash
        step(source, drawn, act)
    is_new = data.draw(st.booleans())  # the head died, or a learner alone
    resumed, again = mixture(sources, window, seed=seed) if is_new else source, list(kept[1])
    resumed.go_to(position, state)
    for act in after:
        step(*kept, act)
        step(resumed, again, act)
        assert (again, resumed.state(), resumed.position) == (kept[1], kept[0].state(), kept[0].position)


@given(several(), st.integers(1, 120))
def test_each_source_has_its_share_of_any_number_of_draws(sources: list[SimulatedSource], n: int) -> None:
    source = mixture(sources, None, seed=1)
    names = [row.source for _ in range(n) if (row := source.draw()) is not None]
    total = sum(Fraction(one.weight) for one in sources)
    for one in sources:
        assert abs(names.count(one.name) - n * Fraction(one.weight) / total) <= 1


def test_a_source_that_has_ended_leaves_the_rest_to_the_others() -> None:
    source = mixture([SimulatedSource("a", 1.0, 2), SimulatedSource("b", 1.0, 5)], None, seed=1)
    assert isinstance(source, Mixture)
    for part in source._parts.values():
        part.source._order.total = part.source._order.n_rows  # type: ignore[attr-defined]  # one pass
    names = [row.source for _ in range(7) if (row := source.draw()) is not None]
    assert (names[:4].count("a"), names.count("a"), names.count("b")) == (2, 2, 5)
    assert source.draw() is None


@given(st.integers(1, 8), WINDOWS, st.integers(0, 99), st.lists(st.integers(0, 4), min_size=150, max_size=150))
def test_a_row_outside_of_the_window_rests_and_always_returns(
    n_rows: int, window: PassRateWindow, seed: int, rights: list[int]
) -> None:
    """Learned at once: a row is in each pass while its rate is inside, and exactly `every` passes later if not."""
    order, whole = Curriculum(n_rows, window, seed=seed), RowOrder(n_rows, seed=seed)
    due, passes = dict.fromkeys(range(n_rows), 0), dict[int, list[int]]()
    for n_right in rights:
        drawn = order.draw()
        assert drawn is not None
        pass_, row = drawn
        passes.setdefault(pass_, []).append(row)
        assert pass_ == due[row]
        due[row] = pass_ + (1 if window.contains(n_right, 4) else window.every)
        order.learn(drawn, n_right, 4)
    assert min(due.values()) >= max(passes)  # none was passed over
    for pass_, rows in passes.items():
        in_order = [whole.row(k)[1] for k in range(pass_ * n_rows, (pass_ + 1) * n_rows)]
        assert rows == [row for row in in_order if row in rows]


def test_a_group_without_a_judged_sample_changes_nothing() -> None:
    order = Curriculum(3, PassRateWindow(0.0, 1.0, 4), seed=1)
    for _ in range(3):
        order.learn(order.draw() or (0, 0), 0, 0)
    assert sorted(order.draw() or () for _ in range(3)) == [(1, 0), (1, 1), (1, 2)]


@given(n_rows=st.integers(1, 60), seed=st.integers(0, 10**6), passes=st.integers(1, 4), shuffle=st.booleans())
def test_each_pass_visits_every_row_exactly_once(n_rows: int, seed: int, passes: int, shuffle: bool) -> None:
    order = RowOrder(n_rows, seed=seed, shuffle=shuffle, passes=passes)
    draws = [order.row(k) for k in range(order.total or 0)]
    assert [pass_ for pass_, _ in draws] == [k // n_rows for k in range(passes * n_rows)]
    for pass_ in range(passes):
        assert sorted(row for p, row in draws if p == pass_) == list(range(n_rows))
    with pytest.raises(IndexError, match=f"asked for {passes * n_rows}"):
        order.row(passes * n_rows)
    resumed = RowOrder(n_rows, seed=seed, shuffle=shuffle)  # without a number of passes: as far as one asks
    assert resumed.total is None
    assert [resumed.row(k) for k in reversed(range(len(draws)))] == draws[::-1]


def test_passes_and_seeds_have_orders_of_their_own_and_without_shuffle_there_is_one() -> None:
    order = RowOrder(50, seed=1)
    first, second = ([order.row(k)[1] for k in range(start, start + 50)] for start in (0, 50))
    assert first != second
    assert first != [RowOrder(50, seed=2).row(k)[1] for k in range(50)]
    assert [RowOrder(50, seed=1, shuffle=False).row(k) for k in (0, 49, 50)] == [(0, 0), (0, 49), (1, 0)]
    with pytest.raises(ValueError, match="at least one row"):
        RowOrder(0, seed=1)
