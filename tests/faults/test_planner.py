"""A real job that starts with the wrong split ends with the right one, by the decision of its planner."""

from pathlib import Path
from statistics import median

import pytest

from tests.faults.ring import ROOT, Ring

pytestmark = pytest.mark.soak

CONFIG = ROOT / "configs" / "adaptive.toml"
N_STEPS = 24


def test_a_job_with_too_few_learners_finds_its_split(tmp_path: Path) -> None:
    """One learner trains 800 tokens a second, and six generators sample far more: a third of the ranks is to learn."""
    changes = (
        f"run.total_train_steps={N_STEPS}",
        "data.batch_size=8",
        "topology.adapt.every_steps=5",
        "launch.max_restarts=0",
    )
    ring = Ring(tmp_path, *changes, ranks=8, config=CONFIG, bootstrap="env")
    with ring.started():
        ring.wait_for("update", version=2)
        ring.wait_for("split", why="change")
        ring.finish()
    ring.check_survived()
    wanted = ring.lines("adapt", role="head")
    splits = [line["learners"] for line in ring.lines("split", role="head")]
    ring.check(splits[0] == 1 and splits[-1] in (2, 3, 4), f"the last split has 2 to 4 learners: {splits}")
    ring.check(len(splits) <= 4, f"no flapping: {splits}")
    ring.check(any("predicted" in line for line in wanted), "the decision is in the journal")
    ends = {line["version"]: line["t"] for line in ring.lines("update", role="head")}
    change = next(line["version"] for line in ring.lines("split", role="head") if line["why"] == "change")
    before = median(ends[v] - ends[v - 1] for v in range(3, change + 1))
    after = median(ends[v] - ends[v - 1] for v in range(N_STEPS - 4, N_STEPS + 1))
    ring.check(after < 0.7 * before, f"updates are faster than {before:.2f} s: {after:.2f} s")
