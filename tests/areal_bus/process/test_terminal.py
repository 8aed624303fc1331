"""Output for people: plain text in a file or pipe, drawn tables and styles on a terminal."""

import io
import os
import pty
import sys

import pytest

from areal_bus.process.terminal import STYLED, progress, styled, table

ROWS = [("step", "reward"), ("1", "0.5"), ("[red]2", "1.25")]


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (STYLED, "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")


def test_a_file_or_pipe_gets_aligned_plain_lines() -> None:
    out = io.StringIO()
    assert table(ROWS, right=frozenset({1}), out=out) == ["step    reward", "1          0.5", "[red]2    1.25"]
    assert styled("warning", "yellow", out) == "warning"


def test_a_terminal_gets_a_drawn_table_with_the_same_cells() -> None:
    descriptor, child = pty.openpty()
    with os.fdopen(descriptor, "rb"), os.fdopen(child, "w") as out:
        drawn = "\n".join(table(ROWS, right=frozenset({1}), out=out))
        assert styled("warning", "yellow", out) == "\x1b[33mwarning\x1b[0m"
    assert "─" in drawn
    assert all(cell in drawn for row in ROWS for cell in row), "cells are text, not markup"


def test_a_table_that_is_wider_than_the_terminal_is_plain_and_cuts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "14")
    descriptor, child = pty.openpty()
    with os.fdopen(descriptor, "rb"), os.fdopen(child, "w") as out:
        assert table(ROWS, right=frozenset({1}), out=out)[1:] == ["1          0.5", "[red]2    1.25"]


def test_the_output_of_the_head_behind_mpirun_on_a_terminal_is_styled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STYLED, "1")
    assert styled("step", "bold", io.StringIO()) == "\x1b[1mstep\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in styled("step", "yellow", io.StringIO())
    monkeypatch.setenv(STYLED, "0")
    assert styled("step", "bold", sys.stdout) == "step"


def test_progress_writes_nothing_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress([1, 2], "counting")) == [1, 2]
    assert capsys.readouterr() == ("", "")
    assert sys.stderr.isatty() is False
