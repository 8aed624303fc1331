"""tools.audit where a learner has outlived its head: a true run is clean, and what breaks is seen, for its reason.

Prompts 0 and 1 are batch 0, of which version 1 is made; 3 and 4 are batch 1, and the head dies while that is trained:
no head hears of version 2, which the learner has written down. Its term goes on at 2 with prompt 2, without the verdict
that was there; 5 had been admitted after batch 1 was taken, and its uid is given again. Then head and learner die
together: back to version 1 and its checkpoint, whose frontier has that verdict of prompt 2, so it counts again, and
another one of the same sample, made in between, does not.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tools.audit.forged_run import GENERATORS, HEAD, LEARNER, REWARD, Line, both, drop, put
from tests.tools.audit.forged_terms import TermForge
from tools.audit.audit import Audit, audit, judge
from tools.audit.findings import InvariantVerdict
from tools.run import Run

SECOND, THIRD = "head-0.1", "head-0.2"
Edit = Callable[[TermForge], object]


class Outlived(TermForge):
    """A forge whose learner may survive a head."""

    def go_on(self, name: str, version: int, *, next_uid: int, open_: tuple[int, ...]) -> Line:
        """Another head, which the same learner joins."""
        self.head = name
        self.start(name)
        for member in (REWARD, *GENERATORS, LEARNER):
            self.join(member)
        line = self.begin_term(version, next_uid=next_uid, kept=dict.fromkeys(open_, ()))
        line["lives_on"] = True
        return line

    def make(self, uids: tuple[int, ...], *, n_masked: int) -> None:
        """An update that reaches no head."""
        self.update(uids, n_masked=n_masked)
        del self.lines[self.head][-1]


def outlived_run() -> Outlived:
    forge = Outlived()
    forge.assemble()
    for holder in (GENERATORS[0], GENERATORS[0], GENERATORS[0], GENERATORS[1]):
        forge.admit(holder)  # 0 to 3
    both(forge, 0)
    both(forge, 1)
    forge.finish(2, 0)
    forge.train(0, 1)  # a checkpoint, and the frontier beside it
    saved = dict(forge.known[2]["scored"])
    forge.admit(GENERATORS[0])  # 4
    both(forge, 3)
    both(forge, 4)
    n_masked = forge.take(3, 4)
    forge.admit(GENERATORS[1])  # 5
    forge.make((3, 4), n_masked=n_masked)
    forge.go_on(SECOND, 2, next_uid=5, open_=(2,))
    forge.lease_again(2, GENERATORS[0])
    forge.admit(GENERATORS[1])  # 5
    both(forge, 2)
    both(forge, 5)
    forge.take(2, 5)
    forge.lose_head(THIRD, "learner-0.1")
    forge.known[2]["scored"] = saved
    forge.begin_term(1, next_uid=4, kept={2: (0,), 3: ()})
    forge.lease_again(2, GENERATORS[0])
    forge.lease_again(3, GENERATORS[1])
    forge.finish(2, 1)
    both(forge, 3)
    forge.train(2, 3)
    for holder in GENERATORS:
        forge.admit(holder)  # 4 and 5
    both(forge, 4)
    both(forge, 5)
    forge.train(4, 5)
    for holder in GENERATORS:
        forge.admit(holder)  # 6 and 7
    both(forge, 6)
    both(forge, 7)
    forge.train(6, 7)
    forge.evaluate()
    forge.write(forge.head, "end", wall_s=0.0, code=0, reason="done")
    return forge


def audited(tmp_path: Path, edit: Edit) -> Audit:
    forge = outlived_run()
    edit(forge)
    return audit(Run(forge.save(tmp_path / "run")))


def term(forge: TermForge) -> Line:
    """The line of the surviving learner."""
    return forge.of(SECOND, "term")[0]


def test_a_true_run_is_clean(tmp_path: Path) -> None:
    found = audited(tmp_path, lambda forge: None)
    assert not found.findings.n, {key: [x.text for x in texts] for key, texts in found.findings.first.items()}
    assert all(judgement.verdict is not InvariantVerdict.BROKEN for judgement in judge(found).values())


def test_clocks_of_different_hosts_are_not_compared(tmp_path: Path) -> None:
    assert not audited(tmp_path, other_clock).findings.n


def another_life(forge: TermForge) -> None:
    """The step line is of a learner that died; the one that lives on never had the batch."""
    for line in forge.of(SECOND, "joined", name=LEARNER) + forge.of(SECOND, "member", name=LEARNER):
        line["name"] = "learner-0.9"
    forge.start("learner-0.9")


def other_clock(forge: TermForge) -> None:
    """The learner's host is ten seconds ahead."""
    for line in forge.lines[LEARNER]:
        line["wall"] += 10.0


def tear(forge: TermForge) -> None:
    lines = [line for line in forge.of(HEAD, "trajectory", step=1) if line["uid"] == 4]
    forge.lines[HEAD].remove(lines[-1])


FORGED: dict[str, tuple[Edit, str, str]] = {
    "a version that the learner has not made": (
        drop(LEARNER, "step", version=2),
        "I6",
        "learner-0.0 has no step line of 2",
    ),
    "a version that another life of the learner has made": (another_life, "I6", "learner-0.9 has no step line of 2"),
    "weights that the learner has not made": (
        put(LEARNER, "step", {"digest": "of other weights"}, version=2),
        "I5",
        "a surviving learner continues with the weights that it made",
    ),
    "a version whose batch was never taken": (
        put(SECOND, "term", {"version": 3}),
        "I6",
        "a term begins at a version that was made: 3",
    ),
    "a version that was made, by a learner that did not live": (
        lambda forge: term(forge).pop("lives_on"),
        "I6",
        "a version that was made: 2, u is 1",
    ),
    "a prompt of the batch that was trained": (
        put(SECOND, "term", {"open": [2, 3], "kept": [[], []]}),
        "I4",
        "what a batch < 2 trained stays trained",
    ),
    "tokens that the batch had not": (
        put(LEARNER, "step", {"n_tokens": 25.0}, version=2),
        "I12",
        "tokens = trained + masked + skipped",
    ),
    "a batch that was handed out before its lines": (tear, "I12", "a batch has all its lines before a learner has it"),
    "a prompt that was admitted later": (
        lambda forge: term(forge).update(next_uid=7),
        "I3",
        "next_uid is what it was between batches 1 and 2: 5..6, not 7",
    ),
    "a prompt that was admitted before": (
        lambda forge: term(forge).update(next_uid=4, open=[], kept=[]),
        "I3",
        "next_uid is what it was between batches 1 and 2: 5..6, not 4",
    ),
    "a verdict that was never there": (
        lambda forge: forge.of(THIRD, "term")[0].update(kept=[[0, 1], []]),
        "I8",
        "a lease is for all samples without a verdict: 0, not 1",
    ),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_failover_line_is_caught(tmp_path: Path, what: str) -> None:
    edit, invariant, rule = FORGED[what]
    found = judge(audited(tmp_path, edit))[invariant]
    assert found.verdict is InvariantVerdict.BROKEN
    assert [x for x in found.findings if rule in x.text], [x.text for x in found.findings]
