"""Which way the bytes of a push take: by the settings, and by where root and members say they are."""

from typing import Any

import pytest

from areal_bus.config.sections import Config
from areal_bus.errors import PushFailed
from areal_bus.weights.route import Route, home, is_shared
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
    ("route", "root", "members", "expected"),
    [
        ("auto", CPU, [CPU, CPU], True),
        ("auto", CPU, [CPU, GPU], False),
        ("auto", CPU, [CPU, OTHER_HOST], False),
        ("auto", CPU, [OTHER_USER], False),
        ("auto", GPU, [GPU, GPU], True),
        ("auto", GPU, [GPU, OTHER_GPU], False),
        ("auto", GPU, [GPU, CPU], False),
        ("auto", None, [GPU], False),
        ("auto", None, [CPU], False),
        ("gloo", GPU, [GPU], False),
        ("shared", CPU, [CPU, MemoryPlace("one", "cpu", "another name")], True),
        ("shared", GPU, [GPU, MemoryPlace("one", "GPU-1", "another name")], True),
    ],
)
def test_weights_are_shared_exactly_where_the_route_and_all_members_allow_it(
    route: Route, root: MemoryPlace | None, members: list[MemoryPlace], expected: bool
) -> None:
    assert is_shared(route, root, dict(zip("xyz", members, strict=False))) is expected


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
