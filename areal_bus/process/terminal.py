"""Tables, styles and progress for people: drawn by rich on a terminal, plain aligned text elsewhere."""

import contextlib
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TextIO, TypeVar

from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table
from rich.text import Text

T = TypeVar("T")
STYLED = "AREAL_BUS_STYLED"  # environment of a job: "1" when its output reaches a terminal, else "0"
COLUMNS = "AREAL_BUS_COLUMNS"  # and that terminal's width; 0: unknown


def is_terminal(out: TextIO) -> bool:
    """Whether `out` reaches a terminal. Under mpirun it is always a pseudo-terminal: STYLED decides there."""
    return os.environ[STYLED] == "1" if STYLED in os.environ else out.isatty()


def columns_of(out: TextIO) -> int | None:
    """The width of the terminal that `out` reaches; None elsewhere, and where it is unknown."""
    if not is_terminal(out):
        return None
    if (given := os.environ.get("COLUMNS") or os.environ.get(COLUMNS, "")).isdecimal():
        return int(given) or None
    with contextlib.suppress(OSError, ValueError):  # no descriptor
        return os.get_terminal_size(out.fileno()).columns or None
    return None


def styled(text: str, style: str, out: TextIO) -> str:
    """The text with a rich style ("bold", "yellow") on a terminal; elsewhere unchanged. NO_COLOR is respected."""
    if not style or not is_terminal(out):
        return text
    console = Console(file=out, force_terminal=True)
    with console.capture() as captured:
        console.print(Text(text, style), soft_wrap=True, end="")
    return captured.get()


def columns(rows: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset()) -> list[str]:
    """Rows as aligned plain lines. Columns in `right` are right-aligned."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    out = []
    for row in rows:
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        out.append("  ".join(cells).rstrip())
    return out


def table(
    rows: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset(), out: TextIO | None = None
) -> list[str]:
    """The lines of a table whose first row has the titles: drawn if it fits the terminal, else as `columns`."""
    out = out or sys.stdout
    plain = columns(rows, right=right)
    if not is_terminal(out):
        return plain
    titles, *body = rows
    headers = [Column(Text(t), justify="right" if i in right else "left") for i, t in enumerate(titles)]
    drawn = Table(*headers, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in body:
        drawn.add_row(*map(Text, row))  # Text: cells are no markup
    console = Console(file=out, force_terminal=True)
    if console.measure(drawn, options=console.options.update(width=1000)).maximum > console.width:
        return plain  # a narrower drawn table would cut figures
    with console.capture() as captured:
        console.print(drawn)
    return [line.rstrip() for line in captured.get().strip("\n").split("\n")]


def progress(items: Sequence[T], what: str) -> Iterable[T]:
    """The items, with a progress bar on standard error while they are worked on, if that is a terminal."""
    return track(items, what, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
