"""The files of one process's journal: ROLE-RANK.INC.jsonl, ROLE-RANK.INC.1.jsonl, ...; finished ones are gzipped."""

import contextlib
import gzip
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path

PIECE_BYTES = 1 << 18  # compressed at once
JOIN_S = 10.0  # longest wait for a compression at the end of a process
NAME = re.compile(r"(?P<journal>(?P<role>[a-z_]+)-(?P<rank>\d+)\.(?P<inc>\d+))(?:\.\d+)?\.jsonl(?:\.gz)?")
TIMES = re.compile(rb',"at_[^"]*":\[[0-9,]*\]')  # a key: within a text its quotes are escaped


SEGMENT_BYTES = 8 << 20  # of a file of a run's journal


@dataclass(frozen=True, slots=True)
class FileSizes:
    """A file ends at `segment_bytes` (0: never). Old ones beyond `detail_bytes` lose the times of single spans."""

    segment_bytes: int = 0
    detail_bytes: int = 0


ONE_FILE = FileSizes()


class SegmentedFile:
    """Appends lines to the newest file of a journal. Not thread-safe, except that a thread compresses."""

    def __init__(self, path: Path, sizes: FileSizes, *, may_fail: bool = False) -> None:
        """`may_fail`: as of LineFile."""
        self.path = path
        self._sizes = sizes
        self._number = newest(path)
        self._file = LineFile(segment(path, self._number), may_fail=may_fail)
        self._n_lost = 0  # of finished files
        self._packer: threading.Thread | None = None

    @property
    def n_lost(self) -> int:
        """Number of lines that could not be written."""
        return self._n_lost + self._file.n_lost

    def append(self, *lines: bytes) -> None:
        """Append lines, given without newlines, to one file."""
        self._file.append(*lines)
        if 0 < self._sizes.segment_bytes <= self._file.n_bytes:
            self._begin_next()

    def close(self) -> None:
        self._file.close()
        if self._packer is not None:
            self._packer.join(JOIN_S)

    def _begin_next(self) -> None:
        """Go on in the next file. When it cannot be opened (no descriptor, no space), the present one grows on."""
        try:
            fresh = LineFile(segment(self.path, self._number + 1))
        except OSError:
            return
        self._n_lost += self._file.n_lost
        self._file.close()
        self._file, self._number = fresh, self._number + 1
        if self._packer is not None:
            self._packer.join()
        self._packer = threading.Thread(target=self._pack_finished, args=(self._number,), daemon=True)
        self._packer.start()

    def _pack_finished(self, end: int) -> None:
        """Compress the files below `end`, also those that an earlier attempt left (a killed process, a full disk)."""
        for number in range(end):
            plain = segment(self.path, number)
            keeps_times = (number + 1) * self._sizes.segment_bytes <= self._sizes.detail_bytes
            if plain.exists():
                with contextlib.suppress(OSError):  # no space: the next finished file tries again
                    pack(plain, keeps_times=keeps_times)


def pack(plain: Path, *, keeps_times: bool) -> None:
    """Replace a finished file by its compressed form. At each moment at least one of the two is there as a whole."""
    packed = packed_name(plain)
    temporary = packed.with_name(f".{packed.name}.tmp")
    try:
        with plain.open("rb") as source, temporary.open("wb") as target:
            with gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=target, mtime=0) as out:
                while piece := source.read(PIECE_BYTES):
                    piece += source.readline()
                    out.write(piece if keeps_times else TIMES.sub(b"", piece))
            target.flush()
            os.fsync(target.fileno())
        temporary.replace(packed)
    except OSError:
        temporary.unlink(missing_ok=True)  # a full disk needs its space
        raise
    plain.unlink()


def segment(path: Path, number: int) -> Path:
    """The file of this number, as it is called before it is compressed."""
    return path.with_name(f"{path.name.removesuffix('.jsonl')}.{number}.jsonl") if number else path


def packed_name(plain: Path) -> Path:
    return plain.with_name(f"{plain.name}.gz")


def exists(path: Path, number: int) -> bool:
    plain = segment(path, number)
    return plain.exists() or packed_name(plain).exists()


def newest(path: Path) -> int:
    """The number of the newest file; 0 when there is none."""
    number = 0
    while exists(path, number + 1):
        number += 1
    return number


def open_segment(path: Path, number: int) -> BufferedIOBase:
    """A file of the journal, decompressed. Raises FileNotFoundError."""
    plain = segment(path, number)
    try:
        return plain.open("rb")
    except FileNotFoundError:  # compressed, perhaps just now
        try:
            return gzip.open(packed_name(plain), "rb")
        except FileNotFoundError:
            raise FileNotFoundError(f"no journal file {plain} or {packed_name(plain).name}") from None


def raw_lines(path: Path) -> Iterator[bytes]:
    """All lines of a journal in order, with their newlines; an incomplete one is without. It may grow meanwhile."""
    number = 0
    while True:
        with open_segment(path, number) as file:
            rest = b""
            for raw in file:
                if raw.endswith(b"\n"):
                    yield raw
                else:
                    rest = raw
            is_finished = exists(path, number + 1)
            if is_finished:  # lines may have been appended since the end was read
                rest += file.readline()
                yield from ([rest] if rest else [])
                yield from file
            elif rest:
                yield rest
        if not is_finished:
            return
        number += 1


def tail(path: Path, n_bytes: int) -> bytes:
    """At most the last `n_bytes` of a journal."""
    found = b""
    for number in reversed(range(newest(path) + 1)):
        with open_segment(path, number) as file:
            found = file.read()[-n_bytes:] + found if isinstance(file, gzip.GzipFile) else _end(file, n_bytes) + found
        if len(found) >= n_bytes:
            break
    return found[-n_bytes:]


def _end(file: BufferedIOBase, n_bytes: int) -> bytes:
    file.seek(max(0, file.seek(0, os.SEEK_END) - n_bytes))
    return file.read()


class LineFile:
    """Appends lines to a file, one write per `append`; unwritable lines are lost, the first loss is reported."""

    def __init__(self, path: Path, *, may_fail: bool = False) -> None:
        """Raises OSError when it cannot be opened; with `may_fail` each `append` tries again, and loses its lines."""
        self.path = path
        self.n_lost = self.n_bytes = 0
        self._is_torn = False  # the last line is incomplete
        self._file: int | None = None
        self.close: Callable[[], object] = lambda: None
        try:
            self._open()
        except OSError:
            if not may_fail:
                raise

    def _open(self) -> int:
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        closing = weakref.finalize(self, os.close, file)
        closing.atexit = False  # the system closes it; until then other threads may append
        self._file, self.close = file, closing
        self.n_bytes = size = os.fstat(file).st_size
        self._is_torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        return file

    def append(self, *lines: bytes) -> None:
        """Append lines, given without newlines. After an incomplete line they start on a new line."""
        try:
            file = self._open() if self._file is None else self._file
            data = b"\n".join((b"", *lines, b"") if self._is_torn else (*lines, b""))
            n_written = os.write(file, data)
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
