"""Terms: what a head keeps of a version, what it goes back to, and who died in between."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from areal_bus import messages as m
from areal_bus.core.effects import Discard, Effect, End, Record, Save
from areal_bus.core.events import Event
from areal_bus.core.head import Head
from areal_bus.core.parts.head_checkpoint import START, HeadCheckpoint, HeadSavepoint, OpenPrompt, revive
from areal_bus.core.parts.ledger import LedgerEntry, PromptState
from areal_bus.core.parts.terms import Terms
from areal_bus.core.rows import IssuedRow, Row
from areal_bus.core.state import HeadState
from areal_bus.messages import ATTEMPTS, Refund
from areal_lab.staleness.simulator.scenario import Numbers
from tests.areal_bus.core.test_head import (
    end_of,
    head_with,
    joined,
    push_done,
    records,
    refused,
    scenario,
    scored,
    sent,
)

RULES = scenario().rules
LEARNER, REWARD, GENERATOR = "learner-0.0", "reward-0.0", "generator-0.0"


def say(head: Head, name: str, message: m.Message, now: float = 0.0) -> list[Effect]:
    return head.on(name, message, now)


def begin(head: Head, version: int, learner: str = "learner-0.1") -> list[Effect]:
    """A learner comes back with the checkpoint of this version."""
    return joined(head, learner) + say(head, learner, m.BeginTerm(version, f"digest {version}", head.state.incarnation))


def hold(head: Head, version: int, *, learner: str = LEARNER, generator: str = GENERATOR) -> list[Effect]:
    """The push in flight is complete."""
    return push_done(head, learner, version) + push_done(head, generator, version)


def leases(effects: list[Effect]) -> dict[object, object]:
    """uid -> attempt of what was leased."""
    return {line["uid"]: line["attempt"] for line in records(effects, Event.LEASE)}


def saved(effects: list[Effect]) -> list[HeadCheckpoint]:
    return [effect.checkpoint for effect in effects if isinstance(effect, Save)]


def score(
    head: Head, uid: int, samples: list[int], *, attempt: int = 0, version: int = 0, term: int = 0
) -> list[Effect]:
    effects: list[Effect] = []
    for sample in samples:
        verdict = replace(scored(uid, sample, attempt, version), term=term)
        effects += say(head, REWARD, verdict)
    return effects


def train_one(head: Head, step: int, uid: int, learner: str = LEARNER) -> list[Effect]:
    """Score a whole prompt, and train it as the batch of this step (B = 1)."""
    attempt = head.state.ledger.open[uid].attempt
    effects = score(head, uid, [0, 1], attempt=attempt, version=head.state.gate.v, term=head.state.terms.term)
    effects += say(head, learner, m.BatchRequest(step, head.state.incarnation))
    return effects + say(head, learner, m.UpdateDone(step + 1, {}, f"digest {step + 1}"))


def trained_head(**changes: object) -> tuple[Head, list[Effect]]:
    """B = 1, eta = 2, n = 2: prompts 0, 1 and 2 were admitted at version 0, 0 was trained, and 1 has one verdict."""
    settings = {"batch_size": 1, "eta": 2, "n_samples": 2, "checkpoint_every": 1} | changes
    plan = scenario(**settings)
    head, effects = head_with(**settings, capacity=plan.capacity)
    say(head, GENERATOR, m.Sampled(0, 0, 0, "", 3))
    score(head, 1, [0])
    return head, effects + train_one(head, 0, 0)


# what a frontier keeps


def test_a_head_checkpoint_has_data_ledger_and_verdicts_at_the_end_of_its_update() -> None:
    head, effects = trained_head()
    (frontier,) = saved(effects)
    assert (frontier.version, frontier.next_uid, frontier.position) == (1, head.state.ledger.next_uid, 3)
    assert [prompt.uid for prompt in frontier.open] == [1, 2]
    assert [[verdict.sample for verdict in prompt.scored] for prompt in frontier.open] == [[0], []]
    assert [prompt.issue.drawn.row for prompt in frontier.open] == [1, 2]


def test_frontiers_are_taken_at_every_version_that_is_due_and_at_the_last() -> None:
    head, effects = trained_head(checkpoint_every=2, total_steps=3)
    for step in (1, 2):
        hold(head, step)
        effects += train_one(head, step, step)
    assert [frontier.version for frontier in saved(effects)] == [2, 3]
    refunded = {line["uid"] for line in records(effects, Event.REFUND)}
    assert {prompt.uid for prompt in saved(effects)[-1].open} == refunded != set()  # for a run that is extended


def test_a_checkpoint_by_time_gets_its_head_checkpoint() -> None:
    """The learner's clock decides, and UpdateDone says so."""
    head, effects = trained_head(checkpoint_every=0)
    assert not saved(effects)
    hold(head, 1)
    score(head, 1, [1], version=1)
    say(head, LEARNER, m.BatchRequest(1))
    (frontier,) = saved(say(head, LEARNER, m.UpdateDone(2, {}, "digest 2", kept=True)))
    assert frontier.version == 2


