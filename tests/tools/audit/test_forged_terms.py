"""tools.audit over a forged run of three terms: each violation at a term is reported with its reason."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tools.audit.forged_run import GENERATORS, HEAD, Forgeries, put
from tests.tools.audit.forged_terms import HEADS, LEARNERS, TermForge, crashed_run, term
from tools.audit.audit import audit, judge
from tools.audit.findings import Findings, InvariantVerdict
from tools.audit.journal_reader import JournalFile
from tools.audit.replay.data_passes import Passes
from tools.audit.run_settings import read
from tools.run import Run

Edit = Callable[[TermForge], object]

MADE = Forgeries()
forgery = MADE.add


def caught(tmp_path: Path, invariant: str, rule: str, edit: Edit) -> None:
    """This invariant is broken, for this reason."""
    forge = crashed_run()
    edit(forge)
    judgement = judge(audit(Run(forge.save(tmp_path / "run"))))[invariant]
    assert judgement.verdict is InvariantVerdict.BROKEN
    assert [x for x in judgement.findings if rule in x.text], [x.text for x in judgement.findings]


def keep(forge: TermForge, number: int, kept: dict[int, list[int]]) -> None:
    """Another account of what was open."""
    term(forge, number).update(open=list(kept), kept=list(kept.values()))


# I1


@forgery("I1", "live is what admissions, batches, refunds and publishes add up to: 3, not 1")
def open_prompts_that_were_not_counted(forge: TermForge) -> None:
    for line in forge.of(HEADS[1], "admit")[:2]:
        line["live"] -= 2


@forgery("I1", "live + in training <= (eta + 1) * B = 4: 5 as a term begins")
def more_prompts_than_credits_as_a_term_begins(forge: TermForge) -> None:
    term(forge, 1)["next_uid"] = 5
    keep(forge, 1, {uid: [] for uid in range(5)})


# I3


@forgery("I3", "what was refunded after batch 1 was taken is open again")
def a_refunded_prompt_that_vanishes(forge: TermForge) -> None:
    """It was refunded in what is undone, so it lives again."""

    at = forge.lines[HEAD].index(forge.of(HEAD, "refund", uid=7)[0])
    refund = {"uid": 2, "reason": "sampling_error", "n_tokens_dropped": 5, "error": "", "again": False}
    forge.lines[HEAD].insert(at, {**forge.lines[HEAD][at], **refund})
    keep(forge, 1, {3: [0, 1]})


# I4


def test_I4_a_waiting_row_drawn_after_the_base_waits_again(tmp_path: Path) -> None:
    findings = Findings()
    passes = Passes(JournalFile(tmp_path / "head-0.0.jsonl", findings), read({}))
    assert [passes.draw(("", 0, row), row) for row in (0, 1)] == [0, 0]
    passes.release(("", 0, 0))
    assert passes.draw(("", 0, 0), 2) == 1
    passes.put_back(("", 0, 0), n_before=1, is_drawn=False)
    passes.go_on_at(2)
    assert not findings.n
    passes.draw(("", 0, 2), 2)
    assert "1 wait when row 2 is drawn" in findings.first["I4"][0].text


def test_I4_a_source_out_of_turn_and_a_row_left_out_without_a_reason_are_caught(tmp_path: Path) -> None:
    """Two sources of weights 1 and 2; pass 1 of b leaves out row 0, which was never solved, and row 1, which was."""
    sources = [{"name": "a", "weight": 1.0}, {"name": "b", "weight": 2.0}]
    window = {"low": 0.0, "high": 1.0, "every": 2}
    findings = Findings()
    setup = read({"data": {"source": sources, "curriculum": window}})
    passes = Passes(JournalFile(tmp_path / "head-0.0.jsonl", findings), setup)
    drawn = [("b", 0, 0), ("a", 0, 0), ("b", 0, 1), ("b", 0, 2), ("a", 0, 1), ("b", 1, 2), ("b", 2, 0)]
    for uid, at in enumerate(drawn):
        passes.draw(at, uid)
    assert not findings.n
    passes.learn(("b", 0, 0), 0, 4)
    passes.learn(("b", 0, 1), 1, 4)
    passes.close()
    assert [found.text for found in findings.first["I4"]] == [
        "only rows outside of the pass-rate window are left out: row 1 of pass 1 is not, source 'b'"
    ]
    passes.draw(("b", 2, 1), 7)
    assert "the source furthest behind its weight is next, 'a', not 'b'" in findings.first["I4"][1].text


@forgery("I4", "rows to be drawn again come before new ones: 1 wait when row 6 is drawn")
def a_row_to_be_drawn_again_that_is_forgotten(forge: TermForge) -> None:
    """Prompt 5 became too old in what is undone: it is open again, and refunded once more before a new row is drawn."""

    lines = forge.lines[HEADS[1]]
    at = lines.index(forge.of(HEADS[1], "admit", uid=6)[0])
    refund = {"uid": 5, "reason": "too_old", "n_tokens_dropped": 0, "error": "", "again": True}
    lines.insert(at, {**lines[at], "event": "refund", **refund})


# I5, I6, I7


def with_digests(forge: TermForge) -> list[dict[str, Any]]:
    """The admissions in order, with the digests of a loader's rows: one for each number."""
    found = [line for head in HEADS for line in forge.of(head, "admit")]
    for line in found:
        line["row_digest"] = f"row {line['row']}"
    return found


