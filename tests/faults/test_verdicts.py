"""Rows 6, 7 and 8: a reward function hangs, raises, returns no number, exits, forks or fills the disk.

One or two of each kind through a ring; tests/actors/rewards/test_pool.py has all that a function may do to its worker.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.ring import Fault, History, Line, Ring

pytestmark = pytest.mark.slow

TIMEOUT_S = 1.0
SLACK_S = 2.0
HANGS = ("sleep", "spin in C")
NUMBERS = ("nan", "explode")
LIES = ("leave", "fill")
HONEST = ("fork",)  # what it says itself counts, what its child says does not


@dataclass(frozen=True)
class Answer:
    """What became of one score."""

    fault: Fault  # the worker process
    line: Line  # its line of the reward's journal
    refund: Line | None


@dataclass(frozen=True)
class Answers:
    ring: Ring
    by_trick: dict[str, Answer]
    history: History


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answers]:
    settings = ("run.total_train_steps=20", f"reward.timeout_s={TIMEOUT_S}", "gconfig.n_samples=3")
    ring = Ring(tmp_path_factory.mktemp("verdicts"), *settings)
    ring.hold_learner(1)
    found: dict[str, Answer] = {}
    with ring.started():
        ring.wait_for("update", version=1)
        for version, trick in enumerate((*HANGS, *NUMBERS, *LIES, *HONEST), start=2):
            found[trick] = one(ring, trick, version)
        ring.hold_learner(None)
        ring.finish()
        yield Answers(ring, found, ring.check_survived())


def one(ring: Ring, trick: str, version: int) -> Answer:
    """The next score is this trick's."""
    now = time.monotonic()
    ring.set_failpoint("score", trick)
    ring.hold_learner(version)  # which lets new prompts in
    fault = ring.wait_for_failpoint("score", after=now)
    if trick in HONEST:
        line = ring.wait_for("score", role="reward", after=fault.t)
        ring.wait_for("update", version=version)
        return Answer(fault, line, None)
    ring.wait_until(lambda: bool(failed(ring, now)), f"{trick} is a timeout or an error")
    line = failed(ring, now)[0]
    ring.wait_for("update", version=version)
    return Answer(fault, line, ring.wait_for("refund", uid=line["uid"]))


def failed(ring: Ring, after: float) -> list[Line]:
    return [line for line in ring.lines("score", role="reward", after=after) if line["status"] != "value"]


def check_never_trained(answers: Answers, answer: Answer, reason: str) -> None:
    """Its group is refunded by that reason, the verdict is no number, and the worker is gone."""
    ring, line = answers.ring, answer.line
    assert answer.refund is not None
    assert answer.refund["reason"] == reason
    assert answers.history.refunded[line["uid"]] == reason
    assert "reward" not in line
    assert not ring.lines("trajectory", uid=line["uid"])
    (scored,) = ring.lines("scored", uid=line["uid"], sample=line["sample"])
    assert scored["status"] == line["status"]


@pytest.mark.parametrize("trick", HANGS)
def test_row_06_a_reward_that_hangs_is_a_timeout_and_its_worker_is_killed(answers: Answers, trick: str) -> None:
    answer = answers.by_trick[trick]
    assert answer.line["status"] == "timeout"
    assert TIMEOUT_S <= answer.line["score_s"] <= TIMEOUT_S + SLACK_S
    check_never_trained(answers, answer, "reward_timeout")
    assert not Path(f"/proc/{answer.fault.pid}").exists()
    after = [x for x in answers.ring.lines("score", role="reward", after=answer.line["t"]) if x["status"] == "value"]
    assert after  # its place is free again


@pytest.mark.parametrize("trick", NUMBERS)
def test_row_07_a_reward_that_is_not_a_number_is_never_trained(answers: Answers, trick: str) -> None:
    answer = answers.by_trick[trick]
    assert answer.line["status"] == "error"
    check_never_trained(answers, answer, "reward_error")


@pytest.mark.parametrize("trick", LIES)
def test_row_08_a_lie_that_ends_its_process_or_fills_the_disk_is_an_error(answers: Answers, trick: str) -> None:
    answer = answers.by_trick[trick]
    assert answer.line["status"] == "error"
    check_never_trained(answers, answer, "reward_error")
    filled = answers.ring.folder / "filled"
    assert not filled.exists() or filled.stat().st_size <= 1 << 30


def test_row_08_output_of_a_forked_child_is_not_taken_as_the_verdict(answers: Answers) -> None:
    ring, answer = answers.ring, answers.by_trick["fork"]
    assert answer.line["status"] == "value"
    rewards = [line["reward"] for line in ring.lines("scored") if line["status"] == "value"]
    assert max(rewards) < 1  # neither 777, of the child and of the line that was printed, nor any other lie
    assert min(rewards) > 0


def test_each_hang_and_each_lie_is_in_the_journal_once(answers: Answers) -> None:
    statuses = [line["status"] for line in answers.ring.lines("scored", role="head")]
    assert statuses.count("timeout") == len(HANGS)
    assert statuses.count("error") == len(NUMBERS) + len(LIES)
    assert answers.history.n_terms == 1