# what lives on


def verdict(sample: int, version: int) -> m.Scored:
    return scored(7, sample, version=version)


def open_prompt(*verdicts: m.Scored) -> OpenPrompt:
    return OpenPrompt(7, 0, 3, 0, 1, IssuedRow(Row(7, 0, "{}"), 0), verdicts)


def known(state: PromptState, holder: str | None, *verdicts: m.Scored) -> LedgerEntry:
    entry = LedgerEntry(7, 0, 3, holder, attempt=4, state=state, n_deaths=2, alone=holder is not None)
    entry.scored = {verdict.sample: verdict for verdict in verdicts}
    entry.sampled = {verdict.sample for verdict in verdicts} | {2}
    return entry


MIXED = replace(verdict(0, 5), spans=[[5, 2], [6, 1]])  # a single token of a later version


@pytest.mark.parametrize(
    ("kept", "entry", "holder", "samples"),
    [
        (open_prompt(verdict(0, 2)), None, None, [0]),  # unknown to the head: as in the checkpoint
        (open_prompt(), known(PromptState.LEASED, "g", verdict(0, 5)), "g", [0]),
        (open_prompt(), known(PromptState.SCORING, "g", verdict(0, 5), verdict(1, 6)), None, [0]),
        (open_prompt(), known(PromptState.LEASED, "g", MIXED), None, []),
        (open_prompt(), known(PromptState.TRAINING, None, verdict(0, 1)), None, [0]),
        (open_prompt(), known(PromptState.READY, None, verdict(0, 1)), None, [0]),
        (open_prompt(), known(PromptState.QUEUED, None, verdict(0, 1)), None, [0]),
    ],
)
def test_verdicts_of_later_versions_go_and_their_lease_with_them(
    kept: OpenPrompt, entry: LedgerEntry | None, holder: str | None, samples: list[int]
) -> None:
    revived = revive(kept, entry, 5, RULES.reward_of)
    assert (revived.holder, sorted(revived.scored), revived.alone) == (holder, samples, holder is not None)
    if entry is None:
        assert (revived.attempt, revived.n_deaths) == (0, 1)
    if holder is not None:  # its lease goes on
        assert (revived.state, revived.attempt, revived.n_deaths) == (PromptState.LEASED, 4, 2)
        assert revived.sampled == {0, 2}


# going back


def test_a_version_without_head_checkpoint_ends_the_job() -> None:
    head, _ = trained_head()
    assert end_of(begin(head, 5)) == End(1, "missing head checkpoint of version 5, at which learner-0.1 begins")


