"""Route of a push: "gloo" broadcasts the bytes; "shared" lets each member copy from the root's memory. No torch."""

from collections.abc import Mapping
from typing import Literal, Protocol

from areal_bus.config.names.engines import kind_of
from areal_bus.config.sections import Config
from areal_bus.errors import PushFailed

Route = Literal["auto", "gloo", "shared"]
Home = Literal["private", "host", "device"]


class Place(Protocol):
    """Location of memory. Processes with equal places can open each other's memory."""

    @property
    def device(self) -> str: ...


def home(config: Config, *, on_gpu: bool) -> Home:
    """Where the learner stores snapshots: private memory, or memory that others on its host or GPU can open.

    A snapshot on the GPU uses GPU memory. So it is stored there only if generators receive there as well; with "auto"
    only if the topology has a single GPU. Otherwise a learner on a GPU uses private pinned memory, unless the route is
    "shared".
    """
    topology, weights = config.topology, config.weights
    received_there = on_gpu and kind_of(config.rollout.engine).on_device and weights.staging != "host"
    if weights.route == "shared":
        return "device" if received_there else "host"
    if weights.route == "gloo":
        return "private"
    if on_gpu:
        return "device" if received_there and topology.gpus_per_host == 1 and topology.ranks_per_gpu > 1 else "private"
    return "host"


def is_shared(route: Route, root: Place | None, members: Mapping[str, Place]) -> bool:
    """Whether members copy from the root's memory (`root` None: private). Raises PushFailed if "shared" cannot."""
    if route == "gloo" or (route == "auto" and root is None):
        return False
    elsewhere = {name: place for name, place in members.items() if place != root}
    if route == "shared" and (root is None or elsewhere):
        where = ", ".join(f"{name} ({place})" for name, place in elsewhere.items())
        rule = 'weights.route = "shared" needs the snapshot where all members receive, on one host or one GPU'
        there = f"it is on {root or 'private memory'}, and {where} elsewhere"
        raise PushFailed(f'{rule}: {there}; set weights.route = "auto"')
    return not elsewhere
