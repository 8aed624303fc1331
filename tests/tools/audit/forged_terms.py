"""A true run of three terms written by hand: the learner dies once and the head once, and both times work is undone.

Term 0: prompts 0 and 1 are batch 0; of version 1 there is a checkpoint, with 2 and 3 open. Prompts 3 and 4 are batch 1,
7 meets a reward error, 5 and 6 are batch 2 when the learner dies. Term 1 begins at version 1: prompt 2 is leased still,
3 is ready, uids 4 to 7 are given again. Prompts 2 and 3 are batch 1; of version 2 there is a checkpoint, with 4 and 5
open and one verdict of 4. Prompts 4 and 6 are batch 2, and the head dies. Term 2 begins at version 2 with that verdict.
"""

from collections.abc import Sequence
from typing import Any

from tests.tools.audit.forged_run import GENERATORS, HEAD, LEARNER, REWARD, Forge, Line, both

HEADS = (HEAD, "head-0.1")
LEARNERS = (LEARNER, "learner-0.1", "learner-0.2")


class TermForge(Forge):
    """A forge that goes back to a version and continues from it."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, Line] = {}  # every prompt, whatever became of it

    def admit(self, holder: str) -> int:
        uid = super().admit(holder)
        self.known[uid] = self.prompts[uid]
        return uid

    def start(self, name: str) -> None:
        self.lines[name] = []
        self.write(name, "start", schema=1, pid=1)

    def begin_term(self, version: int, *, next_uid: int, kept: dict[int, Sequence[int]]) -> Line:
        """The line, and what it means; then the push that every generator waits for."""
        self.term += 1
        self.u = self.v = self.w = version
        self.live, self.in_training, self.next_uid = len(kept), 0, next_uid
        self.prompts = {uid: self.known[uid] for uid in kept}
        for uid, samples in kept.items():
            scored = self.prompts[uid]["scored"]
            self.prompts[uid]["scored"] = {number: scored[number] for number in samples}
        told: dict[str, Any] = {"open": list(kept), "kept": [list(samples) for samples in kept.values()]}
        line = self.write(self.head, "term", version=version, next_uid=next_uid, position=next_uid, **told)
        self.push(catch_up=True)
        return line

    def lose_learner(self, name: str) -> None:
        """The learner is killed and restarts."""
        self.learner = name
        self.start(name)
        self.join(name)

    def lose_head(self, name: str, learner: str) -> None:
        """The head is killed; all actors join the new one, and the learner restarts."""
        self.head, self.learner = name, learner
        for process in (name, learner):
            self.start(process)
        for member in (REWARD, *GENERATORS, learner):
            self.join(member)

    def lease_again(self, uid: int, holder: str) -> None:
        prompt = self.prompts[uid]
        prompt["attempt"] = max(prompt["attempt"] + 1, 1000 * self.term)
        self.lease(uid, holder)


def crashed_run() -> TermForge:
    """The whole run."""
    forge = TermForge()
    forge.assemble()
    term_0(forge)
    term_1(forge)
    term_2(forge)
    forge.evaluate()
    forge.t += 10
    forge.write(forge.head, "end", wall_s=0.0, code=0, reason="done")
    for name in (REWARD, forge.learner, *GENERATORS):
        forge.write(name, "end", wall_s=0.0, reason="done")
    return forge


def term_0(forge: TermForge) -> None:
    for holder in (GENERATORS[0], GENERATORS[0], GENERATORS[0], GENERATORS[1]):
        forge.admit(holder)  # 0, 1, 2 and 3
    for uid in (0, 1):
        both(forge, uid)
    forge.finish(2, 1)
    forge.train(0, 1)  # a checkpoint
    forge.admit(GENERATORS[0])  # 4
    forge.admit(GENERATORS[1])  # 5
    both(forge, 3)
    both(forge, 4)
    forge.train(3, 4)
    forge.admit(GENERATORS[0])  # 6
    forge.admit(GENERATORS[1])  # 7
    both(forge, 5)
    both(forge, 6)
    forge.finish(7, 0)
    forge.finish(7, 1, status="error")
    forge.take(5, 6)


def term_1(forge: TermForge) -> None:
    forge.lose_learner(LEARNERS[1])
    forge.begin_term(1, next_uid=4, kept={2: (1,), 3: (0, 1)})
    forge.admit(GENERATORS[0])  # 4
    forge.admit(GENERATORS[1])  # 5
    forge.finish(4, 0)
    forge.finish(2, 0)  # leased in term 0
    forge.train(2, 3)  # a checkpoint
    forge.admit(GENERATORS[0])  # 6
    forge.admit(GENERATORS[1])  # 7
    forge.finish(4, 1)
    both(forge, 5)
    both(forge, 6)
    forge.train(4, 5)
    forge.admit(GENERATORS[0])  # 8
    forge.finish(8, 0)


def term_2(forge: TermForge) -> None:
    forge.lose_head(HEADS[1], LEARNERS[2])
    forge.begin_term(2, next_uid=6, kept={4: (0,), 5: ()})
    forge.lease_again(4, GENERATORS[1])
    forge.lease_again(5, GENERATORS[0])
    forge.admit(GENERATORS[0])  # 6
    forge.admit(GENERATORS[1])  # 7
    forge.finish(4, 1)
    both(forge, 5)
    forge.train(4, 5)
    forge.admit(GENERATORS[0])  # 8
    forge.admit(GENERATORS[0])  # 9
    both(forge, 6)
    both(forge, 7)
    forge.finish(8, 0)
    forge.train(6, 7)
    forge.refund(8, "end_of_run")
    forge.refund(9, "end_of_run")


def term(forge: TermForge, number: int) -> Line:
    """The line that begins this term."""
    return forge.of(HEADS[number == 2], "term", term=number)[0]
