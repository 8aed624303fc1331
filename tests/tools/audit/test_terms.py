"""tools.audit across terms: a run whose learner and whose head died is clean, whenever the head dies again."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tools.audit.forged_run import GENERATORS, HEAD, REWARD
from tests.tools.audit.forged_terms import HEADS, TermForge, crashed_run, term
from tools.audit import __main__ as command
from tools.audit.audit import Audit, audit, judge
from tools.audit.findings import InvariantVerdict
from tools.breakdown import __main__ as breakdown
from tools.run import Run

Out = pytest.CaptureFixture[str]


def found(tmp_path: Path, edit: Callable[[TermForge], object]) -> Audit:
    forge = crashed_run()
    edit(forge)
    return audit(Run(forge.save(tmp_path / "run")))


def test_a_run_whose_learner_and_whose_head_died_is_clean(tmp_path: Path, capsys: Out) -> None:
    folder = crashed_run().save(tmp_path / "run")
    assert {j.verdict for j in judge(audit(Run(folder))).values()} == {InvariantVerdict.HOLDS}
    assert command.main([str(folder)]) == 0
    out = capsys.readouterr().out
    assert "undone    2 updates, 12 trajectories, 60 tokens, by 2 later terms; 7 prompts were admitted again" in out
    assert breakdown.main([str(folder)]) == 0
    assert "head-0.1 " in capsys.readouterr().out


def test_figures_are_those_of_the_surviving_history(tmp_path: Path, capsys: Out) -> None:
    command.main([str(crashed_run().save(tmp_path / "run")), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["undone"] == {"updates": 2, "on_purpose": 0, "prompts": 7, "trajectories": 12, "tokens": 60}
    assert [(x["term"], x["version"]) for x in told["terms"]] == [(0, 0), (1, 1), (2, 2)]
    assert told["prompts"] == {
        "admitted": 10, "trained": 8, "in_training": 0, "refunded": 2, "live": 0, "drawn_again": 0,
        "refunded_by_reason": {"end_of_run": 2}, "refused_messages": {},
    }  # fmt: skip
    tokens = told["tokens"]
    assert (tokens["received"], tokens["trained"], tokens["skipped"], tokens["without_figures"]) == (155, 60, 20, 0)
    assert tokens["dropped_by_reason"] == {"lost_timeline": 70, "end_of_run": 5}
    assert tokens["completed_but_never_received"] == 0
    assert sum(told["lag"]["trained_tokens"].values()) == 80


@pytest.mark.parametrize("n_lines", range(2, 60, 3))
def test_a_head_killed_anywhere_in_its_second_incarnation_breaks_nothing(n_lines: int, tmp_path: Path) -> None:
    def edit(forge: TermForge) -> None:
        until = forge.lines[HEADS[1]][:n_lines][-1]["t"]
        for lines in forge.lines.values():
            lines[:] = [line for line in lines if line["t"] <= until]

    judged = judge(found(tmp_path, edit))
    assert InvariantVerdict.BROKEN not in {j.verdict for j in judged.values()}
    assert judged["I4"].verdict is InvariantVerdict.NOT_SEEN


def test_a_lease_kept_over_a_term_may_be_given_back(tmp_path: Path) -> None:
    """No line says so: its holder had begun it with weights that do not count any more."""

    def edit(forge: TermForge) -> None:
        uid, at = {"uid": 2, "sample": 0}, forge.lines[HEAD].index(term(forge, 1)) + 5
        lease = {**forge.of(HEAD, "lease", uid=5)[-1], "uid": 2, "born": 0, "n": 1, "holder": GENERATORS[1]}
        lease["t"] = forge.lines[HEAD][at]["t"]
        forge.lines[HEAD].insert(at, lease)
        began = {**forge.of(GENERATORS[1], "request", uid=5)[-1], **uid}
        done = {**forge.of(GENERATORS[0], "completion", **uid)[0], "attempt": 1000, "versions": [1, 5]}
        forge.lines[GENERATORS[0]].remove(forge.of(GENERATORS[0], "completion", **uid)[0])
        place = forge.lines[GENERATORS[1]].index(forge.of(GENERATORS[1], "request", uid=5)[-1])
        done["t"] = began["t"]
        forge.lines[GENERATORS[1]][place:place] = [began, done]
        step = forge.of(HEAD, "trajectory", **uid)[0]["step"]
        made = [line for lines in forge.lines.values() for line in lines if line.get("version") == step + 1]
        for line in [line for line in made if line.get("lag_mean") == 0.7 and line["term"] == 1]:
            line["lag_mean"] = 0.55
        for line in (
            forge.of(HEAD, "scored", **uid)
            + forge.of(HEAD, "sampled", **uid)
            + forge.of(REWARD, "score", **uid, evaluation="")
        ):
            line["attempt"] = 1000
        forge.of(HEAD, "scored", **uid)[0].update(min_version=1, max_version=1)
        forge.of(HEAD, "trajectory", **uid)[0].update(attempt=1000, versions=[1, 5])

    assert not found(tmp_path, edit).findings.first


def test_a_drained_run_is_to_go_on(tmp_path: Path) -> None:
    def edit(forge: TermForge) -> None:
        forge.lines[HEADS[1]] = forge.lines[HEADS[1]][:30]
        forge.write(HEADS[1], "end", wall_s=0.0, code=0, reason="drained at version 2")

    judged = judge(found(tmp_path, edit))
    assert judged["I3"].verdict is InvariantVerdict.HOLDS
    assert judged["I4"].verdict is InvariantVerdict.NOT_SEEN
    assert "the run is to go on later: drained at version 2" in judged["I4"].why


def test_a_journal_without_the_first_incarnations_is_not_judged(tmp_path: Path) -> None:
    judged = judge(found(tmp_path, lambda forge: forge.lines.pop(HEAD)))
    assert judged["I3"].verdict is judged["I4"].verdict is InvariantVerdict.NOT_SEEN
    assert "the journal begins at term 2, version 2" in judged["I4"].why


def test_damaged_lines_of_terms_end_in_a_verdict(tmp_path: Path) -> None:
    folder = crashed_run().save(tmp_path / "run")
    for path in (folder / "journal" / f"{name}.jsonl" for name in HEADS):
        lines = path.read_text().splitlines()
        at = [i for i, text in enumerate(lines) if '"event":"term"' in text][-1]
        for name in ("term", "version", "next_uid", "position", "open", "kept"):
            for other in (-1, 10**12, None, "text", [], [[]], [1, 1], 0.5, 1):
                damaged = json.dumps(json.loads(lines[at]) | {name: other}, separators=(",", ":"))
                path.write_text("\n".join([*lines[:at], damaged, *lines[at + 1 :]]) + "\n")
                judged = judge(audit(Run(folder)))
                assert (
                    InvariantVerdict.BROKEN in {j.verdict for j in judged.values()}
                    or json.loads(lines[at])[name] == other
                )
        path.write_text("\n".join(lines) + "\n")