def test_nothing_is_pushed_before_the_learner_has_begun() -> None:
    """The old one died in the push of version 1, so its generator waits for weights; the new one has none of it yet."""
    head, _ = trained_head()
    push = head.state.pushes.current
    assert push is not None
    effects = joined(head, "learner-0.1")
    effects += say(head, GENERATOR, m.PushBroken(push.id, 1, "the group broke"))
    assert str(head.state.members.by_name[GENERATOR].standing) == "stale"
    assert not sent(effects, m.PushBegin)
    assert sent(say(head, "learner-0.1", m.BeginTerm(1, "digest 1")), m.PushBegin)


# results of older terms


def going_back(version: int) -> Head:
    """Prompt 1 is leased at attempt 0, one sample scored; the learner came back at version 1. Its lease was kept."""
    head, _ = trained_head()
    begin(head, version)
    assert head.state.ledger.open[1].holder == GENERATOR
    return head


def test_a_sample_of_an_older_term_with_a_lost_version_ends_its_lease() -> None:
    head = going_back(1)
    hold(head, 1, learner="learner-0.1")
    effects = score(head, 1, [1], version=2)
    assert "versions that term 1 made void" in refused(effects)[0]
    assert [to for to, _ in sent(effects, m.Ack)] == [GENERATOR]  # it need not send that again
    assert m.Cancel(1, 0) in [message for _, message in sent(effects, m.Cancel)]
    assert leases(effects) == {1: ATTEMPTS}


def test_prompts_returned_by_a_generator_are_leased_again() -> None:
    head = going_back(1)
    hold(head, 1, learner="learner-0.1")
    lost = m.SampleFailed(1, 0, "", Refund.LOST_TIMELINE, "term 1")
    effects = say(head, GENERATOR, lost)
    assert leases(effects) == {1: ATTEMPTS}
    assert not records(effects, Event.REFUND)
    assert refused(say(head, GENERATOR, lost))


def test_the_verdicts_of_an_open_evaluation_go_and_its_problems_are_asked_again() -> None:
    head, _ = head_with(n_problems=2)
    held = {lease[:3] for lease in head.state.members.by_name[GENERATOR].leased}
    assert held == {("before", 0, 0), ("before", 1, 0)}
    effects = begin(head, 0)
    assert [message for _, message in sent(effects, m.Cancel)] == [m.Cancel(0, 0, "before"), m.Cancel(1, 0, "before")]
    assert not head.state.members.by_name[GENERATOR].leased
    push_done(head, "learner-0.1", 0)
    asked = [message for _, message in sent(push_done(head, GENERATOR, 0), m.Prompt)]
    assert [(x.evaluation, x.uid, x.attempt) for x in asked[:2]] == [("before", 0, ATTEMPTS), ("before", 1, ATTEMPTS)]  # type: ignore[union-attr]


def test_the_slots_of_a_group_given_back_are_free_though_its_evaluation_is_over() -> None:
    head, _ = head_with(n_problems=1)
    member = head.state.members.by_name[GENERATOR]
    head.state.evaluations.open = None
    head.state.figures["before"] = {"name": "before"}
    assert refused(say(head, GENERATOR, m.SampleFailed(0, 0, "before", Refund.LOST_TIMELINE, "")))
    assert not [lease for lease in member.leased if lease[0]]


# who begins


@pytest.mark.parametrize(
    ("sender", "message", "why"),
    [
        (LEARNER, m.BeginTerm(0, "digest 0"), "begins one term"),
        ("learner-1.0", m.BeginTerm(0, "digest 0"), "learner 0 begins a term"),
        ("learner-1.0", m.Checkpointed(1, ""), "learner 0 writes checkpoints"),
        (GENERATOR, m.Checkpointed(1, ""), "a generator may not send Checkpointed"),
        ("learner-0.1", m.UpdateDone(2, {}, "digest 2"), "has not begun this term"),
    ],
)
def test_a_report_of_a_learner_that_is_not_its_own_is_refused(sender: str, message: m.Message, why: str) -> None:
    head, _ = trained_head()
    if sender.startswith("learner-") and sender != LEARNER:
        joined(head, sender)
    assert why in refused(say(head, sender, message))[0]
    assert head.state.terms.term == 0


