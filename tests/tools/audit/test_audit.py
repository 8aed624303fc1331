"""tools.audit over a correct run, and over incomplete journals."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tools.audit.forged_run import HEAD, LEARNER, REWARD, Forge, true_run
from tools.audit import __main__ as command
from tools.audit.audit import audit, judge
from tools.audit.findings import InvariantVerdict
from tools.run import Run

Out = pytest.CaptureFixture[str]


def verdicts(folder: Path) -> dict[str, InvariantVerdict]:
    return {name: judgement.verdict for name, judgement in judge(audit(Run(folder))).items()}


def test_a_true_run_is_clean(tmp_path: Path, capsys: Out) -> None:
    folder = true_run().save(tmp_path / "run")
    assert set(verdicts(folder).values()) == {InvariantVerdict.HOLDS}
    assert command.main([str(folder)]) == 0
    assert "no invariant is broken" in capsys.readouterr().out


def test_figures_are_those_of_the_story(tmp_path: Path, capsys: Out) -> None:
    command.main([str(true_run().save(tmp_path / "run")), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["clean"] is True
    assert told["prompts"] == {
        "admitted": 11, "trained": 8, "in_training": 0, "refunded": 3, "live": 0, "drawn_again": 0,
        "refunded_by_reason": {"reward_timeout": 1, "end_of_run": 2}, "refused_messages": {"Scored": 1},
    }  # fmt: skip
    tokens = told["tokens"]
    assert (tokens["received"], tokens["trained"], tokens["masked"], tokens["skipped"]) == (90, 54, 6, 20)
    assert tokens["dropped_by_reason"] == {"reward_timeout": 5, "end_of_run": 5}
    assert told["lag"]["max_trained_token"] == 1
    assert told["lag"]["masked_tokens"] == {"2": 6}
    assert told["lag"]["trajectories_by_born"]["2"] == 2


def test_paper_promises_no_age(tmp_path: Path) -> None:
    forge = true_run()
    forge.config["rollout"]["staleness_policy"] = "paper"
    forge.config["actor"] = {"advantage": "gae"}  # the mean lag is held to its bounds
    for line in forge.of(HEAD, "trajectory"):
        line["n_masked"] = 0
    for line in forge.of(HEAD, "update") + forge.of(LEARNER, "step"):
        line["n_tokens_trained"] += line["n_tokens_masked"]
        line["n_tokens_masked"] = line["masked_share"] = 0.0
    found = audit(Run(forge.save(tmp_path / "run")))
    assert not found.findings.n
    assert "the oldest trained token is 2 behind" in judge(found)["I2"].why


def test_a_row_that_became_too_old_may_be_drawn_again(tmp_path: Path) -> None:
    forge = true_run()
    forge.config["rollout"] = {}  # whether it was so old depends on policy and eta
    forge.of(HEAD, "refund", uid=9)[0].update(reason="too_old", again=True)
    forge.of(HEAD, "scored", uid=9)[0].update(status="value")
    forge.of(REWARD, "score", uid=9)[0].update(status="value", reward=0.0)
    forge.of(HEAD, "admit", uid=10)[0].update(row=9, issue=1)
    found = audit(Run(forge.save(tmp_path / "run")))
    assert not found.findings.n, found.findings.first
    assert found.head is not None
    assert found.head.prompts.passes.n_reissued == 1


# journals that do not show everything


def test_a_torn_last_line_is_passed_over_and_one_before_others_caught(tmp_path: Path) -> None:
    folder = true_run().save(tmp_path / "run")
    path = folder / "journal" / "reward-0.0.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, '{"t":1.0,"wall":1.0,"seq":9']))
    found = audit(Run(folder))
    assert not found.findings.n
    assert found.torn == ["reward-0.0.jsonl"]
    path.write_text("".join([*lines[:3], '{"t":1.0,\n', *lines[3:]]))
    assert verdicts(folder)["journal"] is InvariantVerdict.BROKEN


def cut(forge: Forge, at: dict[str, Any]) -> None:
    """Every process is killed at this line."""
    for lines in forge.lines.values():
        lines[:] = [line for line in lines if line["t"] <= at["t"]]


@pytest.mark.parametrize("event", ["lease", "scored", "batch", "trajectory", "update", "push", "publish", "refund"])
def test_a_run_killed_anywhere_breaks_nothing_and_shows_no_end(event: str, tmp_path: Path) -> None:
    for i in range(len(true_run().of(HEAD, event))):
        forge = true_run()
        cut(forge, forge.of(HEAD, event)[i])
        found = verdicts(forge.save(tmp_path / str(i)))
        assert InvariantVerdict.BROKEN not in found.values()
        assert {found["I4"], found["I9"], found["I11"]} == {InvariantVerdict.NOT_SEEN}


def test_a_head_that_lived_twice_is_not_vouched_for(tmp_path: Path) -> None:
    forge = true_run()
    again = true_run()
    cut(forge, forge.of(HEAD, "update", version=2)[0])
    untold = [line for line in again.lines[HEAD] if line["event"] != "term"]
    forge.lines[HEAD] += [{**line, "seq": i} for i, line in enumerate(untold)]
    found = verdicts(forge.save(tmp_path / "run"))
    assert found["I1"] is found["I3"] is found["I4"] is found["I6"] is InvariantVerdict.NOT_SEEN


def test_without_a_config_the_bounds_and_without_the_head_nothing_is_vouched_for(tmp_path: Path) -> None:
    folder = true_run().save(tmp_path / "run")
    (folder / "config.json").unlink()
    found = verdicts(folder)
    assert found["I1"] is found["I2"] is InvariantVerdict.NOT_SEEN
    assert found["I3"] is found["I5"] is InvariantVerdict.HOLDS
    (folder / "journal" / "head-0.0.jsonl").unlink()
    found = verdicts(folder)
    assert found.pop("journal") is InvariantVerdict.HOLDS
    assert set(found.values()) == {InvariantVerdict.NOT_SEEN}


@pytest.mark.parametrize(
    ("end", "why"),
    [
        ({"code": 1, "reason": "32 prompts in a row ended without a reward"}, "32 prompts in a row"),
        ({}, "its head wrote no exit code"),
    ],
)
def test_a_run_that_ended_badly_shows_no_liveness(end: dict[str, Any], why: str, tmp_path: Path) -> None:
    forge = true_run()
    forge.lines[HEAD].remove(forge.of(HEAD, "publish", version=4)[0])
    line = forge.of(HEAD, "end")[0]
    del line["code"], line["reason"]
    line |= end
    judged = judge(audit(Run(forge.save(tmp_path / "run"))))
    assert judged["I11"].verdict is InvariantVerdict.NOT_SEEN
    assert why in judged["I11"].why


@pytest.mark.slow
def test_damaged_journals_end_in_a_verdict(tmp_path: Path) -> None:
    """Any number in a line may be another: the auditor never crashes."""
    folder = true_run().save(tmp_path / "run")
    path = folder / "journal" / "head-0.0.jsonl"
    lines = path.read_text().splitlines()
    for i, text in enumerate(lines):
        line = json.loads(text)
        for name in [name for name in line if name not in ("seq", "event", "role", "rank", "inc", "term")]:
            for other in (-1, 10**12, None, "text", [], 0.5):
                if (i + len(name)) % 29 == 0:  # a 29th of all
                    damaged = [*lines[:i], json.dumps(line | {name: other}), *lines[i + 1 :]]
                    path.write_text("\n".join(damaged) + "\n")
                    judge(audit(Run(folder)))
