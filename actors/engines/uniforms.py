"""A counter-based uniform number for each token; knows no token, and needs no torch."""

import hashlib


class Uniforms:
    """The uniform numbers in [0, 1) of one seed, one for each position."""

    __slots__ = ("_seeded",)

    def __init__(self, seed: tuple[int, ...]) -> None:
        self._seeded = hashlib.blake2b(",".join(map(str, seed)).encode(), digest_size=8)

    def at(self, position: int) -> float:
        hashed = self._seeded.copy()
        hashed.update(b"@%d" % position)
        return (int.from_bytes(hashed.digest(), "little") >> 11) * 2.0**-53