def test_a_request_for_a_batch_may_overtake_the_begin_of_its_term() -> None:
    head, _ = trained_head(n_learners=1)
    joined(head, "learner-0.1")
    assert not refused(say(head, "learner-0.1", m.BatchRequest(1)))
    assert set(head.state.terms.requests) == {0}
    say(head, "learner-0.1", m.BeginTerm(1, "digest 1"))
    push_done(head, "learner-0.1", 1)
    effects = push_done(head, GENERATOR, 1) + score(head, 1, [1], version=1)
    assert [to for to, _ in sent(effects, m.ShardEnd)] == ["learner-0.1"]
    assert refused(say(head, "learner-0.1", m.BatchRequest(7)))


def test_when_one_of_two_learners_comes_back_both_do() -> None:
    head = Head(HeadState(scenario(n_learners=2).rules, Numbers(None)), now=0.0)
    joined(head, LEARNER, "learner-1.0", REWARD, GENERATOR)
    say(head, LEARNER, m.BeginTerm(0, "digest 0"))
    say(head, LEARNER, m.BatchRequest(0))
    effects = joined(head, "learner-1.1")
    assert [to for to, _ in sent(effects, m.Rejoin)] == [LEARNER]
    assert LEARNER not in head.state.members.by_name
    assert not head.state.terms.requests
    effects = say(head, LEARNER, m.BatchRequest(0))
    assert refused(effects)
    assert sent(effects, m.Rejoin)  # its order may have been lost
    begin(head, 0)
    assert head.state.terms.term == 1


def test_the_end_waits_for_the_learners_that_are_there_now() -> None:
    head, _ = head_with(batch_size=1, total_steps=1, checkpoint_every=1)
    train_one(head, 0, 0)
    say(head, LEARNER, m.Finished("", ""))
    assert head.state.terms.finished
    effects = begin(head, 0)
    assert not head.state.terms.finished
    assert end_of(effects) is None


# strangers


def test_an_unknown_member_is_sent_rejoin_at_most_every_two_seconds() -> None:
    head, _ = head_with()
    beat = m.Heartbeat(1, None, "")
    told = [len(sent(head.on("generator-5.0", beat, now), m.Rejoin)) for now in (0.0, 1.0, 1.9, 2.0, 3.0)]
    assert told == [1, 0, 0, 1, 0]
    assert sent(head.on("generator-6.0", beat, 3.0), m.Rejoin)  # each for itself


def test_a_replaced_incarnation_is_sent_stop_for_every_message() -> None:
    head, _ = head_with()
    joined(head, "generator-0.1")
    for _ in range(2):
        effects = say(head, GENERATOR, m.Heartbeat(1, None, ""))
        assert [to for to, _ in sent(effects, m.Stop)] == [GENERATOR]
        assert not sent(effects, m.Rejoin)


def test_the_same_join_twice_is_one_and_a_later_one_of_the_same_member_loses_its_leases() -> None:
    head, effects = head_with()
    held = leases(effects)
    assert held
    again = say(head, GENERATOR, m.Join(GENERATOR, "generator", 0, 0, "", 1, ""))
    assert not records(again, Event.JOINED)
    assert head.state.members.by_name[GENERATOR].load
    assert sent(again, m.PeerList)
    anew = joined(head, GENERATOR, again=1)
    assert records(anew, Event.JOINED)
    assert head.state.members.by_name[GENERATOR].load == 0
    assert {entry.n_deaths for entry in head.state.ledger.live()} == {0}
    push_done(head, GENERATOR, 0)
    assert {entry.attempt for entry in head.state.ledger.live()} == {1}


# silence


