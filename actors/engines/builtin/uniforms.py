"""Uniform numbers by a counter-based generator: one for each seed and position. Imports no torch."""

import hashlib
import struct

N = 8  # uniforms per digest


class Uniforms:
    """Uniform numbers in [0, 1) of one seed, one per position."""

    __slots__ = ("_at", "_numbers", "_seeded")

    def __init__(self, seed: tuple[int, ...]) -> None:
        self._seeded = hashlib.blake2b(",".join(map(str, seed)).encode(), digest_size=8 * N)
        self._at: int | None = None  # index of the cached digest: positions are read in order
        self._numbers: tuple[float, ...] = ()

    def at(self, position: int) -> float:
        which, place = divmod(position, N)
        return self._of(which)[place]

    def run(self, first: int, n: int) -> list[float]:
        """The numbers of n positions."""
        found: list[float] = []
        while len(found) < n:
            which, place = divmod(first + len(found), N)
            found += self._of(which)[place : place + n - len(found)]
        return found

    def _of(self, which: int) -> tuple[float, ...]:
        if which != self._at:
            hashed = self._seeded.copy()
            hashed.update(b"@%d" % which)
            numbers = struct.unpack("<8Q", hashed.digest())
            self._at, self._numbers = which, tuple([(number >> 11) * 2.0**-53 for number in numbers])
        return self._numbers
