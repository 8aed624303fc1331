"""Which way the bytes of a push take: by the settings, and by where root and members say they are."""

from typing import Any

import pytest

from areal_bus.config.sections import Config
from areal_bus.errors import PushFailed
from areal_bus.weights.route import home, is_shared
from areal_bus.weights.shared_memory import MemoryPlace

CPU, GPU = MemoryPlace("one", "cpu", "a"), MemoryPlace("one", "GPU-1", "a")
OTHER_GPU, OTHER_HOST, OTHER_USER = (
    MemoryPlace("one", "GPU-2", "a"),
    MemoryPlace("two", "cpu", "b"),
    MemoryPlace("one 0", "cpu", "a"),
)


def config(**sections: dict[str, Any]) -> Config:
    return Config.model_validate({"model": {"scratch": {}}, "data": {"task": "sums"}} | sections)


@pytest.mark.parametrize(
    ("root", "members", "expected"),
    [
        (CPU, [CPU, CPU], True),
        (CPU, [CPU, GPU], False),
        (CPU, [CPU, OTHER_HOST], False),
        (CPU, [OTHER_USER], False),
        (GPU, [GPU, GPU], True),
        (GPU, [GPU, OTHER_GPU], False),
        (GPU, [GPU, CPU], False),
        (None, [GPU], False),
        (None, [CPU], False),
    ],
)
def test_auto_shares_exactly_where_all_can_open_the_roots_memory(
    root: MemoryPlace | None, members: list[MemoryPlace], expected: bool
) -> None:
    assert is_shared("auto", root, dict(zip("xyz", members, strict=False))) is expected


def test_gloo_never_shares() -> None:
    assert not is_shared("gloo", GPU, {"x": GPU})


@pytest.mark.parametrize("place", [CPU, GPU])
def test_shared_memory_route_is_for_members_on_the_snapshots_host(place: MemoryPlace) -> None:
    assert is_shared("shared", place, {"x": place, "y": MemoryPlace(place.realm, place.device, "another name")})


@pytest.mark.parametrize(("root", "member"), [(CPU, OTHER_HOST), (CPU, OTHER_USER), (GPU, OTHER_GPU), (GPU, CPU)])
def test_shared_memory_route_is_refused_with_a_member_on_another_host(root: MemoryPlace, member: MemoryPlace) -> None:
    with pytest.raises(PushFailed, match=rf"on {root.device} of a, and y \({member.device} of {member.host}\) elsewh"):
        is_shared("shared", root, {"x": root, "y": member})


def test_the_snapshot_lies_where_the_settings_let_others_open_it() -> None:
    one_gpu = {"gpus_per_host": 1, "ranks_per_gpu": 2}
    for sections, on_cpu, on_gpu in (
        ({}, "host", "private"),
        ({"topology": {"gpus_per_host": 8}}, "host", "private"),
        ({"topology": one_gpu}, "host", "device"),
        ({"topology": one_gpu, "weights": {"route": "gloo"}}, "private", "private"),
        ({"topology": one_gpu, "weights": {"staging": "host"}}, "host", "private"),
        ({"topology": one_gpu, "rollout": {"engine": "sglang"}}, "host", "private"),
        ({"weights": {"route": "shared"}}, "host", "device"),
        ({"weights": {"route": "shared", "staging": "host"}}, "host", "host"),
    ):
        settings = config(**sections)
        assert (home(settings, on_gpu=False), home(settings, on_gpu=True)) == (on_cpu, on_gpu), sections