def test_a_silent_learner_is_never_lost() -> None:
    head, _ = head_with()
    dead: list[object] = []
    for now in range(0, 400, 5):
        dead += [line["name"] for line in records(head.tick(float(now)), Event.MEMBER) if line["state"] == "dead"]
    assert dead == [REWARD, GENERATOR]
    assert str(head.state.members.by_name[LEARNER].standing) == "healthy"
    assert not refused(head.on(LEARNER, m.BatchRequest(0), 401.0))


# leaving and draining


def test_a_drained_job_keeps_open_prompts_and_ends_after_the_learners_checkpoint() -> None:
    head, _ = trained_head()
    effects = head.drain(1.0)
    assert not saved(effects)[0].version - 1  # the version that there is, with what is open in it
    (frontier,) = saved(effects)
    assert [prompt.uid for prompt in frontier.open] == [1, 2]
    assert not records(effects, Event.REFUND)
    effects = say(head, LEARNER, m.BatchRequest(1))
    assert [message for _, message in sent(effects, m.NoBatch)] == [m.NoBatch(1, True)]
    assert not leases(score(head, 1, [1]))
    assert end_of(say(head, LEARNER, m.Finished("", ""))) == End(0, "drained at version 1")


def test_a_drained_run_continues_with_its_open_prompts() -> None:
    head, _ = trained_head()
    (frontier,) = saved(head.drain(1.0))
    source, rules = Numbers(None), scenario(batch_size=1, eta=2).rules
    later = Head(HeadState(rules, source, incarnation=1, term=1, checkpoints={1: frontier}), now=0.0)
    joined(later, "learner-0.1", REWARD, "generator-0.1")
    say(later, "learner-0.1", m.BeginTerm(1, "digest 1", later.state.incarnation))
    push_done(later, "learner-0.1", 1)
    effects = push_done(later, "generator-0.1", 1)
    assert leases(effects) == {1: ATTEMPTS, 2: ATTEMPTS}
    prompts = [message for _, message in sent(effects, m.Prompt)]
    assert [(prompt.uid, prompt.samples) for prompt in prompts] == [(1, [1]), (2, [0, 1])]  # type: ignore[union-attr]
    assert source.position == 3


# prompts that kill


def test_after_two_deaths_a_prompt_is_sampled_alone_and_a_third_one_retires_it() -> None:
    head, _ = head_with(batch_size=2, eta=1, n_samples=2)
    ledger = head.state.ledger
    assert len(ledger.open) == 2  # as many as it has slots for
    for incarnation in (1, 2):
        name = f"generator-0.{incarnation}"
        joined(head, name)
        effects = hold(head, 0, generator=name)
    assert {entry.n_deaths for entry in ledger.live()} == {2}
    assert leases(effects) == {0: 2}  # nothing beside it
    assert ledger.open[0].alone
    effects = joined(head, "generator-0.3")
    assert [(line["uid"], line["reason"]) for line in records(effects, Event.REFUND)] == [(0, Refund.POISON)]
    assert "the last one had nothing else to do" in str(records(effects, Event.REFUND)[0]["error"])
    assert leases(hold(head, 0, generator="generator-0.3")) == {1: 2}


def test_a_prompt_that_its_lone_generator_survives_is_leased_with_others_again() -> None:
    head, _ = head_with(batch_size=2, eta=1, n_samples=2)
    for incarnation in (1, 2):
        joined(head, f"generator-0.{incarnation}")
        hold(head, 0, generator=f"generator-0.{incarnation}")
    assert leases(score(head, 0, [0, 1], attempt=2)) == {}
    for sample in (0, 1):
        effects = say(head, "generator-0.2", m.Sampled(0, sample, 2, "", 3))
    assert leases(effects) == {1: 2}
    effects = [x for sample in (0, 1) for x in say(head, REWARD, scored(1, sample, 2, generator="generator-0.2"))]
    assert len(leases(effects)) == 2  # new ones, side by side
    assert not head.state.ledger.refunds


