"""The data source of a run: rows in memory, or those of a user's loader, which runs ahead in a process of its own."""

import hashlib
import json
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from actors.data.loading import rows_of_source
from actors.processes.ipc import ROWS_BYTES
from actors.processes.worker_process import CalledProcess, WorkerLost
from areal_bus.config.data import DataConfig
from areal_bus.config.sections import Config
from areal_bus.core.rows import Curriculum, DataSource, Mixture, PassRateWindow, Row, RowOrder, WeightedSource
from areal_bus.errors import ConfigError

AHEAD = 8  # rows that are asked for before they are drawn
CHECKED_AFTER = (1, 7, 24)  # rows after which the start continues from a state
DRAW_S = 120.0  # longest wait for a row, the start of the process included
MODULE = "actors.data.loader_process"


class LoaderSource:
    """Rows in the order of the loader. Its state is the loader's own, after the last row that was drawn."""

    total: int | None = None  # draws; a loader does not tell

    def __init__(self, config: Config, config_folder: str | Path, *, name: str) -> None:
        """`name`: of the [[data.source]]; "" for [data] itself."""
        self._function = config.data.of(name).function
        self._order = {"config": config.model_dump(mode="json"), "name": name, "folder": str(config_folder)}
        self._process: CalledProcess | None = None
        self._asked = 0  # requests without an answer
        self._rows: deque[dict[str, Any]] = deque()
        self._state = ""
        self.position = 0

    def draw(self) -> Row | None:
        """The next row; None after the last pass. Raises ConfigError when the loader fails, or is too slow."""
        while self._asked + len(self._rows) < AHEAD:
            self._ask({})
        while not self._rows:
            self._read()
        answer = self._rows[0]
        if answer["row"] is None:
            return None
        self._rows.popleft()
        self._state = json.dumps(answer["state"], ensure_ascii=False)
        self.position += 1
        number, pass_, text = answer["row"]
        return Row(number, pass_, text, digest=hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16])

    def learn(self, row: Row, n_right: int, n_judged: int) -> None:
        """Nothing: the loader decides its order."""

    def state(self) -> str:
        return self._state

    def go_to(self, position: int, state: str) -> None:
        """Continue after the row of that state. Raises ValueError where a position other than 0 has none."""
        if position and not state:
            raise ValueError(f"missing state of the loader at position {position}: a loader resumes only from it")
        if (position, state) == (self.position, self._state):
            return
        self.position, self._state = position, state
        self._wait()
        self._ask({"state": json.loads(state) if state else None})
        self._wait()
        self._rows.clear()

    def close(self) -> None:
        """End the process with all that it started. It also ends with this one."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def first_rows(self) -> list[str]:
        """Rows as JSON, before the run. Raises ConfigError if the loader fails, is empty or does not resume."""
        drawn: list[Row] = []
        states = [self._state]
        while len(drawn) < CHECKED_AFTER[-1] + AHEAD and (row := self.draw()) is not None:
            drawn.append(row)
            states.append(self._state)
        if not drawn:
            raise ConfigError(f"data.function = {self._function!r}: the loader has no row")
        for after in CHECKED_AFTER:
            if after < len(drawn):
                self.go_to(after, states[after])
                self._check_same(after, drawn[after : after + AHEAD])
        return [row.text for row in drawn]

    def _check_same(self, after: int, expected: list[Row]) -> None:
        """Draw these rows again. Raises ConfigError at another one."""
        for row in expected:
            again = self.draw()
            if again != row:
                raise ConfigError(
                    f"row mismatch: data.function = {self._function!r}, loaded from its state_dict after {after} "
                    f"row{'s' if after > 1 else ''}, gives {again and again.text[:80]!r}, and {row.text[:80]!r} "
                    "without a stop; it must continue after the row of its state, and the state of a shuffle buffer "
                    "must hold its rows"
                )

    def _wait(self) -> None:
        while self._asked:
            self._read()

    def _ask(self, request: dict[str, Any]) -> None:
        if self._process is None:
            self._process = CalledProcess(MODULE, most_bytes=ROWS_BYTES, variables={})
            self._process.send(self._order)
        self._asked += 1
        self._process.send(request)

    def _read(self) -> None:
        """Take the next answer; waits for it."""
        if self._process is None:
            raise RuntimeError("loader process not started: send a request before you receive")
        end = time.monotonic() + DRAW_S
        try:
            answer = self._process.receive(lambda: end - time.monotonic())
        except WorkerLost as lost:
            raise ConfigError(f"data.function = {self._function!r}: the process of the loader ended: {lost}") from None
        if answer is None:
            raise ConfigError(f"timed out: data.function = {self._function!r} gave no row within {DRAW_S:g} s")
        if "error" in answer:
            raise ConfigError(answer["error"])
        self._asked -= 1
        self._rows.append(answer)


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
