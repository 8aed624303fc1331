"""Recovery times of `benchmarks faults`, from journals written by hand."""

from typing import Any

from areal_bus.messages import Role
from benchmarks.faults.recovery import detections, lease_recoveries, returns, score_recoveries
from benchmarks.jobs.real_job import Kill

Line = dict[str, Any]
G0, R0 = Kill(Role.GENERATOR, "generator-0.0", 10.0), Kill(Role.REWARD, "reward-0.0", 10.0)


def line(t: float, event: str, **fields: Any) -> Line:
    return {"t": t, "event": event, **fields}


def lease(t: float, uid: int, holder: str, attempt: int = 0) -> Line:
    return line(t, "lease", uid=uid, attempt=attempt, holder=holder)


def sample(t: float, event: str, uid: int) -> Line:
    return line(t, event, uid=uid, attempt=0, sample=0)


def test_a_kill_is_detected_by_a_death_or_by_the_next_incarnation() -> None:
    dead = line(12.0, "member", name="generator-0.0", state="dead")
    joined = line(11.0, "joined", name="generator-0.1")
    others = [line(10.5, "member", name="generator-1.0", state="dead"), line(10.6, "joined", name="reward-0.1")]
    early = line(9.0, "member", name="generator-0.0", state="dead")
    assert list(detections([early, *others, joined, dead], [G0])) == [1.0]
    assert list(detections([*others, dead], [G0])) == [2.0]
    assert list(detections(others, [G0])) == []


def test_a_lost_lease_is_recovered_by_the_next_one_and_needs_none_when_it_is_complete() -> None:
    lines = [
        lease(1.0, 0, "generator-0.0"),
        lease(1.1, 1, "generator-0.0"),
        lease(1.2, 2, "generator-0.0"),
        lease(1.3, 3, "generator-1.0"),
        lease(1.4, 4, "generator-1.0"),
        lease(2.0, 4, "generator-0.0", attempt=1),
        line(9.0, "ready", uid=1),
        line(10.1, "ready", uid=2),  # by verdicts that were under way
        lease(10.5, 0, "generator-1.0", attempt=1),
        lease(11.0, 3, "generator-1.0", attempt=1),
        lease(13.0, 4, "generator-1.0", attempt=2),
    ]
    assert list(lease_recoveries(lines, [G0])) == [0.5, 3.0]
    assert list(lease_recoveries([*lines[:8], line(10.2, "term"), *lines[8:]], [G0])) == []


def test_a_sample_at_a_dead_reward_is_recovered_by_its_verdict() -> None:
    lines = [
        sample(1.0, "sampled", 2),
        line(2.0, "joined", name="reward-1.0"),
        *(sample(3.0, "sampled", uid) for uid in (4, 5, 6, 8)),
        sample(4.0, "scored", 6),
        *(sample(12.0 + uid, "scored", uid) for uid in (2, 4, 5, 8)),
    ]
    scores = [{**sample(9.0, "score", 8), "rank": 0, "inc": 0}]  # judged, and the head did not hear of it in time
    assert list(score_recoveries(lines, scores, [R0], n_rewards=2)) == [6.0]


def test_a_learner_is_back_with_the_first_update_of_its_term() -> None:
    lines = [line(9.0, "update"), line(11.0, "update"), line(14.0, "term"), line(16.5, "update")]
    assert list(returns(lines, [Kill(Role.LEARNER, "learner-0.0", 10.0)])) == [6.5]
