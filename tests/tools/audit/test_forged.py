"""tools.audit over a forged run: each broken invariant is reported with its reason and journal line."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tools.audit.forged_run import GENERATORS, HEAD, LEARNER, REWARD, Edit, Forge, Forgeries, drop, put, true_run
from tools.audit import __main__ as command
from tools.audit.audit import Audit, audit, judge
from tools.audit.findings import NAMES, InvariantVerdict
from tools.run import Run

MADE = Forgeries()
forgery = MADE.add


def caught(tmp_path: Path, invariant: str, edit: Edit, rule: str) -> Audit:
    """Forge the correct run and check that the audit reports this invariant, reason and an existing line."""
    forge = true_run()
    edit(forge)
    folder = forge.save(tmp_path / "run")
    found = audit(Run(folder))
    judgement = judge(found)[invariant]
    assert judgement.verdict is InvariantVerdict.BROKEN
    matching = [finding for finding in judgement.findings if rule in finding.text]
    assert matching, [finding.text for finding in judgement.findings]
    name, _, number = matching[0].where.partition(":")
    assert 1 <= int(number) <= len((folder / "journal" / name).read_text().splitlines())
    assert command.main([str(folder)]) == 1
    return found


@forgery("I1", "live is what admissions, batches, refunds and publishes add up to: 4, not 3")
def backlog_is_recounted(forge: Forge) -> None:
    forge.of(HEAD, "admit", uid=7)[0]["live"] -= 1


@forgery("I2", "mask: just the tokens with c - version > eta = 1 are masked: 3, not 0")
def age(forge: Forge) -> None:
    for line in forge.of(HEAD, "trajectory", uid=2):
        line["n_masked"] = 0


@pytest.mark.parametrize("policy", ["hold", "drop"])
def test_I2_age_of_whole_trajectories_is_caught(policy: str, tmp_path: Path) -> None:
    def edit(forge: Forge) -> None:
        forge.config["rollout"]["staleness_policy"] = policy
        for line in forge.of(HEAD, "trajectory", uid=2):
            line["n_masked"] = 0

    found = caught(tmp_path, "I2", edit, f"{policy}: c - born <= eta = 1 for every trajectory: 2 - 0 = 2")
    assert found.findings.n["I2"] == 2


@forgery("I3", "only a live prompt is refunded: prompt 0 is in training")
def a_prompt_in_two_states(forge: Forge) -> None:
    lines = forge.lines[HEAD]
    at = lines.index(forge.of(HEAD, "update", version=1)[0])
    refund = {"uid": 0, "reason": "end_of_run", "n_tokens_dropped": 10, "error": ""}
    lines.insert(at, {**lines[at], "event": "refund", **refund})


@forgery("I3", "a group is too old when u - born > eta = 1: 4 - 3 = 1")
def a_group_dropped_within_the_bound(forge: Forge) -> None:
    forge.config["rollout"]["staleness_policy"] = "drop"
    forge.of(HEAD, "refund", uid=10)[0]["reason"] = "too_old"


def test_I3_the_end_of_an_incarnation_before_a_finished_run_was_extended_is_no_fault(tmp_path: Path) -> None:
    forge = true_run()
    total = forge.config["run"]["total_train_steps"]
    forge.config["run"]["total_train_steps"] = total + 2
    folder = forge.save(tmp_path / "run")
    assert judge(audit(Run(folder)))["I3"].verdict is InvariantVerdict.BROKEN
    (folder / "config-1.json").write_text(json.dumps({"run": {"total_train_steps": total}}))
    assert judge(audit(Run(folder)))["I3"].verdict is InvariantVerdict.HOLDS


@forgery("I4", "no trajectory is trained twice: its prompt is trained")
def exactly_once(forge: Forge) -> None:
    for line in forge.of(HEAD, "trajectory", uid=6):
        line["uid"] = 3


@forgery("I4", "each pass draws every row before the next begins: 8 of 9 in pass 0")
def a_row_passed_over(forge: Forge) -> None:
    for line in forge.of(HEAD, "admit")[8:]:
        line.update(epoch=1, row=line["uid"] - 8)
    forge.of(HEAD, "admit", uid=3)[0]["row"] = 8


@forgery("I5", "versions never decrease along a trajectory: [1, 3, 0, 2]")
def versions_that_decrease(forge: Forge) -> None:
    for name in (HEAD, GENERATORS[0]):
        for line in forge.of(name, "trajectory", uid=2) + forge.of(name, "completion", uid=2):
            line["versions"] = [1, 3, 0, 2]


@forgery("I5", "a token's version is held while it is sampled: [0, 5], held 1..1")
def a_stamp_of_weights_that_were_not_held(forge: Forge) -> None:
    for name in (HEAD, GENERATORS[0]):
        for line in forge.of(name, "trajectory", uid=4) + forge.of(name, "completion", uid=4):
            line["versions"] = [0, 5]


def continue_sample(forge: Forge, *, handed: int, n_done: int, versions: list[int]) -> None:
    """Sample 1 of prompt 5 goes on, with generator 0 that holds version 1, from what generator 1 had."""
    forge.of(HEAD, "lease", uid=5, attempt=1)[0]["n_done"] = handed
    for line in forge.of(HEAD, "admit", uid=5) + forge.of(HEAD, "lease", uid=5) + forge.of(HEAD, "trajectory", uid=5):
        line["born"] = 0
    forge.of(GENERATORS[0], "request", uid=5, sample=1)[0]["n_done"] = n_done
    for line in forge.of(HEAD, "trajectory", uid=5, sample=1):
        line["versions"] = versions
    forge.of(HEAD, "scored", uid=5, sample=1)[0].update(min_version=versions[0], max_version=versions[-2])
    forge.of(GENERATORS[0], "completion", uid=5, sample=1)[0]["versions"] = versions


def continued(tmp_path: Path, **how: Any) -> list[str]:
    forge = true_run()
    continue_sample(forge, **how)
    return [finding.text for finding in judge(audit(Run(forge.save(tmp_path / "run"))))["I5"].findings]


def test_I5_a_sample_continued_from_another_generators_tokens_is_true(tmp_path: Path) -> None:
    assert continued(tmp_path, handed=3, n_done=3, versions=[0, 3, 1, 1, 2, 1]) == []


@pytest.mark.parametrize(
    ("how", "rule"),
    [
        ({"handed": 2, "n_done": 3, "versions": [0, 3, 2, 2]}, "from what the head handed it: 2 tokens"),
        (
            {"handed": 3, "n_done": 3, "versions": [0, 4, 2, 1]},
            "a token's version is held while it is sampled: [0, 1, 2, 1]",
        ),
        ({"handed": 5, "n_done": 5, "versions": [0, 3, 1, 2]}, "a sample is continued, by a token or more"),
        ({"handed": 4, "n_done": 4, "versions": [0, 2, 2, 3]}, "where what was done is known"),
    ],
)
def test_I5_a_sample_continued_from_an_impossible_partial_is_caught(
    tmp_path: Path, how: dict[str, Any], rule: str
) -> None:
    assert any(rule in text for text in continued(tmp_path, **how))


@forgery("I5", "a delta starts from a version that its member held: version 3 from 9")
def a_delta_from_a_version_that_was_never_held(forge: Forge) -> None:
    forge.of(GENERATORS[0], "pushed", version=2)[0].update(sent_bytes=100, delta_from=1)
    forge.of(GENERATORS[0], "pushed", version=3)[0].update(sent_bytes=100, delta_from=9)


@forgery("I7", "a generator that does not hold v = 2 gets no work: generator-0.0 holds 1")
def born_fresh(forge: Forge) -> None:
    for line in forge.of(HEAD, "member", name=GENERATORS[0], version=2):
        forge.lines[HEAD].remove(line)


@forgery("I7", "generator-0.0 itself held 1")
def work_for_a_generator_that_itself_held_less(forge: Forge) -> None:
    lines = forge.lines[GENERATORS[0]]
    pushed = forge.of(GENERATORS[0], "pushed", version=2)[0]
    lines.remove(pushed)
    lines.insert(lines.index(forge.of(GENERATORS[0], "request", uid=7)[-1]) + 1, pushed)


@forgery("I8", "a batch holds whole groups: samples [0] of 2")
def groups(forge: Forge) -> None:
    forge.lines[HEAD].remove(forge.of(HEAD, "trajectory", uid=4, sample=1)[0])
    forge.of(HEAD, "batch", step=1)[0]["n_trajectories"] = 3


@forgery("I8", "a batch holds whole groups: 1 of 2 samples have a verdict")
def a_group_trained_before_it_is_whole(forge: Forge) -> None:
    for event in ("scored", "ready"):
        forge.lines[HEAD].remove(forge.of(HEAD, event, uid=7)[-1])


@forgery("I8", "the oldest whole group is trained first: 3, born 0, not born 1")
def a_group_trained_before_an_older_one_that_is_whole(forge: Forge) -> None:
    lines, batch = forge.lines[HEAD], forge.of(HEAD, "trajectory", step=1)
    first = lines.index(batch[0])
    assert lines[first : first + len(batch)] == batch
    lines[first : first + len(batch)] = sorted(batch, key=lambda line: -line["uid"])


@forgery("I9", "nobody drops in silence")
def back_pressure(forge: Forge) -> None:
    """A verdict that left its reward and is neither accepted nor refused was dropped in silence."""

    score = {"uid": 5, "sample": 1, "attempt": 0, "status": "value", "reward": 1.0, "score_s": 0.0}
    at = forge.lines[REWARD].index(forge.of(REWARD, "score", uid=5, sample=1)[0])
    forge.lines[REWARD].insert(at, {**forge.lines[REWARD][at], **score})
    forge.lines[HEAD].remove(forge.of(HEAD, "refused")[0])


@forgery("I10", "a timeout is no number: it is trained with reward 6.0")
def a_timeout_that_is_trained(forge: Forge) -> None:
    forge.of(HEAD, "scored", uid=6, sample=0)[0]["status"] = "timeout"
    forge.of(REWARD, "score", uid=6, sample=0)[0].update(status="timeout", reward=None)


@forgery("I11", "no state has everyone waiting: 300 s without an event; 2 prompts live, 1 ready")
def liveness(forge: Forge) -> None:
    """A generator is there, a lost lease waits, nobody samples, scores or trains: nothing will ever happen."""

    for uid in (4, 2):
        for event in ("lease", "scored", "ready"):
            for line in forge.of(HEAD, event, uid=uid):
                forge.lines[HEAD].remove(line)
    dead = forge.of(HEAD, "member", state="dead")[0]
    ready = forge.of(HEAD, "ready", uid=3)[0]
    forge.lines[HEAD].remove(ready)
    forge.lines[HEAD].insert(forge.lines[HEAD].index(dead), {**ready, "t": dead["t"]})
    for uid in (4, 2):
        refund = {**dead, "event": "refund", "uid": uid, "reason": "sampling_error", "n_tokens_dropped": 0}
        forge.lines[HEAD].insert(forge.lines[HEAD].index(dead), refund)
    forge.wait(300.0, after=dead)


@forgery("I11", "a push is over by weights.timeout_s = 60: 100.")
def a_push_beyond_its_deadline(forge: Forge) -> None:
    forge.wait(100.0, after=forge.of(HEAD, "push", version=2)[0])


@forgery("I12", "tokens = trained + masked + skipped: the batch has 20, the update 20 = 15 + 6 + 0")
def accounting(forge: Forge) -> None:
    forge.of(HEAD, "update", version=3)[0]["n_tokens_trained"] += 1


@forgery("I12", "labels sum to the wall time within 1 %")
def accounting_of_seconds(forge: Forge) -> None:
    forge.lines[LEARNER][-1]["forged_wall_s"] = 100.0


@forgery("journal", "seq counts without gaps: 5 follows 3")
def a_lost_line(forge: Forge) -> None:
    for i, line in enumerate(forge.lines[LEARNER]):
        line["seq"] = i + (i > 3)


def test_every_invariant_has_its_forgery() -> None:
    tested = {name.split("_")[1] for name in globals() if name.startswith("test_I")}
    assert NAMES.keys() <= tested | {invariant for invariant, _, _ in FORGERIES}


@forgery("I6", "generator-0.1 joins after it was evicted for good")
def a_generator_that_comes_back_after_it_was_evicted_for_good(forge: Forge) -> None:
    name, why = GENERATORS[0], "evicted for good after 2 restarts: its last 8 leases failed"
    forge.write(HEAD, "member", name=name, state="left", why=why)
    forge.join(f"{name.partition('.')[0]}.1")


FORGERIES: tuple[tuple[str, Edit, str], ...] = (
    *MADE,
    ("I1", lambda f: f.config["rollout"].update(max_head_offpolicyness=0),
     "live + in training <= (eta + 1) * B = 2: 3"),
    ("I2", put(HEAD, "update", {"lag_max": 2.0}, version=3), "no trained token is over eta = 1 behind: lag_max 2"),
    ("I3", drop(HEAD, "refund", uid=10), "at the end every prompt is trained or refunded: this one is open"),
    ("I3", lambda f: f.config["run"].update(total_train_steps=5),
     "the run ends with update 5: this is the end at update 4"),
    ("I3", put(HEAD, "refund", {"reason": "end_of_data"}, uid=9),
     "after end_of_data no new row comes: row 10 of pass 0"),
    ("I3", put(HEAD, "refund", {"reason": "too_old"}, uid=10),
     "only under drop is a group too old: the policy is mask"),
    ("I3", put(HEAD, "refund", {"reason": "whim"}, uid=10), "unknown reason of a refund: 'whim'"),
    ("I3", put(HEAD, "evaluation", {"k": 2, "pass_at_k": None}),
     "an evaluation ends when each problem has its 2 samples or has failed"),
    ("I5", put(HEAD, "evaluation", {"version_last": 9}), "have the versions that it names"),
    ("I10", put(HEAD, "evaluation", {"avg_at_k": 0.5}), "avg@k, its error and pass@k are of the answers"),
    ("I4", put(HEAD, "admit", {"row": 5}, uid=6), "in each pass every row is drawn once: row 5 again in pass 0"),
    ("I5", put(HEAD, "trajectory", {"versions": [0, 2, 2, 3]}, uid=2),
     "versions are stamped where the token is made: [0, 2, 2, 3]"),
    ("I5", put(GENERATORS[1], "pushed", {"digest": "another"}, version=1), "a version is one set of weights: digest"),
    ("I6", put(HEAD, "publish", {"version": 2, "v": 2}, version=3), "v grows and never passes u: 2 after 2, u 3"),
    ("I6", put(HEAD, "scored", {"attempt": 0}, uid=5, sample=1),
     "an older attempt's results are refused: attempt 0, leased is 1"),
    ("I6", put(HEAD, "batch", {"clock": 1}, step=2),
     "batch w is taken when update w is next: step 2 at clock 1, w 2, u 2"),
    ("I6", drop(HEAD, "update", version=2), "v grows and never passes u: 2 after 1, u 1"),
    ("I10", put(HEAD, "refund", {"reason": "reward_error"}, uid=10),
     "a group is refunded as reward_error after such a verdict: it had none"),
    ("I10", put(HEAD, "scored", {"status": "value"}, uid=9), "a verdict reaches the head as it was given: value 0.0"),
    ("I10", put(HEAD, "evaluation", {"reward": 1 / 3}),
     "an evaluation's n, reward and accuracy are of its values alone"),
    ("I11", drop(HEAD, "publish", version=4), "at the end the last update is published: v 3, u 4"),
    ("I12", put(HEAD, "refund", {"n_tokens_dropped": 0}, uid=8), "dropped tokens are those received: 5, not 0"),
    ("journal", lambda f: f.of(HEAD, "lease", uid=3)[0].pop("holder"), "lease: KeyError"),
)  # fmt: skip


@pytest.mark.parametrize(("invariant", "edit", "rule"), FORGERIES, ids=[rule for _, _, rule in FORGERIES])
def test_a_forgery_is_caught_with_its_rule(tmp_path: Path, invariant: str, edit: Edit, rule: str) -> None:
    caught(tmp_path, invariant, edit, rule)
