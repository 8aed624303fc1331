"""A generator is killed after a weight swap; another one continues its reported samples. Real processes."""

from pathlib import Path

import pytest

from tests.faults.ring import Ring


@pytest.mark.soak
def test_partials_of_a_killed_generator_are_continued_by_another(tmp_path: Path) -> None:
    options = ("run.total_train_steps=6", "rollout.report_tokens=2", "rollout.max_head_offpolicyness=2")
    ring = Ring(tmp_path / "ring", *options)
    with ring.started():
        ring.throttle(0.1)
        ring.hold_learner(2)
        ring.wait_for("member", name="generator-0.0", state="healthy", version=2)
        death = ring.kill("generator-0")

        def handed() -> list[dict[str, object]]:
            leases = ring.lines("lease", role="head", after=death.t, holder="generator-1.0")
            return [line for line in leases if line.get("n_done", 0)]

        ring.wait_until(lambda: bool(handed()), "a lease hands on what was done")
        ids = {"uid": handed()[0]["uid"], "attempt": handed()[0]["attempt"]}
        ring.wait_for("completion", role="generator", **ids)
        ring.throttle(None)
        ring.hold_learner(None)
        ring.finish()
        ring.check_survived()
        begun = ring.lines("request", role="generator", **ids)
        assert sum(line.get("n_done", 0) for line in begun) == handed()[0]["n_done"]
        print("handed on:", [(line["uid"], line["n_done"]) for line in handed()])
