"""Row 5 with two rewards: samples of a killed or stopped reward are scored by the other one."""

import signal
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.faults.ring import Fault, Line, Ring, parent_of

pytestmark = pytest.mark.soak

HEARTBEAT_S, SILENT_S = 0.5, 1.5  # as in ring.toml
SLACK_S = 1.5  # that a loaded machine takes to see what is due
ELSEWHERE_S = 5.0
REWARDS = ("reward-0", "reward-1")

Key = tuple[int, int, int]  # uid, sample, attempt


@dataclass(frozen=True)
class FailedReward:
    """A reward that was killed or stopped while scoring, and its samples at that time."""

    fault: Fault
    held: set[Key]
    other: str  # the reward that was there beside it
    worker: int  # the process that scores for it, and does not come to an end


@dataclass(frozen=True)
class Rewards:
    ring: Ring
    killed: FailedReward
    stopped: FailedReward
    resumed: float


@pytest.fixture(scope="module")
def rewards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rewards]:
    changes = ("topology.rewards=2", "run.total_train_steps=8", "reward.timeout_s=100")
    ring = Ring(tmp_path_factory.mktemp("rewards"), *changes, ranks=5)
    ring.hold_learner(2)
    with ring.started():
        ring.wait_for("update", version=2)
        killed = fail_reward(ring, 3, signal.SIGKILL)
        ring.wait_for("member", name=killed.fault.next, state="healthy")
        stopped = fail_reward(ring, 4, signal.SIGSTOP)
        resumed = ring.resume_process(stopped.fault.pid)
        ring.kill_process(stopped.worker)
        ring.wait_for("refused", after=resumed, what="Scored", sender=stopped.fault.name)
        ring.hold_learner(None)
        ring.finish()
        ring.check_survived()
        yield Rewards(ring, killed, stopped, resumed)


def fail_reward(ring: Ring, version: int, number: signal.Signals) -> FailedReward:
    """Kill or stop a reward that holds samples of prompts admitted after this version; returns when they are scored."""
    ring.wait_until(
        lambda: all_are_sampled(ring) and not unscored(ring), "every sample is scored while the learner is held"
    )
    began = ring.lines(role="head")[-1]["t"]
    ring.set_failpoint("score", "sleep")
    ring.hold_learner(version)
    worker = ring.wait_for_failpoint("score", after=began).pid
    who = next(name for name in REWARDS if ring.actor(name)[0] in ancestors(worker))
    other = ring.actor(next(name for name in REWARDS if name != who))[1]
    ring.wait_for("update", version=version)
    ring.wait_until(lambda: len(unscored(ring)) > 1 and is_at_rest(ring), f"only {who} holds samples")
    held = unscored(ring)
    fault = ring.kill(who, number)
    ring.wait_until(lambda: not unscored(ring), "what it held is scored", timeout_s=60.0)
    return FailedReward(fault, held, other, worker)


def is_at_rest(ring: Ring) -> bool:
    """All admitted prompts are sampled and all possible ones scored: each reward got every second prompt."""
    return all_are_sampled(ring) and len({uid % 2 for uid, *_ in unscored(ring)}) == 1


def all_are_sampled(ring: Ring) -> bool:
    admitted = {line["uid"] for line in ring.lines("admit", role="head")}
    sampled = [line["uid"] for line in ring.lines("sampled", role="head")]
    return all(sampled.count(uid) == 2 for uid in admitted)


def unscored(ring: Ring) -> set[Key]:
    return keys(ring.lines("completion", role="generator")) - keys(ring.lines("score", role="reward"))


def keys(lines: list[Line]) -> set[Key]:
    return {(line["uid"], line["sample"], line["attempt"]) for line in lines if not line.get("evaluation")}


def ancestors(pid: int) -> set[int]:
    found: set[int] = set()
    while pid > 1:
        found.add(pid)
        pid = parent_of(pid)
    return found


def scored_elsewhere(rewards: Rewards, failed: FailedReward) -> list[Line]:
    """The first scores of its samples."""
    lines = rewards.ring.lines("score", role="reward", after=failed.fault.t)
    mine = [line for line in lines if keys([line]) & failed.held]
    return [next(line for line in mine if keys([line]) == {key}) for key in failed.held]


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_row_05_trajectories_of_a_dead_reward_are_scored_by_the_other_one(rewards: Rewards, how: str) -> None:
    """Scored within 5 s, each with a value: none is refunded or sampled again."""
    ring, failed = rewards.ring, getattr(rewards, how)
    assert len(failed.held) > 1
    for line in scored_elsewhere(rewards, failed):
        assert f"reward-{line['rank']}.{line['inc']}" == failed.other
        assert line["status"] == "value"
        assert line["t"] - failed.fault.t < ELSEWHERE_S
    uids = {uid for uid, *_ in failed.held}
    assert {line["uid"] for line in ring.lines("ready", role="head")} >= uids
    assert not [line for line in ring.lines("refund", role="head") if line["uid"] in uids]
    assert len([line for line in ring.lines("lease", role="head") if line["uid"] in uids]) == len(uids)


def test_row_05_a_reward_that_is_gone_or_silent_is_noticed_within_three_heartbeats(rewards: Rewards) -> None:
    for failed in (rewards.killed, rewards.stopped):
        dead = rewards.ring.lines("member", role="head", name=failed.fault.name, state="dead")[0]
        assert dead["t"] - failed.fault.t <= 3 * HEARTBEAT_S + SLACK_S
    assert dead["t"] - rewards.stopped.fault.t >= SILENT_S - HEARTBEAT_S


def test_row_05_verdicts_of_a_reward_that_goes_on_are_refused_where_others_were_first(rewards: Rewards) -> None:
    """In the same incarnation; each sample is trained once, with its first verdict."""
    ring, failed = rewards.ring, rewards.stopped
    refused = ring.lines("refused", role="head", after=rewards.resumed, what="Scored", sender=failed.fault.name)
    assert keys(refused) & failed.held
    assert ring.lines("member", role="head", name=failed.fault.name, after=rewards.resumed)[0]["state"] == "healthy"
    assert not ring.lines("joined", role="head", name=failed.fault.next)