# how long frontiers stay


def terms(*versions: int, keep: int = 1, frontiers: Mapping[int, HeadCheckpoint] = START) -> Terms:
    """Checkpoints of these versions are whole, and their frontiers."""
    found = Terms(0, frontiers, every=1, keep=keep)
    found.begin(0)
    for version in versions:
        found.checkpoints[version] = HeadCheckpoint(version)
        found.saved(found.checkpoints[version])
        found.checkpointed(version)
    return found


def test_frontiers_go_when_as_many_newer_ones_as_are_kept_were_whole_before_the_last_update() -> None:
    found = terms(1, 2, 3, keep=2)
    assert found.updated() == []
    found.hand_out()
    assert found.updated() == [0, 1]
    assert sorted(found.checkpoints) == [2, 3]


def test_a_checkpoint_alone_or_a_head_checkpoint_alone_makes_no_room() -> None:
    found = terms(1)
    found.checkpoints[2] = HeadCheckpoint(2)
    found.checkpointed(2)
    found.checkpoints[3] = HeadCheckpoint(3)
    found.saved(found.checkpoints[3])
    found.hand_out()
    assert found.updated() == [0]
    assert sorted(found.checkpoints) == [1, 2, 3]


def test_a_learner_that_chose_before_a_newer_head_checkpoint_was_durable_finds_its_own() -> None:
    """It wrote checkpoint 2 and died; its next life found no frontier 2 and chose 1, while that came to be there."""
    found = terms(1)
    found.hand_out()
    found.updated()
    found.checkpoints[2] = HeadCheckpoint(2)
    found.checkpointed(2)
    found.saved(found.checkpoints[2])
    assert found.updated() == []  # the word of one that may be dead
    assert found.begin(1) is not None
    assert found.later_than(1) == [2]


def test_a_head_checkpoint_of_a_lost_timeline_is_never_counted_as_saved() -> None:
    found = terms(1)
    late = found.checkpoints[2] = HeadCheckpoint(2)
    found.begin(1, sealed=[1])
    found.later_than(1)
    found.checkpoints[2] = HeadCheckpoint(2, next_uid=5)
    found.saved(late)
    found.checkpointed(2)
    found.hand_out()
    assert found.updated() == [0]
    assert 1 in found.checkpoints


def test_a_copy_undoes_updates_that_a_learner_or_a_checkpoint_tells_of() -> None:
    """After a restart of the head. The savepoint of version 4 was not written: the disk was full."""
    savepoint = HeadSavepoint(LEARNER, HeadCheckpoint(3))

    def revived(*versions: int) -> Terms:
        return Terms(1, {version: HeadCheckpoint(version) for version in (0, *versions)}, [savepoint], every=1, keep=1)

    assert revived().continues_at(3)
    assert not revived().continues_at(2), "no savepoint"
    assert not revived(4).continues_at(3)
    told = revived()
    assert told.begin(4, outlived=LEARNER) is None
    assert not told.continues_at(3)


def test_going_back_discards_later_checkpoints() -> None:
    head, _ = trained_head()
    hold(head, 1)
    score(head, 1, [1])
    train_one(head, 1, 1)
    effects = begin(head, 1)
    (discard,) = [effect for effect in effects if isinstance(effect, Discard)]
    assert discard.versions == (2,)
    is_line = [isinstance(effect, Record) and effect.event is Event.TERM for effect in effects]
    assert effects.index(discard) < is_line.index(True)  # so that a shell can wait for it with the term's line


def test_a_suspended_head_declares_no_member_dead() -> None:
    head, _ = head_with()
    head.tick(1.0)
    for now in (500.0, 501.0):
        assert not [line for line in records(head.tick(now), Event.MEMBER) if line["state"] == "dead"]
    assert str(head.state.members.by_name[GENERATOR].standing) == "healthy"
