"""Bench `delta`: learner and members with a very small model, in threads of this process, and the figures."""

from pathlib import Path

import pytest

from benchmarks.delta import bench as delta
from benchmarks.delta import learner, member
from benchmarks.delta.bench import Series
from tests.benchmarks.test_push import Here, small

__all__ = ["small"]  # a fixture


@pytest.mark.slow
def test_each_version_is_pushed_as_a_delta_and_in_full(small: tuple[Path, Path]) -> None:
    loopback = Here(member.FUNCTIONS)
    loopback.ask("open", name="loopback", address="127.0.0.1")
    config, model = small
    series = delta.compare(
        Here(learner.FUNCTIONS), {"loopback": loopback}, config, model, "127.0.0.1", lr=1e-6, updates=2
    )
    deltas, fulls = series.pushes["loopback", "delta"], series.pushes["loopback", "full"]
    assert len(deltas) == len(fulls) == len(series.snapshots) == 2
    assert all(one["bytes"] < other["bytes"] / 2 for one, other in zip(deltas, fulls, strict=True))
    assert [one["bytes"] for one in deltas] == [one["bytes"] for one in series.changes]
    assert all(0 < one["changed"] < one["bytes"] for one in series.changes)
    assert series.late["bytes"] >= max(one["bytes"] for one in deltas)


def test_the_figures_are_medians_over_the_versions() -> None:
    series = Series(
        snapshots=3 * [{"full_bytes": 1e6, "compare_cpu_s": 0.01, "snapshot_s": 0.02}],
        changes=[{"bytes": 1e4 * n, "changed": 5e3 * n} for n in (1, 2, 6)],
        late={"bytes": 1e5},
        pushes={
            ("link", "delta"): [{"seconds": s, "member_cpu_s": 0.1} for s in (0.1, 0.2, 0.4)],
            ("link", "full"): [{"seconds": 8.0, "member_cpu_s": 0.3}],
        },
    )
    found = delta.figures(series, "lr1e-6")
    assert found["delta_mb_lr1e-6"] == 0.02
    assert (found["delta_share_lr1e-6"], found["changed_share_lr1e-6"]) == (0.02, 0.02)
    assert (found["link_delta_s_lr1e-6"], found["link_full_s_lr1e-6"]) == (0.2, 8.0)
    assert [found[f"link_speedup{end}_lr1e-6"] for end in ("", "_low", "_high")] == [40.0, 20.0, 80.0]
