"""A counter-based uniform number for each token; knows no token, and needs no torch."""

import hashlib
import struct

N = 8  # numbers of one digest


class Uniforms:
    """The uniform numbers in [0, 1) of one seed, one for each position."""

    __slots__ = ("_at", "_numbers", "_seeded")

    def __init__(self, seed: tuple[int, ...]) -> None:
        self._seeded = hashlib.blake2b(",".join(map(str, seed)).encode(), digest_size=8 * N)
        self._at: int | None = None  # the last digest that was made, as one comes after the other
        self._numbers: tuple[int, ...] = ()

    def at(self, position: int) -> float:
        which, place = divmod(position, N)
        if which != self._at:
            hashed = self._seeded.copy()
            hashed.update(b"@%d" % which)
            self._at, self._numbers = which, struct.unpack("<8Q", hashed.digest())
        return (self._numbers[place] >> 11) * 2.0**-53

    def run(self, first: int, n: int) -> list[float]:
        """Those of n positions."""
        return [self.at(position) for position in range(first, first + n)]
