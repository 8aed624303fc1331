"""A user's loader as a source: a resumed run goes on after its last row, and what cannot be used is refused.

Without the package torchdata (extra "data") the tests of its StatefulDataLoader are skipped.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.data.loader_process import LoaderRows, decode, encode
from actors.data.source import LoaderSource
from areal_bus.config.data import DataConfig
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError
from tests.support.polling import is_alive, wait_until

Opening = Callable[..., LoaderSource]

OWN = """
class Loader:
    def __init__(self, n, remembers=True):
        self.n, self.at, self.remembers = n, 0, remembers
    def __iter__(self):
        while self.at < self.n:
            self.at += 1
            yield {"question": f"q{self.at}", "answer": "a"}
        self.at = 0
    def state_dict(self):
        return {"at": self.at}
    def load_state_dict(self, state):
        self.at = state["at"] if self.remembers else 0

def three(config):
    print("a line that is no answer")
    return Loader(3)
class Large(Loader):
    def state_dict(self):
        return {"at": self.at, "buffer": bytes(13 << 20)}
def large(config):
    return Large(3)
def starts_a_process(config):
    import subprocess
    open("started", "w").write(str(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid))
    return Loader(3)
def forgetful(config):
    return Loader(3, remembers=False)
class Buffered:
    # holds: whether the buffer is in the state; late: rows before it is used
    def __init__(self, n, size, holds, late=0):
        self.n, self.size, self.holds, self.late = n, size, holds, late
        self.read, self.buffer, self.given = 0, [], 0
    def __iter__(self):
        while self.buffer or self.read < self.n:
            size = self.size if self.given >= self.late else 1
            while len(self.buffer) < size and self.read < self.n:
                self.buffer.append(self.read)
                self.read += 1
            number = self.buffer.pop((7 * self.given) % len(self.buffer))
            self.given += 1
            yield {"question": f"q{number}", "answer": "a"}
        self.read, self.given = 0, 0
    def state_dict(self):
        return {"read": self.read, "given": self.given, "buffer": list(self.buffer) if self.holds else []}
    def load_state_dict(self, state):
        self.read, self.given, self.buffer = state["read"], state["given"], list(state["buffer"])

def shuffles(config):
    return Buffered(100, 8, True)
def forgets_its_buffer(config):
    return Buffered(100, 8, False)
def forgets_it_later(config):
    return Buffered(100, 8, False, late=10)
def empty(config):
    return Loader(0)
def stateless(config):
    return [{"question": "q", "answer": "a"}]
def bad_row(config):
    return Stateful([{"answer": "a"}])
class Stateful(list):
    state_dict = dict
    def load_state_dict(self, state): ...
def texts(config):
    return Stateful(["q"])
def fails(config):
    raise KeyError("no such file")
