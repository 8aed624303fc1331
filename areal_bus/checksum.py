"""The checksum of one tensor's bytes: as fast as memory, and it sees what a wrong offset does; knows no tensor's name.

The bytes are rows of LANE_BYTES; each word of a row has its own lane, which is a polynomial of that lane's words
modulo 2^32: one multiply-add a word, in vectors. The CRC-32 of the lanes is the checksum. Words that changed places
have another lane, or another power of the factor; a plain sum would not see them. Nothing here withstands an attacker.
"""

import zlib

import torch
from torch import Tensor

LANE_BYTES = 1 << 17  # the lanes stay in the cache
WORD = 4  # bytes
FACTOR = 1664525  # 5 modulo 8: its powers repeat after 2^30 only


class Checksum:
    """Of bytes that come in pieces, cut anywhere."""

    def __init__(self) -> None:
        self._lanes = torch.zeros(LANE_BYTES // WORD, dtype=torch.int32)
        self._n_words = 0
        self._rest = b""  # of a word that is not complete

    def add(self, piece: Tensor) -> None:
        """`piece` is (n,) uint8 in host memory."""
        if self._rest or piece.storage_offset() % WORD:  # cut within a word: only buckets of odd sizes do that
            raw = self._rest + piece.numpy().tobytes()
            piece = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else piece
        whole = piece.numel() // WORD * WORD
        self._rest = piece[whole:].numpy().tobytes()
        self._fold(piece[:whole].view(torch.int32))

    def value(self) -> int:
        """Of all that came; an incomplete word at the end counts as if zeros followed."""
        if self._rest:
            last, self._rest = self._rest.ljust(WORD, b"\0"), b""
            self._fold(torch.frombuffer(bytearray(last), dtype=torch.int32))
        return zlib.crc32(self._lanes[: self._n_words].numpy().data)

    def _fold(self, words: Tensor) -> None:
        """Each word to its lane."""
        n_lanes = len(self._lanes)
        first = self._n_words % n_lanes
        head = min(-first % n_lanes, len(words))  # to the end of the row that has begun
        self._n_words += len(words)
        if head:
            lanes = self._lanes[first : first + head]
            torch.add(words[:head], lanes, alpha=FACTOR, out=lanes)
        for row in torch.split(words[head:], n_lanes):
            lanes = self._lanes[: len(row)]
            torch.add(row, lanes, alpha=FACTOR, out=lanes)


def checksum(bytes_N: Tensor) -> int:
    """Of (N,) uint8 in host memory."""
    whole = Checksum()
    whole.add(bytes_N)
    return whole.value()
