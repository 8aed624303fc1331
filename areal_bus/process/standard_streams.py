"""Standard streams that never fail, and UTF-8 mode: a broken stream costs a line, never the process's work."""

import io
import locale
import os
import re
import sys
from typing import Any

from areal_bus.foreign_text import printable

UTF8 = ("utf-8", "utf8")
STYLE = re.compile(r"(\x1b\[[0-9;]*m|[\r\t])")  # colours of our own lines and of logs, and the bars of user code


class LossyFile(io.FileIO):
    """A descriptor whose unwritable bytes are lost: no space, no reader, or one that would block."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or memoryview(data).nbytes
        except OSError:
            return memoryview(data).nbytes


class PrintableText(io.TextIOWrapper):
    """Text without sequences that control a terminal, styles excepted: a line may quote a model, a user or a peer."""

    def write(self, text: str) -> int:
        """Write the text with escapes in place of other control characters."""
        super().write(without_controls(text))
        return len(text)


def without_controls(text: str) -> str:
    """The text with escapes in place of control characters. Line breaks, tabs, carriage returns and styles stay."""
    if text.isprintable():
        return text
    parts = STYLE.split(text)
    return "".join(part if at % 2 else printable(part) for at, part in enumerate(parts))


def secure() -> None:
    """Open missing streams on /dev/null; print() and logs lose what streams refuse. Call first. Replaced ones stay."""
    open_missing()
    if sys.stdout is sys.__stdout__:
        sys.stdout = lossy(1)
    if sys.stderr is sys.__stderr__:
        sys.stderr = lossy(2)


def lossy(descriptor: int) -> io.TextIOWrapper:
    """A text stream that writes whole lines to the descriptor, and never raises."""
    binary = io.BufferedWriter(LossyFile(descriptor, "wb", closefd=False))
    return PrintableText(binary, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def open_missing() -> None:
    """Open closed standard descriptors on /dev/null: the next file that is opened would take their place."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free one


def restart_in_utf8_mode() -> None:
    """Replace this process by itself in UTF-8 mode if its locale has another encoding."""
    if not sys.flags.utf8_mode and locale.getencoding().lower() not in UTF8:
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
