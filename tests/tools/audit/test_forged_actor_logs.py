"""tools.audit over a forged run: the head's journal is checked against pushes and the journals of other actors."""

from pathlib import Path
from typing import Any

import pytest

from tests.tools.audit.forged_run import GENERATORS, HEAD, REWARD, Edit, Forge, Forgeries, Line, drop, put, true_run
from tests.tools.audit.test_forged import caught
from tools.audit.audit import Audit, audit, judge
from tools.audit.findings import InvariantVerdict
from tools.run import Run

MADE = Forgeries()
forgery = MADE.add


def found(tmp_path: Path, edit: Edit) -> Audit:
    forge = true_run()
    edit(forge)
    return audit(Run(forge.save(tmp_path / "run")))


def move(forge: Forge, line: Line, *, after: Line) -> None:
    """To another place in the head's file."""
    lines = forge.lines[HEAD]
    lines.remove(line)
    lines.insert(lines.index(after) + 1, line)


# a version is published when its push is complete (I6)


@forgery("I6", "a version is published when its push is complete: version 2 was not pushed to [")
def a_version_published_before_its_push(forge: Forge) -> None:
    move(forge, forge.of(HEAD, "publish", version=2)[0], after=forge.of(HEAD, "update", version=2)[0])


@forgery("I6", "a push is over when each member completed it, broke it or is gone: 1 of 2 as publish 1 comes")
def a_version_published_while_its_push_is_in_flight(forge: Forge) -> None:
    first = forge.of(HEAD, "member", name=GENERATORS[0], version=1)[0]
    move(forge, forge.of(HEAD, "publish", version=1)[0], after=first)


def publish_to_nobody(forge: Forge, last_word: Line) -> None:
    """No push of version 4: before its update the head writes this of the one generator that is left."""
    for lines in forge.lines.values():
        lines[:] = [
            line
            for line in lines
            if not (line.get("evaluation") or line["event"] == "evaluation")
            and not (line.get("version") == 4 and line["event"] in ("push", "pushed", "member"))
        ]
    update = forge.of(HEAD, "update", version=4)[0]
    forge.lines[HEAD].insert(forge.lines[HEAD].index(update), {**update, "name": GENERATORS[0], **last_word})
    forge.of(HEAD, "publish", version=4)[0]["members"] = 0


@pytest.mark.parametrize(
    ("word", "is_clean"),
    [
        ({"event": "member", "state": "dead", "why": "silent for 60 s", "version": None}, True),
        ({"event": "push_broken", "push": 4, "version": 3, "error": "no answer within 60 s"}, True),
        ({"event": "member", "state": "healthy", "why": "leaves", "version": None}, False),
    ],
)
def test_a_version_is_published_without_a_push_when_no_generator_is_left(
    word: Line, is_clean: bool, tmp_path: Path
) -> None:
    def edit(forge: Forge) -> None:
        if word["event"] == "push_broken":  # of a push that it missed alone
            update = forge.of(HEAD, "update", version=4)[0]
            stale = {"event": "member", "name": GENERATORS[0], "state": "stale", "why": "missed a push"}
            forge.lines[HEAD].insert(forge.lines[HEAD].index(update), {**update, **stale, "version": None})
            late = {"event": "push", "push": 4, "version": 3, "view": 1, "n_members": 1, "catch_up": True}
            forge.lines[HEAD].insert(forge.lines[HEAD].index(update), {**update, **late})
        publish_to_nobody(forge, word)

    findings = found(tmp_path, edit).findings
    assert not findings.first if is_clean else "version 4 was not pushed to" in findings.first["I6"][0].text


# verdicts are a reward's own (I10)


def forget_scores(forge: Forge, **ids: Any) -> None:
    for line in forge.of(REWARD, "score", **ids):
        forge.lines[REWARD].remove(line)


@forgery("I10", "a verdict is given by a reward: none says that it gave value 777")
def a_verdict_that_no_reward_gave(forge: Forge) -> None:
    forget_scores(forge, uid=4)
    for line in forge.of(HEAD, "scored", uid=4) + forge.of(HEAD, "trajectory", uid=4):
        line["reward"] = 777


@forgery("I10", "a verdict reaches the head as it was given: value")
def a_role_whose_reward_no_reward_gave(forge: Forge) -> None:
    for line in forge.of(HEAD, "scored", uid=4):
        line |= {"roles": "black", "reward:role/black": 3.0}
    for line in forge.of(HEAD, "trajectory", uid=4):
        line |= {"roles": "black", "rewards": [3.0]}


@forgery("I10", "a trajectory is trained with its verdict")
def a_role_that_is_trained_with_another_reward(forge: Forge) -> None:
    for name, event in ((REWARD, "score"), (HEAD, "scored")):
        for line in forge.of(name, event, uid=4):
            line |= {"reward:role/black": 3.0, **({"roles": "black"} if event == "scored" else {})}
    for line in forge.of(HEAD, "trajectory", uid=4):
        line |= {"roles": "black", "rewards": [2.0]}


@forgery("I10", "a verdict reaches the head as it was given: value 1.0, value 0.5 at reward-0.0")
def a_verdict_of_an_evaluation_that_no_reward_gave(forge: Forge) -> None:
    for line in forge.of(HEAD, "scored", evaluation="after", status="value"):
        line["reward"] = 1.0
    forge.of(HEAD, "evaluation")[0]["reward"] = 1.0


