"""An append-only file of lines: one write per append. Written lines survive kill -9 of the process."""

import os
import sys
import weakref
from pathlib import Path


class LineFile:
    """Appends lines to a file, one write per `append`. Unwritable lines are lost; the first loss is reported.

    The descriptor is closed by `close`, or with the object.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.n_lost = 0
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        self.close = weakref.finalize(self, os.close, self._file)
        self.close.atexit = False  # the system closes it; until then other threads may append
        size = os.fstat(self._file).st_size
        self.n_bytes = size
        self._is_torn = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"  # the last line is incomplete

    def append(self, *lines: bytes) -> None:
        """Append lines, given without newlines. After an incomplete line they start on a new line."""
        data = b"\n".join((b"", *lines, b"") if self._is_torn else (*lines, b""))
        try:
            n_written = os.write(self._file, data)
        except OSError as error:
            self._lose(len(lines), os.strerror(error.errno or 0))
            return
        self.n_bytes += n_written
        n_ends = data.count(b"\n", n_written)
        self._is_torn = n_ends > 0 and data[n_written - 1 : n_written] != b"\n"
        if n_ends:
            self._lose(n_ends, "no space is left on the device")

    def _lose(self, n_lines: int, why: str) -> None:
        is_first, self.n_lost = not self.n_lost, self.n_lost + n_lines
        if is_first:
            print(f"warning: {self.path.name} loses lines: {why}", file=sys.stderr, flush=True)
