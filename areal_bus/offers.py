"""What a generator held when its head was gone, for the next head to lease again; knows no bus and no engine.

A head that comes back knows prompts and verdicts, no leases: what was sampled of them until then would be lost. It is
offered once the next term has said what of it counts.
"""

from collections.abc import Iterable

from areal_bus.frontier import newest
from areal_bus.messages import Partial
from areal_bus.timeline import Timeline


class Offers:
    """Samples under way, as of the last head; nothing of a newer one is among them."""

    def __init__(self) -> None:
        self._held: list[Partial] = []
        self._timeline = Timeline()

    def keep(self, held: Iterable[Partial], timeline: Timeline) -> None:
        """`timeline` is where they were made. What was kept before stays when nothing has come since."""
        if fresh := list(held):
            self._held, self._timeline = fresh, timeline

    def take(self, term: int, base: int) -> list[Partial]:
        """A term begins at version `base`: those that are valid in it. Afterwards nothing is kept."""
        held, self._held = self._held, []
        is_next = self._timeline.begin(term, base)
        return [partial for partial in held if is_next and self._timeline.keeps(newest(partial))]
