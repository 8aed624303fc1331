"""The checksum of one tensor's bytes: as fast as memory, and it sees what a wrong offset does; knows no tensor's name.

The bytes are rows of LANE_BYTES; each word of a row has its own lane, which is a polynomial of that lane's words
modulo 2^32: one multiply-add a word, in vectors. The CRC-32 of the lanes is the checksum. Words that changed places
have another lane, or another power of the factor; a plain sum would not see them. Nothing here withstands an attacker.
Where each operation costs a launch (CUDA), many rows are folded at once: the same sum, by powers of the factor. On a
CPU bytes are summed up as they are copied, by C (native/brought.c) where there is a compiler.
"""

import ctypes
import zlib
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from areal_bus import native

LANE_BYTES = 1 << 15  # the lanes stay in a near cache, and each tensor ends with the CRC of them
WORD = 4  # bytes
N_LANES = LANE_BYTES // WORD
FACTOR = 1664525  # 5 modulo 8: its powers repeat after 2^30 only
ROWS_AT_ONCE = 1024  # on a device: 32 MiB, and as much for their products
CPU = torch.device("cpu")
PIECE_BYTES = 1 << 20  # copied at a time by torch, and summed up while they are in a cache
_COUNT, _POINTER, _WORD = ctypes.c_int64, ctypes.c_void_p, ctypes.c_uint32

OnePass = Callable[[int, int, int, int, int, int, int], None]  # see native/brought.c


class Checksum:
    """Of bytes that come in pieces, cut anywhere."""

    def __init__(self, device: torch.device = CPU, *, rows_at_once: int = 0) -> None:
        """Pieces are on `device`; `rows_at_once` is how many rows are folded together (0: as suits the device)."""
        self._lanes = torch.zeros(N_LANES, dtype=torch.int32, device=device)
        self._on_host = self._lanes.numpy() if device.type == "cpu" else None
        self._rows_at_once = rows_at_once or (1 if device.type == "cpu" else ROWS_AT_ONCE)
        self._n_words = 0
        self._rest = b""  # of a word that is not complete

    def add(self, piece: Tensor) -> None:
        """`piece` is (n,) uint8."""
        if self._rest or piece.storage_offset() % WORD:  # cut within a word: only buckets of odd sizes do that
            raw = self._rest + _raw(piece)
            piece = self._brought(raw) if raw else piece
        whole = piece.numel() // WORD * WORD
        self._rest = _raw(piece[whole:])
        self._fold(piece[:whole].view(torch.int32))

    def bring(self, source: Tensor, target: Tensor) -> None:
        """Copy (n,) numbers to (n,) of perhaps another type, and add the bytes that are there afterwards.

        Both are contiguous; `target` is on this sum's device.
        """
        in_one_pass = None if self._rest else _one_pass(source, target)
        if in_one_pass is None:
            is_cached = not (self._lanes.is_cuda or source.is_cuda)
            n = max(1, PIECE_BYTES // target.itemsize if is_cached else len(target))
            for given, here in zip(torch.split(source, n), torch.split(target, n), strict=True):
                here.copy_(given)
                self.add(here.view(torch.uint8))
            return
        n_words, lanes = target.nbytes // WORD, self._lanes
        first = self._n_words % N_LANES
        in_one_pass(n_words, source.data_ptr(), target.data_ptr(), first, N_LANES, FACTOR, lanes.data_ptr())
        self._n_words += n_words
        n = n_words * WORD // target.itemsize
        if n < target.numel():  # half a word, or bytes
            target[n:].copy_(source[n:])
            self.add(target[n:].view(torch.uint8))

    def value(self) -> int:
        """Of all that came; an incomplete word at the end counts as if zeros followed."""
        if self._rest:
            last, self._rest = self._rest.ljust(WORD, b"\0"), b""
            self._fold(self._brought(last).view(torch.int32))
        lanes = self._lanes.cpu().numpy() if self._on_host is None else self._on_host
        return zlib.crc32(lanes[: self._n_words].data)

    def restart(self) -> None:
        """As if nothing had come."""
        self._lanes[: self._n_words].zero_()
        self._n_words, self._rest = 0, b""

    def _brought(self, raw: bytes) -> Tensor:
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(self._lanes.device)

    def _fold(self, words: Tensor) -> None:
        """Each word to its lane."""
        first = self._n_words % N_LANES
        head = min(-first % N_LANES, len(words))  # to the end of the row that has begun
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
        """A row, or a part of one: the lanes from `first` on."""
        lanes = self._lanes[first : first + len(row)]
        torch.add(row, lanes, alpha=FACTOR, out=lanes)

    def _fold_rows(self, rows_RL: Tensor) -> None:
        """R whole rows: lane * factor^R + the sum of row_r * factor^(R - 1 - r), as R single steps come to."""
        powers_R = _powers(len(rows_RL), rows_RL.device)
        sums_L = (rows_RL * powers_R.unsqueeze(1)).sum(0, dtype=torch.int32)
        torch.add(sums_L, self._lanes, alpha=_wrapped(pow(FACTOR, len(rows_RL), 1 << 32)), out=self._lanes)


def prepare() -> None:
    """Compile what there is to compile, before anybody waits for a sum."""
    _function("brought")


def checksum(bytes_N: Tensor) -> int:
    """Of (N,) uint8."""
    whole = Checksum(bytes_N.device)
    whole.add(bytes_N)
    return whole.value()


def _one_pass(source: Tensor, target: Tensor) -> OnePass | None:
    """What brings such tensors in one pass; None where torch has to."""
    kinds, on_cpu = (source.dtype, target.dtype), source.device.type == target.device.type == "cpu"
    if not (on_cpu and source.is_contiguous() and target.is_contiguous() and source.data_ptr() % WORD == 0):
        return None
    if kinds == (torch.float32, torch.bfloat16):
        return _function("brought_rounded")
    if kinds[0] == kinds[1] and target.data_ptr() % WORD == 0:
        return _function("brought")
    return None


@cache
def _function(name: str) -> OnePass | None:
    """Of native/brought.c."""
    folder = Path(native.__file__).parent
    if native.library(folder) is None:
        return None
    return native.function(folder, name, _COUNT, _POINTER, _POINTER, _COUNT, _COUNT, _WORD, _POINTER)


def _raw(piece: Tensor) -> bytes:
    return bytes(piece.cpu().numpy().tobytes())


def _wrapped(number: int) -> int:
    """Below 2^32, as the int32 of the same bits."""
    return number - (1 << 32) if number >> 31 else number


@lru_cache(maxsize=8)
def _powers(n: int, device: torch.device) -> Tensor:
    """factor^(n - 1), ..., factor, 1."""
    numbers = [_wrapped(pow(FACTOR, n - 1 - row, 1 << 32)) for row in range(n)]
    return torch.tensor(numbers, dtype=torch.int32, device=device)
