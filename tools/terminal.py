"""Output of the tools: tables, bars, escaped quotations, and the exit code of a tool."""

import argparse
import io
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable
from typing import Any

from areal_bus.errors import ArealBusError, ConfigError
from areal_bus.foreign_text import printable
from areal_bus.process import standard_streams
from areal_bus.process.commands import as_here
from areal_bus.process.isolation import child_path, isolate
from areal_bus.process.terminal import columns, progress, table

__all__ = ["bar", "columns", "end", "one_line", "printable", "progress", "quote", "table", "width"]


def bar(share: float, width: int = 30) -> str:
    """A bar of # for a share between 0 and 1. From 1 % on it has at least one #."""
    filled = round(min(max(share, 0.0), 1.0) * width)
    return "#" * max(filled, int(share >= 0.01))


def quote(text: str, *, indent: str, width: int) -> str:
    """Text as a wrapped block with escaped control characters: a model's output must not control the terminal."""
    out = []
    for line in printable(text).split("\n"):
        room = max(width - len(indent), 10)
        wrapped = textwrap.wrap(line, room, replace_whitespace=False, drop_whitespace=False) or [""]
        out += [(indent + part).rstrip() for part in wrapped]
    return "\n".join(out)


def one_line(text: str, *, keep_end: bool = False, width: int = 160) -> str:
    """A text in one line of printable characters, shortened."""
    line = " ".join(text.split())
    flat = printable(line[-width - 1 :] if keep_end else line[: width + 1])
    if len(flat) <= width:
        return flat
    return f"...{flat[3 - width :]}" if keep_end else f"{flat[: width - 3]}..."


def json_line(value: Any) -> str:
    """JSON in one line, readable in any language. What could control the terminal is escaped: C1 codes, bidi marks."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def width() -> int:
    """Columns of the terminal, at most 120; 100 without a terminal."""
    return min(shutil.get_terminal_size((100, 24)).columns, 120)


def compute_environment() -> dict[str, str]:
    """This environment, with our packages first and, as in a generator, one thread on CPU unless it is set."""
    return {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **os.environ, "PYTHONPATH": child_path()}


def end_computing(main: Callable[[], int]) -> None:
    """As `end`, of a tool that imports torch after its arguments are parsed: no file of the working directory does."""
    if wrong := isolate():
        print("\n".join(wrong), file=sys.stderr)
        sys.exit(2)
    os.environ.update(compute_environment())
    end(main)


def end(main: Callable[[], int]) -> None:
    """Run a tool's main, exit with its code (1: a finding); 2 and an error line for wrong input or a refusing disk."""
    standard_streams.open_missing()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal of another encoding, a lone surrogate
    try:
        code = main()
        sys.stdout.flush()
    except ArealBusError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2 if isinstance(error, ConfigError) else 1
    except PermissionError as error:
        print(f"error: the files must be readable by this user: {error.filename}: {error.strerror}", file=sys.stderr)
        code = 2
    except BrokenPipeError:  # the reader (head, less) closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:  # a full disk, a folder that cannot be made
        print(f"error: {error.filename}: {error.strerror}" if error.filename else f"error: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def tool_parser(prog: str, doc: str | None, epilog: str) -> argparse.ArgumentParser:
    """A parser for `prog`, described by the first line of its module. The caller adds arguments and options."""
    about, raw = (doc or "").partition("\n")[0], argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(as_here(prog), description=about, epilog=as_here(epilog), formatter_class=raw)


def run_parser(module: str, doc: str | None, epilog: str) -> argparse.ArgumentParser:
    """A parser for `python -m MODULE [RUN]`. The caller adds the options."""
    p = tool_parser(f"python -m {module}", doc, epilog)
    p.add_argument("run", nargs="?", metavar="RUN", help="folder of the run, or its name below runs/ (runs/latest)")
    return p
