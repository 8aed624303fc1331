"""Which way the bytes of a push take: broadcast to the members, or copied by each out of the root's memory. No torch.

The first is "gloo", the second "shared". Where a snapshot lies is settled when it is taken, by the settings; which way
a push takes is settled when all its members have said where they are.
"""

from collections.abc import Mapping
from typing import Literal, Protocol

from areal_bus.config.sections import Config
from areal_bus.errors import PushFailed

Route = Literal["auto", "gloo", "shared"]
Home = Literal["private", "host", "device"]


class Somewhere(Protocol):
    """Where memory can be opened: equal for processes that can open each other's."""

    @property
    def device(self) -> str: ...


def home(config: Config, *, on_gpu: bool) -> Home:
    """Where the learner keeps snapshots: memory of its own, or such as others on its host or its GPU can open.

    On the GPU it takes room there, so only where generators receive there, too; by "auto" only where the topology
    leaves all of them no other GPU. From a GPU to memory of its own, which is pinned, unless "shared" is asked for.
    """
    topology, weights = config.topology, config.weights
    received_there = on_gpu and config.rollout.engine == "builtin" and weights.staging != "host"
    if weights.route == "shared":
        return "device" if received_there else "host"
    if weights.route == "gloo":
        return "private"
    if on_gpu:
        return "device" if received_there and topology.gpus_per_host == 1 and topology.ranks_per_gpu > 1 else "private"
    return "host"


def is_shared(route: Route, root: Somewhere | None, members: Mapping[str, Somewhere]) -> bool:
    """Whether this push is copied out of the root's memory; `root` is None when nobody else can open that.

    Raises PushFailed when it has to be and cannot.
    """
    if route == "gloo" or (route == "auto" and root is None):
        return False
    apart = {name: place for name, place in members.items() if place != root}
    if route == "shared" and (root is None or apart):
        where = ", ".join(f"{name} ({place})" for name, place in apart.items())
        raise PushFailed(
            f'weights.route = "shared" needs the snapshot where all members receive, on one host or one GPU: it is on '
            f'{root or "no memory to be shared"}, and {where} elsewhere; set weights.route = "auto"'
        )
    return not apart