def test_verdicts_of_a_reward_whose_file_is_missing_are_not_vouched_for(tmp_path: Path) -> None:
    def edit(forge: Forge) -> None:
        forge.lines["reward-1.0"] = forge.lines.pop(REWARD)[:1]  # another one's file is there

    judged = judge(found(tmp_path, edit))
    assert judged["I10"].verdict is InvariantVerdict.NOT_SEEN
    assert "verdicts are of the head alone: no file of reward-0.0" in judged["I10"].why


@pytest.mark.parametrize(("lived_on_s", "is_clean"), [(1.0, True), (20.0, False)])
def test_the_last_scores_of_a_killed_reward_may_be_lost(lived_on_s: float, is_clean: bool, tmp_path: Path) -> None:
    """Of an attempt that was lost, too: nobody sends it again."""

    def edit(forge: Forge) -> None:
        lines = forge.lines[REWARD]
        at = lines.index(forge.of(REWARD, "score", uid=5, sample=1)[0])
        score = {**lines[at], "attempt": 0}
        last = {**score, "event": "spans", "s_work": 0.0, "wall": score["wall"] + lived_on_s}
        forge.lines["reward-0.1"] = [{**lines[0]}, *lines[at:]]
        lines[at:] = [score, last]
        forge.lines[HEAD].remove(forge.of(HEAD, "refused")[0])

    assert ("I9" not in found(tmp_path, edit).findings.first) is is_clean


# what the head says of weights and samples is what their makers say (I5)


@forgery("I5", "are those of the completion: (5, 'stop', 1, 1), not (5, 'length', 1, 1)")
def a_finish_that_changes_on_its_way(forge: Forge) -> None:
    for line in forge.of(HEAD, "scored", uid=4) + forge.of(HEAD, "trajectory", uid=4):
        line["finish"] = "length"


def test_I6_a_sample_begun_in_another_generators_file_is_caught(tmp_path: Path) -> None:
    """Prompt 4 is leased to generator 0, and generator 1 says that it made it."""

    def edit(forge: Forge) -> None:
        mine, other = (forge.lines[name] for name in GENERATORS)
        moved = [line for line in mine if line.get("uid") == 4]
        mine[:] = [line for line in mine if line.get("uid") != 4]
        other[:] = sorted([*other, *moved], key=lambda line: line["t"])

    broken = caught(tmp_path, "I6", edit, "its holder samples a lease: it is generator-0.0's, generator-1.0 began it")
    assert any("generator-1.0 completed it, not generator-0.0" in x.text for x in broken.findings.first["I6"])


@forgery("I6", "one generator samples an attempt: generator-0.0 does")
def an_attempt_that_two_generators_sample(forge: Forge) -> None:
    mine, other = (forge.lines[name] for name in GENERATORS)
    moved = [line for line in mine if line.get("uid") == 4 and line.get("sample") == 1]
    mine[:] = [line for line in mine if line not in moved]
    other[:] = sorted([*other, *moved], key=lambda line: line["t"])


@pytest.mark.parametrize("n_tokens", [5, 6])
def test_a_late_report_of_a_sample_has_the_tokens_of_its_verdict(n_tokens: int, tmp_path: Path) -> None:
    def edit(forge: Forge) -> None:
        late = forge.of(HEAD, "sampled", uid=4, sample=1)[0]
        trained = forge.of(HEAD, "trajectory", uid=4, sample=1)[0]
        late |= {"n_tokens": n_tokens, "t": trained["t"]}
        move(forge, late, after=trained)

    if n_tokens == 5:
        assert not found(tmp_path, edit).findings.first
    else:
        caught(tmp_path, "I12", edit, "tokens sampled are those of the verdict: 5, not 6")


FORGERIES: tuple[tuple[str, Edit, str], ...] = (
    *MADE,
    ("I2", lambda f: f.of(HEAD, "update", version=3)[0].pop("lag_max"), "lag_max is missing"),
    ("I5", put(HEAD, "update", {"digest": "rubbish"}, version=2),
     "a version is one set of weights: digest rubbish here, digest of 2"),
    ("I5", put(HEAD, "trajectory", {"finish": "length"}, uid=4),
     "a trajectory ends as it was received: stop, not length"),
    *[("I5", put(HEAD, "scored", {name: 0}, uid=4, sample=1), "are those of the completion: (5, 'stop', 1, 1)")
      for name in ("min_version", "max_version")],
    *[(invariant, put(HEAD, "sampled", {name: value}, uid=4, sample=1), rule)
      for invariant, name, value, rule in (
          ("I3", "uid", 99, "only an admitted prompt is sampled: 6 were"),
          ("I6", "attempt", 1, "what is leased is sampled: attempt 1, leased is 0"),
          ("I8", "sample", 2, "unknown sample 2: a group has samples 0..1"),
          ("I12", "n_tokens", 6, "tokens sampled are those of the completion: 5, not 6"),
          ("I5", "uid", 5, "missing completion of generator-1.0, the generator of this sample"),
      )],
    ("I6", drop(HEAD, "push", version=3),
     "a generator comes to hold a version by a push in flight: generator-0.0 3, in flight"),
    ("I6", put(HEAD, "publish", {"members": 99}, version=3),
     "members are those that completed the push: 1 hold version 3, not 99"),
    ("I6", drop(GENERATORS[0], "pushed", version=3),
     "a push is complete where its member says so: generator-0.0 has no line of push 3"),
)  # fmt: skip


@pytest.mark.parametrize(("invariant", "edit", "rule"), FORGERIES, ids=[rule for _, _, rule in FORGERIES])
def test_a_forged_log_of_an_actor_is_caught_with_its_rule(
    tmp_path: Path, invariant: str, edit: Edit, rule: str
) -> None:
    caught(tmp_path, invariant, edit, rule)
