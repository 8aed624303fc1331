"""A file that lines are appended to, readable after kill -9; knows nothing of what they say."""

import os
import sys
from pathlib import Path


class LineFile:
    """One write a line. A line that the disk does not take is lost, and the run goes on; people hear of it once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.n_lost = 0
        self._is_torn = False  # the last line was written in part
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def append(self, line: bytes) -> None:
        """`line` without its end. After half a line the next one begins on a line of its own."""
        data = b"\n" + line + b"\n" if self._is_torn else line + b"\n"
        try:
            n_written = os.write(self._file, data)
        except OSError as error:
            self._lose(os.strerror(error.errno or 0))
            return
        self._is_torn = n_written < len(data)
        if self._is_torn:
            self._lose("no space is left for it")

    def close(self) -> None:
        os.close(self._file)

    def _lose(self, why: str) -> None:
        self.n_lost += 1
        if self.n_lost == 1:
            print(f"warning: {self.path.name} loses lines: {why}", file=sys.stderr, flush=True)
