"""Checksum of a tensor's bytes: runs at memory speed and detects wrong offsets. No protection against attackers.

The bytes form rows of LANE_BYTES. Each word of a row belongs to a lane; a lane is a polynomial of its words modulo 2^32
(one vectorised multiply-add for each word). The checksum is the CRC-32 of the lanes. Swapped words change their lane or
their power of the factor, which a plain sum does not detect. On CUDA, where each operation costs a kernel launch, many
rows are folded at once with powers of the factor; the result is the same. On a CPU the checksum is computed during the
copy, in C (native/copy_checksum.c) if a compiler is available.
"""

import ctypes
import zlib
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from areal_bus import native

LANE_BYTES = 1 << 15  # the lanes fit into a near cache
WORD = 4  # bytes
N_LANES = LANE_BYTES // WORD
FACTOR = 1664525  # 5 modulo 8: its powers have the period 2^30
ROWS_AT_ONCE = 1024  # on a device: 32 MiB, and the same for the products
CPU = torch.device("cpu")
PIECE_BYTES = 1 << 20  # copied at once by torch, and summed while in cache
_COUNT, _POINTER, _WORD = ctypes.c_int64, ctypes.c_void_p, ctypes.c_uint32

CopyFunction = Callable[[int, int, int, int, int, int, int], None]  # see native/copy_checksum.c


class Checksum:
    """Incremental checksum of bytes that arrive in pieces of any size."""

    def __init__(self, device: torch.device = CPU, *, rows_at_once: int = 0) -> None:
        """Pieces are on `device`. `rows_at_once`: rows that are folded together (0: chosen by device)."""
        self._lanes = torch.zeros(N_LANES, dtype=torch.int32, device=device)
        self._on_host = self._lanes.numpy() if device.type == "cpu" else None
        self._rows_at_once = rows_at_once or (1 if device.type == "cpu" else ROWS_AT_ONCE)
        self._n_words = 0
        self._rest = b""  # bytes of an incomplete word

    def add(self, piece: Tensor) -> None:
        """`piece` is (n,) uint8."""
        if self._rest or piece.storage_offset() % WORD:  # not word-aligned: only with odd bucket sizes
            raw = self._rest + _raw(piece)
            piece = self._tensor_of(raw) if raw else piece
        whole = piece.numel() // WORD * WORD
        self._rest = _raw(piece[whole:])
        self._fold(piece[:whole].view(torch.int32))

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy (n,) contiguous numbers, converted if needed, and add the target's bytes (on this device)."""
        copy_and_sum = None if self._rest else _copy_function(source, target)
        if copy_and_sum is None:
            is_cached = not (self._lanes.is_cuda or source.is_cuda)
            n = max(1, PIECE_BYTES // target.itemsize if is_cached else len(target))
            for part, copied in zip(torch.split(source, n), torch.split(target, n), strict=True):
                copied.copy_(part)
                self.add(copied.view(torch.uint8))
            return
        n_words, lanes = target.nbytes // WORD, self._lanes
        first = self._n_words % N_LANES
        copy_and_sum(n_words, source.data_ptr(), target.data_ptr(), first, N_LANES, FACTOR, lanes.data_ptr())
        self._n_words += n_words
        n = n_words * WORD // target.itemsize
        if n < target.numel():  # the rest after the last whole word
            target[n:].copy_(source[n:])
            self.add(target[n:].view(torch.uint8))

    def value(self) -> int:
        """Checksum of all bytes so far; an incomplete last word is padded with zeros."""
        if self._rest:
            last, self._rest = self._rest.ljust(WORD, b"\0"), b""
            self._fold(self._tensor_of(last).view(torch.int32))
        lanes = self._lanes.cpu().numpy() if self._on_host is None else self._on_host
        return zlib.crc32(lanes[: self._n_words].data)

    def restart(self) -> None:
        """Reset to the empty state."""
        self._lanes[: self._n_words].zero_()
        self._n_words, self._rest = 0, b""

    def _tensor_of(self, raw: bytes) -> Tensor:
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(self._lanes.device)

    def _fold(self, words: Tensor) -> None:
        first = self._n_words % N_LANES
        head = min(-first % N_LANES, len(words))  # to the end of the current row
        self._n_words += len(words)
        if head:
            self._fold_row(words[:head], first)
        n_whole = (len(words) - head) // N_LANES * N_LANES if self._rows_at_once > 1 else 0
        if n_whole:
            for rows in torch.split(words[head : head + n_whole].view(-1, N_LANES), self._rows_at_once):
                self._fold_rows(rows)
        for row in torch.split(words[head + n_whole :], N_LANES):
            self._fold_row(row, 0)

    def _fold_row(self, row: Tensor, first: int) -> None:
        """Add a row, or part of one, to the lanes from `first` on."""
        lanes = self._lanes[first : first + len(row)]
        torch.add(row, lanes, alpha=FACTOR, out=lanes)

    def _fold_rows(self, rows_RL: Tensor) -> None:
        """Add R whole rows: lane * factor^R + sum of row_r * factor^(R - 1 - r), equal to R single steps."""
        powers_R = _powers(len(rows_RL), rows_RL.device)
        sums_L = (rows_RL * powers_R.unsqueeze(1)).sum(0, dtype=torch.int32)
        torch.add(sums_L, self._lanes, alpha=_as_int32(pow(FACTOR, len(rows_RL), 1 << 32)), out=self._lanes)


def prepare() -> None:
    """Compile the C functions in advance."""
    _function("copy_and_sum")


def checksum(bytes_N: Tensor) -> int:
    """Checksum of (N,) uint8."""
    whole = Checksum(bytes_N.device)
    whole.add(bytes_N)
    return whole.value()


def _copy_function(source: Tensor, target: Tensor) -> CopyFunction | None:
    """The C function that copies these tensors in one pass; None if torch has to."""
    kinds, on_cpu = (source.dtype, target.dtype), source.device.type == target.device.type == "cpu"
    if not (on_cpu and source.is_contiguous() and target.is_contiguous() and source.data_ptr() % WORD == 0):
        return None
    if kinds == (torch.float32, torch.bfloat16):
        return _function("copy_and_sum_rounded")
    if kinds[0] == kinds[1] and target.data_ptr() % WORD == 0:
        return _function("copy_and_sum")
    return None


@cache
def _function(name: str) -> CopyFunction | None:
    """A function of native/copy_checksum.c; None without a compiler."""
    folder = Path(native.__file__).parent
    if native.library(folder) is None:
        return None
    return native.function(folder, name, _COUNT, _POINTER, _POINTER, _COUNT, _COUNT, _WORD, _POINTER)


def _raw(piece: Tensor) -> bytes:
    return bytes(piece.cpu().numpy().tobytes())


def _as_int32(number: int) -> int:
    """A number below 2^32 as the int32 with the same bits."""
    return number - (1 << 32) if number >> 31 else number


@lru_cache(maxsize=8)
def _powers(n: int, device: torch.device) -> Tensor:
    """factor^(n - 1), ..., factor, 1."""
    numbers = [_as_int32(pow(FACTOR, n - 1 - row, 1 << 32)) for row in range(n)]
    return torch.tensor(numbers, dtype=torch.int32, device=device)
