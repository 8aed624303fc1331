"""Which term an actor works in, and what of older terms that leaves valid; knows no engine, no sample and no bus.

A term begins at the version of a checkpoint, its base: whatever later versions of older terms made is void. Versions of
different terms are never compared with each other but by that rule.
"""


class Timeline:
    """The term, and the versions of older terms that are part of its history."""

    def __init__(self) -> None:
        self.term = 0
        self._base: int | None = None  # newest version of older terms that counts; None: none does for certain

    def begin(self, term: int, base: int) -> bool:
        """A term begins at `base`; False when it is known already, or over.

        The base of a term that was missed is not known here, so then nothing older counts.
        """
        if term <= self.term:
            return False
        self._base = base if term == self.term + 1 else None
        self.term = term
        return True

    def keeps(self, newest: int | None) -> bool:
        """Whether what versions up to `newest` of older terms made is valid; None is what no version has touched."""
        return newest is None or (self._base is not None and newest <= self._base)