def test_I4_the_rows_of_a_loader_that_goes_on_exactly_are_clean(tmp_path: Path) -> None:
    forge = crashed_run()
    rows = [line["row"] for line in with_digests(forge)]
    assert len(rows) > len(set(rows))  # some are drawn again
    found = judge(audit(Run(forge.save(tmp_path / "run"))))
    assert found["I4"].verdict is InvariantVerdict.HOLDS


@forgery("I4", "a row that is drawn again is the same: row 4 of pass 0 is another, it was row 4")
def a_row_of_a_loader_that_is_another_one_when_it_is_drawn_again(forge: TermForge) -> None:
    [line for line in with_digests(forge) if line["row"] == 4][-1]["row_digest"] = "another"


def last_equals_first(forge: TermForge) -> list[dict[str, Any]]:
    """The last row, drawn in the last term only, has the digest of the first one."""
    lines = with_digests(forge)
    lines[-1]["row_digest"] = "row 0"
    assert lines[-1]["row"] not in [line["row"] for line in lines[:-1]]
    return lines


def test_I4_equal_rows_of_the_data_prove_nothing(tmp_path: Path) -> None:
    forge = crashed_run()
    lines = last_equals_first(forge)
    lines[2]["row_digest"] = "row 1"  # two rows of one term are equal, too
    for line in lines[3:]:
        if line["row"] == 2:
            line["row_digest"] = "row 1"
    assert judge(audit(Run(forge.save(tmp_path / "run"))))["I4"].verdict is InvariantVerdict.HOLDS


@forgery("I5", "a term begins with the weights of its version")
def a_term_that_begins_with_other_weights(forge: TermForge) -> None:
    for name in (LEARNERS[2], *GENERATORS):
        forge.of(name, "pushed", version=2, term=2)[0]["digest"] = "digest of something else"


@forgery("I5", "a token's version is held while it is sampled: [0, 2, 2, 3], held 0..1")
def a_stamp_of_a_version_that_is_void(forge: TermForge) -> None:
    """Prompt 2 goes on in term 1, which began at version 1: it has no token of version 2 of term 0."""

    forge.of(GENERATORS[0], "completion", uid=2, sample=0)[0]["versions"] = [0, 2, 2, 3]


@forgery("I6", "of what term 0 made, versions up to 1 count in term 1: it has tokens of version 2")
def a_result_of_versions_that_are_undone(forge: TermForge) -> None:
    """Prompt 2 was completed in term 0 by its version 2, and is scored in term 1, which began at version 1."""

    done = forge.of(GENERATORS[0], "completion", uid=2, sample=0)[0]
    lines = forge.lines[GENERATORS[0]]
    lines.remove(done)
    lines.insert(lines.index(forge.of(GENERATORS[0], "pushed", term=1)[0]), done)
    done.update(term=0, versions=[0, 3, 2, 2])
    forge.of(HEAD, "scored", uid=2, sample=0)[0]["max_version"] = 2


