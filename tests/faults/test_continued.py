"""A generator is killed after a weight swap: another one goes on from what it had reported, over real processes."""

from pathlib import Path

import pytest

from tests.faults.ring import Ring

TRIES = 6


@pytest.mark.soak
def test_what_a_killed_generator_had_reported_is_continued_by_another(tmp_path: Path) -> None:
    options = ("run.total_train_steps=30", "rollout.report_tokens=2", "rollout.max_head_offpolicyness=2")
    ring = Ring(tmp_path / "ring", *options)
    with ring.started():
        ring.slow(0.02)
        handed = None
        for n in range(TRIES):
            who = f"generator-{n % 2}"
            name = f"{who}.{n // 2}"
            ring.until("member", name=name, state="healthy")
            swapped = ring.until("member", name=name, state="healthy", n=2)
            death = ring.kill(who)
            ring.until("member", name=death.next, state="healthy", after=swapped["t"])
            handed = next((line for line in ring.lines("lease", role="head") if line.get("n_done", 0) > 0), None)
            if handed is not None:
                break
        ring.check(handed is not None, f"a lease hands on what was done, after {TRIES} deaths")
        assert handed is not None
        ids = {"uid": handed["uid"], "attempt": handed["attempt"]}
        ring.until("completion", role="generator", **ids)
        ring.slow(None)
        ring.finish()
        ring.check_survived()
        requests = [line for line in ring.lines("request", role="generator") if line.get("n_done")]
        assert sum(line["n_done"] for line in requests if line["uid"] == ids["uid"]) == handed["n_done"]