"""


@pytest.fixture
def open_source(tmp_path: Path) -> Iterator[Opening]:
    (tmp_path / "own_loader.py").write_text(OWN)
    with contextlib.ExitStack() as closing:

        def opened(function: str, *, passes: int | None = None) -> LoaderSource:
            data = DataConfig(function=f"own_loader:{function}", total_train_epochs=passes)
            source = LoaderSource(Config(data=data), tmp_path, name="")
            closing.callback(source.close)
            return source

        yield opened


def test_rows_come_pass_after_pass_and_go_on_after_any_state(open_source: Opening) -> None:
    source = open_source("three", passes=2)
    states, rows = [source.state()], []
    while (row := source.draw()) is not None:
        rows.append(row)
        states.append(source.state())
    assert [(row.epoch, row.row) for row in rows] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert (source.draw(), source.position) == (None, 6)
    for position in (6, 2, 0, 5):
        source.go_to(position, states[position])
        assert [source.draw() for _ in range(6 - position)] == rows[position:]
        assert source.draw() is None


@pytest.mark.slow
def test_loader_continues_from_a_state_of_many_mib(open_source: Opening) -> None:
    source = open_source("large")
    first, state, second = source.draw(), source.state(), source.draw()
    assert first is not None
    assert len(state) > 16 << 20
    source.go_to(1, state)
    assert source.draw() == second


def test_loader_ends_with_all_that_it_started_when_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_source: Opening
) -> None:
    monkeypatch.chdir(tmp_path)
    source = open_source("starts_a_process")
    assert source.draw() is not None
    started = int((tmp_path / "started").read_text())
    source.close()
    wait_until(lambda: not is_alive(started), "what the loader started is gone")


def test_a_loader_that_holds_its_shuffle_buffer_passes_the_check_of_the_start(open_source: Opening) -> None:
    source = open_source("shuffles")
    texts = source.first_rows()
    assert len(texts) == len(set(texts)) == 32
    source.go_to(0, "")
    drawn = [source.draw() for _ in range(3)]
    assert [row.text for row in drawn if row] == texts[:3]
    assert len({row.digest for row in drawn if row}) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "says"),
    [
        (
            "stateless",
            "a loader needs state_dict and load_state_dict.*a list has not; StatefulDataLoader of torchdata has",
        ),
        ("forgetful", "it must continue after the row of its state"),
        (
            "forgets_its_buffer",
            "loaded from its state_dict after 1 row, gives .* the state of a shuffle buffer must hold its rows",
        ),
        ("forgets_it_later", "loaded from its state_dict after 24 rows, gives"),
        ("empty", "no row in loader pass 0: it must yield one in each pass"),
        ("texts", "a loader must yield rows .*: it yields a str; set batch_size = None"),
        ("bad_row", "must have the field 'question': data.function = 'own_loader:bad_row', row 0 of pass 0"),
        ("fails", "must return a loader: it raised KeyError: 'no such file'"),
        ("absent", "missing function 'absent' in module 'own_loader' .data.function."),
    ],
)
def test_a_loader_that_cannot_be_used_is_refused(open_source: Opening, function: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_source(function).first_rows()


def loaders(kind: str, n: int, seed: int) -> Callable[[], Any]:
    """Factories of StatefulDataLoader: a map-style data set in order or shuffled, in items of three, or a stream."""
    torch = pytest.importorskip("torch")
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    class Stream(torch.utils.data.IterableDataset):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            self.at = 0

        def __iter__(self) -> Iterator[dict[str, int]]:
            while self.at < n:
                self.at += 1
                yield {"number": self.at}
            self.at = 0

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    def build() -> Any:
        torch.manual_seed(seed)
        rows = [{"number": number} for number in range(n)]
        if kind == "stream":
            return stateful.StatefulDataLoader(Stream(), batch_size=None)
        if kind == "threes":
            return stateful.StatefulDataLoader(rows, batch_size=3, collate_fn=list, shuffle=True)
        return stateful.StatefulDataLoader(rows, batch_size=None, shuffle=kind == "shuffled")

    return build


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata calls it
@pytest.mark.parametrize("kind", ["ordered", "shuffled", "threes", "stream"])
@settings(max_examples=15, deadline=None)
@given(n=st.integers(1, 8), seed=st.integers(0, 99), crashes=st.lists(st.integers(1, 9), max_size=4))
def test_a_loader_of_torchdata_skips_and_repeats_nothing_over_crashes(
    kind: str, n: int, seed: int, crashes: list[int]
) -> None:
    build = loaders(kind, n, seed)
    whole, rows = LoaderRows(build), LoaderRows(build)
    for length in [*crashes, 5]:
        for _ in range(length):
            assert rows.next() == whole.next()
        rows = LoaderRows(build, state=json.loads(json.dumps(rows.state())))


def test_a_state_comes_back_as_it_was_and_other_objects_are_refused_by_place() -> None:
    torch = pytest.importorskip("torch")
    state = {"a": [1, None, (2.5, "x")], 3: b"\x00\xff", "t": torch.arange(6).reshape(2, 3), "n": np.float32(0.5)}
    again = decode(json.loads(json.dumps(encode(state))))
    assert torch.equal(again.pop("t"), state.pop("t"))  # type: ignore[arg-type]
    assert again == state
    with pytest.raises(ConfigError, match=r"state\['a'\]\[1\] is a set"):
        encode({"a": [1, {2}]})
