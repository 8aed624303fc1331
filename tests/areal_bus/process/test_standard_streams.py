"""Standard streams that are full, closed or without a reader cost a line and nothing else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal_bus.process.standard_streams import lossy, without_controls

PROGRAM = """
import os, sys
from areal_bus.process import standard_streams
standard_streams.secure()
from loguru import logger
opened = os.open(os.devnull, os.O_RDONLY)
for number in range(3):
    print("line", number, "\\u00fc \\u5b57 \\ud83d")
    print("error", number, file=sys.stderr)
    logger.warning("a warning")
sys.stdout.flush()
with open(sys.argv[1], "w", encoding="utf-8") as file:
    file.write(str(opened))
"""


def run_program(tmp_path: Path, redirection: str, **environment: str) -> "subprocess.CompletedProcess[bytes]":
    """Run it in a shell with this redirection. Its last act is to write a file."""
    file = tmp_path / "reached"
    words = [sys.executable, "-c", PROGRAM, str(file)]
    line = f'"$@" {redirection}'
    done = subprocess.run(
        ["sh", "-c", line, "sh", *words], capture_output=True, env=os.environ | environment, check=False
    )
    assert file.exists(), done.stderr
    assert int(file.read_text(encoding="utf-8")) > 2, "a file took the place of a standard stream"
    assert b"Traceback" not in done.stderr
    return done


@pytest.mark.parametrize(
    "redirection", [">/dev/full", ">&-", ">&- 2>&-", "<&- >&- 2>&-", ">/dev/full 2>&1", "| true", "2>&1 | true"]
)
def test_a_process_goes_on_when_its_output_takes_nothing(tmp_path: Path, redirection: str) -> None:
    assert run_program(tmp_path, redirection).returncode == 0


def test_output_is_utf8_in_any_locale(tmp_path: Path) -> None:
    ascii_locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    lines = run_program(tmp_path, "", **ascii_locale).stdout.decode().splitlines()
    assert lines[0] == "line 0 ü 字 \\ud83d"
    assert len(lines) == 3


def test_a_line_is_lost_when_its_stream_would_block() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    os.write(write, bytes(1 << 16))  # it is full now
    try:
        print("a line", file=lossy(write), flush=True)
    finally:
        os.close(read)
        os.close(write)


def test_lines_cannot_control_the_terminal_and_keep_their_styles() -> None:
    hostile = "\x1b[2J\x1b]52;c;aGk=\x07\x9b2J\u202e"
    assert without_controls(f"\x1b[1;33mred\x1b[0m\t{hostile}\r\n") == (
        "\x1b[1;33mred\x1b[0m\t\\x1b[2J\\x1b]52;c;aGk=\\x07\\x9b2J\\u202e\r\n"
    )
