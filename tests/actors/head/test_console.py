"""The console of a run: the table of steps, on any stream and terminal."""

import contextlib
import io
import os
import pty
import re
import termios

import pytest

from actors.head.console import Console


@pytest.mark.parametrize("stream", ["full", "no reader"])
def test_a_console_loses_lines_and_goes_on_when_its_stream_takes_nothing(stream: str) -> None:
    read, write = os.pipe()
    os.close(read)
    out = open("/dev/full" if stream == "full" else write, "w", encoding="utf-8")  # noqa: SIM115
    console = Console(total_steps=10, out=out)
    for kind, fields in (("warning", {"text": "x" * 10_000}), ("note", {"name": "a", "text": "loads"})):
        console.on(kind, fields)
    with contextlib.suppress(OSError):
        out.close()


@pytest.mark.parametrize("correct", [None, 0.5])
def test_the_table_has_accuracy_only_where_the_reward_returns_it(correct: float | None) -> None:
    """A column of dashes for rewards of one's own."""
    out = io.StringIO()
    progress = Console(total_steps=2, out=out)
    progress.on("step", {"version": 1, "v": 0, "reward": 1.0} | ({} if correct is None else {"correct": correct}))
    heading, line = out.getvalue().splitlines()
    assert ("accuracy" in heading) is ("completed" in heading) is (correct is not None)
    assert ("0.500" in line) is (correct is not None)


def rows_on(width: int | None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Heading and row on a terminal of this width; None: in a pipe."""
    for name in ("COLUMNS", "AREAL_BUS_COLUMNS", "AREAL_BUS_STYLED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    reader, writer = os.pipe() if width is None else pty.openpty()
    if width:
        termios.tcsetwinsize(writer, (24, width))
    step = {"version": 149, "v": 147, "reward": 0.5, "correct": 0.25, "completed_accuracy": 0.125, "lag_mean": 1.25,
            "lag_max": 3, "n_tokens": 4000}  # fmt: skip
    printed = b""
    with open(writer, "w", encoding="utf-8") as out, open(reader, "rb", buffering=0) as shown:
        Console(total_steps=150, out=out).on("step", step)
        while printed.count(b"\n") < 2:
            printed += shown.read(4096)
    return [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in printed.decode().splitlines()]


@pytest.mark.parametrize("width", [30, 35, 40, 45, 50, 70, 75, 95, 100, 105, 115])
def test_a_row_of_the_table_fits_the_terminal_by_leaving_columns_out(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    lines = rows_on(width, monkeypatch)
    assert [len(line) for line in lines] == [len(lines[0])] * 2
    assert 26 <= len(lines[0]) <= max(width, 30)
    assert lines[0].split()[:2] == ["step", "version" if width >= 101 else "reward"]
    assert ("time left" in lines[0]) is (width >= 40)
    assert ("lag" in lines[0]) is (width >= 72)
    assert ("completed" in lines[0]) is (width >= 48)


def test_a_pipe_gets_every_column(monkeypatch: pytest.MonkeyPatch) -> None:
    heading, line = rows_on(None, monkeypatch)
    assert heading == (
        "  step  version   reward  accuracy  completed  lag mean/max  masked   KL(mism.)   tokens/s  time left"
    )
    assert line.split()[:7] == ["149", "147", "0.500", "0.250", "0.125", "1.25/3", "0.0%"]
    monkeypatch.setenv("COLUMNS", "70")
    assert rows_on(None, monkeypatch)[0] == heading


def test_each_source_has_a_column_that_a_narrow_terminal_leaves_out_first() -> None:
    out = io.StringIO()
    console = Console(total_steps=2, sources=["sums", "a-task-of-a-long-name"], out=out)
    for version, figures in (
        (1, {"reward/sums": 0.25}),
        (2, {"reward/sums": 0.5, "reward/a-task-of-a-long-name": -1.0}),
    ):
        console.on("step", {"version": version, "v": 0, "reward": 1.0} | figures)
    heading, *lines = out.getvalue().splitlines()
    assert heading.endswith("  sums  a-task-of-a-long-name")
    assert [line.split()[-2:] for line in lines] == [["0.250", "-"], ["0.500", "-1.000"]]
    assert {len(line) for line in (heading, *lines)} == {len(heading)}
