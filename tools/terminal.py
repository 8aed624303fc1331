"""Plain text for a terminal: aligned columns, bars, safe quotations, and how a tool ends; knows no run."""

import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence

from areal_bus.errors import ConfigError


def columns(rows: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset()) -> list[str]:
    """Rows as aligned lines; the columns in `right` are set to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    out = []
    for row in rows:
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        out.append("  ".join(cells).rstrip())
    return out


def bar(share: float, width: int = 30) -> str:
    """A bar of # for a share between 0 and 1; 1 % shows, however narrow the bar."""
    filled = round(min(max(share, 0.0), 1.0) * width)
    return "#" * max(filled, int(share >= 0.01))


def quote(text: str, *, indent: str, width: int) -> str:
    """Text as a wrapped block; control characters as escapes: a model's output must not steer a terminal."""
    out = []
    for line in text.split("\n"):
        safe = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
        room = max(width - len(indent), 10)
        wrapped = textwrap.wrap(safe, room, replace_whitespace=False, drop_whitespace=False) or [""]
        out += [(indent + part).rstrip() for part in wrapped]
    return "\n".join(out)


def width() -> int:
    """Columns of the terminal, at most 120; 100 where there is none."""
    return min(shutil.get_terminal_size((100, 24)).columns, 120)


def end(main: Callable[[], int]) -> None:
    """Run a tool's main and leave with its code: 2 and a sentence for input that cannot be used."""
    try:
        code = main()
        sys.stdout.flush()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)