@forgery("I6", "an older attempt's results are refused: attempt 1000, queued is 1000")
def a_lease_that_survives_its_head(forge: TermForge) -> None:
    lease = forge.of(HEADS[1], "lease", uid=4)[0]
    forge.lines[HEADS[1]].remove(lease)
    for line in forge.of(HEADS[1], "scored", uid=4):
        line["attempt"] = 1000


@forgery("I7", "generator-1.0 itself held 3, of term 1")
def work_for_a_generator_that_missed_the_push_of_the_term(forge: TermForge) -> None:
    pushed = forge.of(GENERATORS[1], "pushed", version=2, term=2)[0]
    forge.lines[GENERATORS[1]].remove(pushed)


# I12


@forgery("I12", "dropped tokens are those received: 5, not 10")
def tokens_that_a_term_dropped_and_a_refund_counts(forge: TermForge) -> None:
    """Prompt 8 of term 1 had a verdict; prompt 8 of term 2 is another one."""

    forge.of(HEADS[1], "refund", uid=8)[0]["n_tokens_dropped"] = 10


FORGERIES: tuple[tuple[str, Edit, str], ...] = (
    *MADE,
    ("I3", lambda f: keep(f, 1, {3: [0, 1]}), "a live prompt is open in the next term"),
    ("I3", lambda f: term(f, 1).update(next_uid=7), "between update 1 and batch 1: 4..6, not 7"),
    ("I3", lambda f: term(f, 1).update(next_uid=3), "between update 1 and batch 1: 4..6, not 3"),
    ("I3", lambda f: keep(f, 1, {2: [1], 3: [0, 1], 50: []}), "only what was admitted can be open in the next term"),
    ("I4", lambda f: keep(f, 1, {2: [1]}),
     "what a batch >= 1 trained is undone and open again: batch 1 had this prompt"),
    ("I4", lambda f: keep(f, 1, {1: [0, 1], 2: [1], 3: [0, 1]}),
     "what a batch < 1 trained stays trained: it is open again"),
    ("I4", lambda f: term(f, 1).update(next_uid=1, position=1, open=[], kept=[]),
     "what a batch < 1 trained stays trained: batch 0 had this prompt, whose row is free"),
    ("I4", lambda f: term(f, 1).update(position=6),
     "a term draws on after the rows of its prompts: 4 are drawn, position is 6"),
    ("I4", last_equals_first, "row 9 of pass 0 equals row 0, drawn in an earlier term"),
    ("I5", put(GENERATORS[1], "pushed", {"digest": "digest of 2 by learner-0.0"}, version=2, term=1),
     "a version is one set of weights"),
    ("I6", put(HEADS[1], "scored", {"attempt": 1000}, uid=4, sample=1),
     "an older attempt's results are refused: attempt 1000, leased is 2000"),
    ("I6", put(HEAD, "scored", {"max_version": 3}, uid=4, sample=0, term=1),
     "a verdict is kept whose tokens are of versions <= 2: this one has 3"),
    ("I6", put(HEADS[1], "scored", {"max_version": 3}, uid=4, sample=1),
     "a version makes tokens after its update: 3, u is 2"),
    ("I6", lambda f: term(f, 2).update(term=1), "terms count on: 1 after 1"),
    ("I6", lambda f: term(f, 2).update(version=4), "a term begins at a version that was made: 4, u is 3"),
    ("I6", put(HEADS[1], "lease", {"attempt": 1001}, uid=6),
     "attempts count the leases of a prompt: 2000 is next, not 1001"),
    ("I6", put(HEADS[1], "update", {"term": 1}, version=3), "a line of the head has its term: 2, not 1"),
    ("I12", lambda f: keep(f, 1, {2: [0, 1], 3: [0, 1]}), "a verdict that is kept was received: this one was not"),
)  # fmt: skip


@pytest.mark.parametrize(("invariant", "edit", "rule"), FORGERIES, ids=[rule for _, _, rule in FORGERIES])
def test_a_forged_term_is_caught_with_its_rule(tmp_path: Path, invariant: str, edit: Edit, rule: str) -> None:
    caught(tmp_path, invariant, rule, edit)
