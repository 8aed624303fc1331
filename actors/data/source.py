"""The data source of a run: rows in memory, in the order that the pure core decides, or those of a user's loader."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from actors.data.loader_source import LoaderSource
from actors.data.loading import rows_of_source
from areal_bus.config.data import DataConfig
from areal_bus.config.sections import Config
from areal_bus.core.rows import Curriculum, DataSource, Mixture, PassRateWindow, Row, RowOrder, WeightedSource
from areal_bus.errors import ConfigError

EVERY = 4  # passes from a visit of a row outside of the pass-rate window to its next


class Order(Protocol):
    """`RowOrder` or `Curriculum`: which row of which pass is next."""

    @property
    def total(self) -> int | None: ...

    @property
    def position(self) -> int: ...

    def draw(self) -> tuple[int, int] | None: ...

    def learn(self, drawn: tuple[int, int], n_right: int, n_judged: int) -> None: ...

    def state(self) -> str: ...

    def go_to(self, position: int, state: str) -> None: ...


class RowSource:
    """Rows in an order; `total`: how many draws there are, None without a limit."""

    def __init__(self, rows: Sequence[dict[str, Any]], order: Order) -> None:
        self._rows = rows
        self._order = order
        self.total = order.total

    @property
    def position(self) -> int:
        return self._order.position

    def draw(self) -> Row | None:
        """The next row; None after the last pass."""
        drawn = self._order.draw()
        if drawn is None:
            return None
        epoch, row = drawn
        return Row(row, epoch, json.dumps(self._rows[row], ensure_ascii=False))

    def learn(self, row: Row, n_right: int, n_judged: int) -> None:
        self._order.learn((row.epoch, row.row), n_right, n_judged)

    def state(self) -> str:
        return self._order.state()

    def go_to(self, position: int, state: str) -> None:
        self._order.go_to(position, state)


def make_source(config: Config, config_folder: str | Path) -> DataSource:
    """The rows of [data], or of each [[data.source]] by weight. Raises ConfigError as loading does."""
    data = config.data
    found = {name: one_source(config, own, config_folder, name=name) for name, own in data.parts}
    check_total(data, [source.total for source in found.values()])
    if not data.source:
        return found[""]
    return Mixture([WeightedSource(source.label, source.weight, found[source.label]) for source in data.source])


def check_total(data: DataConfig, totals: Sequence[int | None]) -> None:
    """Raises ConfigError when the data cannot fill one batch and data.drop_last drops short ones."""
    total = sum(n for n in totals if n is not None)
    if data.drop_last and None not in totals and total < data.batch_size:
        raise ConfigError(
            f"no batch can ever be full: data.batch_size is {data.batch_size}, and data.total_train_epochs passes give "
            f"{total} prompts; lower data.batch_size or set data.drop_last = false"
        )


def one_source(config: Config, data: DataConfig, config_folder: str | Path, *, name: str) -> RowSource | LoaderSource:
    """One file, data set, generated task or loader."""
    if data.function:
        return LoaderSource(config, config_folder, name=name)
    seed = f"{config.run.seed}:{name}" if name else config.run.seed
    rows = [placed.row for placed in rows_of_source(config, data, config_folder, name=name)]
    return RowSource(rows, order_of(data, len(rows), seed=seed))


def order_of(data: DataConfig, n_rows: int, *, seed: int | str) -> RowOrder | Curriculum:
    """The order of so many rows that [data] describes."""
    passes, window = data.total_train_epochs, data.curriculum
    if window is None:
        return RowOrder(n_rows, seed=seed, shuffle=data.shuffle, passes=passes)
    rates = PassRateWindow(window.low, window.high, EVERY)
    return Curriculum(n_rows, rates, seed=seed, shuffle=data.shuffle, passes=passes)
