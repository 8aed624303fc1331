"""A second opinion (`reward.check`): a grader scores a share of the answers, by ids; the reward stays the first's."""

from typing import Any, NamedTuple
from zlib import crc32

from actors.rewards.pool import Verdict
from areal_bus.core.events import Event
from areal_bus.messages import Trajectory, VerdictStatus
from areal_bus.storage.journal import Journal

MOST_WAITING = 64  # checks in progress in one actor; further samples are not checked: scores come first
MOST_TEXT = 2000  # characters of a text in the journal
CLOSE = 1e-6  # rewards of graders that do not judge agree within this


class CheckKey(NamedTuple):
    """One sample."""

    uid: int
    sample: int
    attempt: int


def is_chosen(trajectory: Trajectory, share: float) -> bool:
    """Whether a sample of training is checked."""
    number = crc32(f"{trajectory.uid} {trajectory.sample} {trajectory.attempt}".encode())
    return not trajectory.evaluation and number < share * 2**32


def agree(first: Verdict, second: Verdict) -> bool:
    """Both judge the answer alike; where one of them does not judge, their rewards are equal."""
    if first.correct is not None and second.correct is not None:
        return first.correct == second.correct
    return abs(first.reward - second.reward) <= CLOSE * max(1.0, abs(first.reward))


def journal_check(journal: Journal, trajectory: Trajectory, first: Verdict, second: Verdict) -> bool:
    """Write the journal line of a check, with the texts where the graders disagree. Returns whether they do."""
    ids = {"uid": trajectory.uid, "sample": trajectory.sample, "attempt": trajectory.attempt}
    told: dict[str, Any] = {"status": str(second.status), "reward": first.reward, "correct": first.correct}
    if second.status != VerdictStatus.VALUE:
        journal.keep(Event.CHECK, **ids, **told, error=second.error[:500])
        return False
    told |= {"check_reward": second.reward, "check_correct": second.correct, "agrees": agree(first, second)}
    if not told["agrees"]:
        texts = {"prompt": trajectory.prompt_text, "completion": trajectory.text, "row": trajectory.row}
        told |= {name: text[-MOST_TEXT:] for name, text in texts.items()}
    journal.keep(Event.CHECK, **ids, **told)
    return not told["agrees"]
