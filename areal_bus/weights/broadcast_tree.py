"""A tree of process groups: a member relays each bucket to its own group, so that no group grows with the view.

Rank 0 is the root of a push. Rank r sends to the ranks FAN_OUT * r + 1 to FAN_OUT * r + FAN_OUT. So a view of up to
FAN_OUT members is one group. A group connects each of its processes with each other one.
"""

from dataclasses import dataclass

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from areal_bus.weights.process_group import PushGroup, StoreListener, meet, retire
from areal_bus.weights.waits import PushWaits

FAN_OUT = 32
MAX_TREES = 4  # for the view of the ring and a few catch-up pushes


def sender_to(rank: int) -> int:
    """The rank that sends to this one, which is not 0."""
    return (rank - 1) // FAN_OUT


def receivers_of(rank: int, size: int) -> range:
    """The ranks that this one sends to, in a tree of `size` ranks."""
    first = FAN_OUT * rank + 1
    return range(first, max(first, min(first + FAN_OUT, size)))


@dataclass(frozen=True, slots=True)
class BroadcastTree:
    """The groups of one rank."""

    name: str
    size: int
    above: PushGroup | None  # it receives in this one; None at the root
    below: PushGroup | None  # it sends in this one; None at a rank without receivers

    def check(self) -> None:
        """Raises RuntimeError when an operation in flight has failed."""
        for group in self._groups():
            group.check()

    def retire(self) -> None:
        """Drop the groups."""
        for group in self._groups():
            retire(group)

    def _groups(self) -> list[PushGroup]:
        return [group for group in (self.above, self.below) if group is not None]


def meet_tree(
    name: str, store: TCPStore, waits: PushWaits, *, rank: int, size: int, listener: StoreListener
) -> BroadcastTree:
    """Build the groups of this rank; every rank calls it. Raises as `meet`.

    Each rank first meets its sender, so the groups are built from the root downwards.
    """

    def group(sender: int, rank_in_it: int) -> PushGroup:
        n = 1 + len(receivers_of(sender, size))
        return meet(f"{name}/{sender}", store, waits, rank=rank_in_it, size=n, listener=listener)

    above = group(sender_to(rank), (rank - 1) % FAN_OUT + 1) if rank else None
    below = group(rank, 0) if receivers_of(rank, size) else None
    return BroadcastTree(name, size, above, below)


class BroadcastTrees:
    """Trees of the most recent views."""

    def __init__(self) -> None:
        self._by_view: dict[int, BroadcastTree] = {}

    def of_view(self, view: int) -> BroadcastTree | None:
        return self._by_view.get(view)

    def keep(self, view: int, tree: BroadcastTree) -> None:
        self._by_view[view] = tree
        while len(self._by_view) > MAX_TREES:
            self.drop_view(next(iter(self._by_view)))

    def drop_view(self, view: int) -> None:
        tree = self._by_view.pop(view, None)
        if tree is not None:
            tree.retire()

    def clear(self) -> None:
        for view in list(self._by_view):
            self.drop_view(view)
