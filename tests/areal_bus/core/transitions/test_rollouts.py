"""Scores that fail: refunded, left out of a short group, or trained with a declared reward; and reported."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from areal_bus import messages as m
from areal_bus.core.effects import Effect
from areal_bus.core.events import Event
from areal_bus.core.head import Head
from areal_bus.core.parts.ledger import Ledger
from areal_bus.core.parts.staleness import StalenessPolicy
from areal_bus.core.transitions.batcher import Batcher
from areal_lab.staleness.simulator.ring import Ring
from areal_lab.staleness.simulator.scenario import Fault, Scenario, ScenarioLengths, Tail
from tests.areal_bus.core.test_head import head_with, lines, records, scored, sent, warnings
from tests.tools.audit.test_simulated import Recorded, journal
from tools.audit.audit import audit, judge
from tools.audit.findings import InvariantVerdict
from tools.run import Run

POLICIES = [{"partial_groups": True}, {"on_timeout": -1.0, "on_error": -2.0}, {"partial_groups": True, "on_error": 0.0}]


def failed(uid: int, sample: int, status: str = "error") -> m.Scored:
    return replace(scored(uid, sample), status=status, reward=777.0, error="ValueError: no number in '12x'")


def deliver(head: Head, *verdicts: m.Scored) -> list[Effect]:
    return [effect for verdict in verdicts for effect in head.on("reward-0.0", verdict, 0.0)]


# the head


def test_a_short_group_is_trained_and_names_its_missing_samples() -> None:
    head, _ = head_with(batch_size=1, n_samples=4, partial_groups=True)
    head.on("learner-0.0", m.BatchRequest(0), 0.0)
    effects = deliver(head, failed(0, 2), scored(0, 0), failed(0, 1, "timeout"), scored(0, 3))
    assert not records(effects, Event.REFUND)
    assert records(effects, Event.READY) == [{"uid": 0, "missing": [1, 2]}]
    (batch,) = records(effects, Event.BATCH)
    length = scored(0, 0).n_sampled
    told = (batch["n_trajectories"], batch["missing"], batch["n_tokens_dropped"])
    assert told == (2, [0, 1, 0, 2], 2 * length)
    assert [line["sample"] for line in records(effects, Event.TRAJECTORY)] == [0, 3]
    assert [item.sample for _, item in sent(effects, m.ShardItem)] == [0, 3]  # type: ignore[union-attr]


def test_a_group_is_refunded_as_soon_as_fewer_than_two_samples_can_be_left() -> None:
    head, _ = head_with(batch_size=1, n_samples=3, partial_groups=True)
    assert not records(deliver(head, failed(0, 2)), Event.REFUND)
    (refund,) = records(deliver(head, failed(0, 0)), Event.REFUND)  # sample 1 has no verdict yet
    length = scored(0, 0).n_sampled
    assert (refund["reason"], refund["n_scored"], refund["n_tokens_dropped"]) == ("reward_error", 2, 2 * length)


def test_a_declared_reward_stands_for_its_verdict_and_the_verdict_stays() -> None:
    head, _ = head_with(batch_size=1, n_samples=3, on_timeout=-1.0, on_error=-2.5)
    head.on("learner-0.0", m.BatchRequest(0), 0.0)
    effects = deliver(head, failed(0, 1, "timeout"), failed(0, 2), scored(0, 0))
    told = [(line["status"], line["reward"]) for line in records(effects, Event.SCORED)]
    assert told == [("timeout", -1.0), ("error", -2.5), ("value", 1.0)]
    assert [line["reward"] for line in records(effects, Event.TRAJECTORY)] == [1.0, -1.0, -2.5]
    assert [item.reward for _, item in sent(effects, m.ShardItem)] == [1.0, -1.0, -2.5]  # type: ignore[union-attr]
    assert "missing" not in records(effects, Event.BATCH)[0]


def test_a_failed_sample_is_not_made_again_when_its_holder_dies() -> None:
    head, _ = head_with(n_generators=2, batch_size=1, n_samples=3, partial_groups=True)
    holders = {uid: entry.holder or "" for uid, entry in head.state.ledger.open.items()}
    deliver(head, *(scored(1, sample, generator=holders[1]) for sample in range(3)))  # it has room for others
    deliver(head, replace(failed(0, 1), generator=holders[0]))
    effects = head.on(holders[0], m.Disconnected(), 0.0)
    (again,) = [prompt for _, prompt in sent(effects, m.Prompt) if prompt.uid == 0]  # type: ignore[union-attr]
    assert again.samples == [0, 2]  # type: ignore[union-attr]


def test_an_evaluation_counts_a_declared_verdict_as_failed() -> None:
    head, _ = head_with(n_samples=2, n_problems=1, on_error=-1.0)
    assert head.state.evaluations.open is not None
    answers = [replace(failed(0, 0), evaluation="before"), replace(scored(0, 1), evaluation="before")]
    (figures,) = records(deliver(head, *answers), Event.EVALUATION)
    assert (figures["n"], figures["n_failed"], figures["reward"]) == (2, 1, 1.0)


# what is said


def test_many_failed_scores_are_warned_of_early_once_and_at_the_end() -> None:
    head, _ = head_with(batch_size=64, eta=0, n_samples=2, on_error=0.0)
    effects: list[Effect] = []
    for uid in range(30):
        answers = [failed(uid, 0) if uid % 5 == 0 else scored(uid, 0), scored(uid, 1)]
        effects += deliver(head, *answers)
    (early,) = warnings(effects)
    assert early.startswith("4 of 40 scores failed (10.0 %: 4 errors); most often, 4 times: ValueError: no number in")
    assert "reward.on_error" in early
    head.phases.end(1, "it is over")
    (late,) = warnings(head._effects.take())
    assert late.startswith("over the whole run 6 of 60 scores failed (10.0 %: 6 errors)")
    quiet, _ = head_with(batch_size=300, eta=0, n_samples=2, on_error=0.0)
    for uid in range(200):  # 5 %, no more
        answers = [failed(uid, 0) if uid % 12 == 11 else scored(uid, 0), scored(uid, 1)]
        assert not warnings(deliver(quiet, *answers))
    quiet.phases.end(0, "done")
    assert not warnings(quiet._effects.take())


# whole rings, simulated


def dying(seed: int, policy: StalenessPolicy, **more: Any) -> Scenario:
    """Generators, a learner and the head die."""
    faults = (
        Fault("crash", m.Role.GENERATOR, 0, 30.0, 2.0),
        Fault("crash", m.Role.LEARNER, 0, 60.0 + seed, 2.0),
        Fault("crash", m.Role.HEAD, 0, 90.0 + 3 * seed, 2.0),
    )
    standard: dict[str, Any] = {"n_samples": 3 + seed % 3, "faults": faults if seed % 2 else ()}
    return Scenario(
        seed=seed, policy=policy, batch_size=2, eta=seed % 3, total_steps=12, calm_s=130.0, checkpoint_every=2,
        lengths=ScenarioLengths(Tail.LOG_NORMAL, 5.0, 1.0, 120), checkpoint_keep=2, silent_s=25.0, tick_s=6.0,
        **standard | more,
    )  # fmt: skip


def scenario(seed: int, policy: StalenessPolicy, **declared: Any) -> Scenario:
    """One score of five fails."""
    return dying(seed, policy, p_error=0.2, **declared)


def trains_what_failed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "fail", Ledger.deliver)


def names_nobody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("areal_bus.core.transitions.batcher._left_out", lambda entries: {})


def trains_one_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("areal_bus.core.parts.ledger.LEAST", 1)


def declares_nothing(patch: pytest.MonkeyPatch) -> None:
    """The reward that came with the verdict, whatever it is, goes on to the learner."""
    patch.setattr("areal_bus.core.transitions.rollouts.replace", lambda message, **_: message)


def loses_a_sample(patch: pytest.MonkeyPatch) -> None:
    """A group goes out without a sample that has a reward."""
    take = Batcher.take

    def wrong(self: Any, n_groups: int) -> Any:
        batch = take(self, n_groups)
        for entry in batch.entries:
            if entry.failed:
                entry.scored.pop(min(entry.scored))
        return batch

    patch.setattr(Batcher, "take", wrong)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sabotage", "declared", "noticed"),
    [
        (trains_what_failed, POLICIES[0], "I10 "),
        (names_nobody, POLICIES[0], "I12 |I8 "),
        (trains_one_alone, POLICIES[0], "I8 "),
        (loses_a_sample, POLICIES[0], "I8 "),
        (declares_nothing, POLICIES[1], "I10 "),
    ],
)
def test_a_rule_of_verdicts_left_out_is_detected(
    monkeypatch: pytest.MonkeyPatch,
    sabotage: Callable[[pytest.MonkeyPatch], None],
    declared: dict[str, Any],
    noticed: str,
) -> None:
    sabotage(monkeypatch)
    found: list[str] = []
    for seed in range(20):
        found += map(str, Ring(scenario(seed, StalenessPolicy.MASK, **declared)).run().violations[:1])
    assert found
    assert found[0].startswith(tuple(noticed.split("|")))


# the audit, over journals that are not true


@pytest.mark.parametrize(
    ("declared", "event", "edit", "found"),
    [
        (POLICIES[0], Event.BATCH, lambda line: line.pop("missing", []) and line.pop("n_tokens_dropped"),
         {"I8": "a batch names the samples that its groups go without",
          "I12": "dropped tokens of a batch are those of the samples left out"}),
        (POLICIES[1], Event.SCORED, lambda line: line["status"] == "timeout" and not line.update(reward=1.0),
         {"I10": "a timeout has the reward of reward.on_timeout, -1: 1.0"}),
        (POLICIES[0], Event.SCORED, lambda line: line["status"] == "error" and not line.update(status="value"),
         {"I8": "a short group names the samples"}),
    ],
)  # fmt: skip
def test_the_audit_catches_a_forged_line_of_verdicts(
    tmp_path: Path, declared: dict[str, Any], event: Event, edit: Callable[[dict[str, Any]], Any], found: dict[str, str]
) -> None:
    plan = scenario(2, StalenessPolicy.MASK, **declared)
    ring = Recorded(plan)
    assert not ring.run().violations
    assert any(map(edit, lines(ring, event)))  # one line is another
    judged = judge(audit(Run(journal(tmp_path, plan, ring))))
    for invariant, text in found.items():
        assert judged[invariant].verdict is InvariantVerdict.BROKEN
        assert text in judged[invariant].findings[0].text


def test_the_audit_catches_a_short_group_that_no_policy_allows(tmp_path: Path) -> None:
    plan = scenario(2, StalenessPolicy.MASK, **POLICIES[0])
    ring = Recorded(plan)
    ring.run()
    found = judge(audit(Run(journal(tmp_path, replace(plan, partial_groups=False), ring))))
    assert any("is no number: its group is refunded, never ready" in x.text for x in found["I10"].findings)
    assert any("without reward.partial_groups every group" in x.text for x in found["I8"].findings)
