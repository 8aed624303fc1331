"""What a generator had reported when its lease was lost is handed on, and only what the next holder can go on from."""

import random
from dataclasses import replace

from areal_bus import messages as m
from areal_bus.core.effects import Effect, Progress, Record
from areal_bus.core.events import Event
from areal_bus.core.head import Head
from areal_bus.core.parts.head_checkpoint import START
from areal_bus.core.parts.partial_rollouts import RECORD_BYTES, SPAN_BYTES, PartialRollouts, SampleOffers
from areal_bus.core.parts.staleness import StalenessPolicy
from areal_bus.core.parts.terms import TermHistory
from areal_bus.core.state import HeadState
from areal_bus.messages import Partial, Role
from areal_lab.staleness.simulator.ring import Ring
from areal_lab.staleness.simulator.scenario import Fault, Numbers, Scenario, ScenarioLengths, Tail, draw
from tests.areal_bus.core.parts.test_terms import begin, saved, trained_head
from tests.areal_bus.core.test_head import head_with, joined, push_done, records, refused, scenario, sent


def partial(
    uid: int, sample: int = 0, *, n: int = 5, version: int = 0, attempt: int = 0, term: int = 0, n_given: int = 2
) -> Partial:
    spans = [[version, n]] if version == 0 else [[0, 1], [version, n - 1]]
    return Partial(uid, sample, attempt, term, [[n_given, n]], spans, bytes(4 * (n_given + n)), bytes(4 * n))


# what is kept


def test_the_newest_report_of_a_sample_is_kept_and_those_of_longest_ago_make_room() -> None:
    size = RECORD_BYTES + SPAN_BYTES + 4 * 12
    kept = PartialRollouts(2 * size)
    kept.keep(partial(0))
    kept.keep(partial(1))
    kept.keep(partial(0))  # now prompt 1 is the one of longest ago
    assert (len(kept), kept.n_bytes) == (2, 2 * size)
    kept.keep(partial(2))
    assert (len(kept), kept.n_bytes) == (2, 2 * size)
    assert not kept.hand_on(1, [0], attempt=1, version=0)
    assert kept.hand_on(0, [0], attempt=1, version=0) == [partial(0, attempt=1)]
    kept.keep(partial(3, n=4 * size))  # larger than all the room
    assert (len(kept), kept.n_bytes) == (0, 0)


# the head


def test_a_partial_newer_than_the_next_holders_version_is_dropped() -> None:
    kept = PartialRollouts(1 << 20)
    kept.keep(partial(0, 0, version=2))
    kept.keep(partial(0, 1, version=1))
    assert kept.hand_on(0, [0, 1], attempt=1, version=1) == [partial(0, 1, version=1, attempt=1)]
    assert len(kept) == 1
    assert kept.hand_on(0, [1], attempt=2, version=1) == [partial(0, 1, version=1, attempt=2)]  # once more


def work_of(head: Head, name: str) -> list[int]:
    return [entry.uid for entry in head.state.ledger.live() if entry.holder == name]


def die(head: Head, name: str) -> list[Effect]:
    """Its next incarnation joins and holds what is published."""
    actor, _, incarnation = name.rpartition(".")
    new = f"{actor}.{int(incarnation) + 1}"
    effects = joined(head, new)
    if head.state.pushes.current is not None:
        effects += push_done(head, "learner-0.0", head.state.gate.v)
        effects += push_done(head, new, head.state.gate.v)
    return effects


def leases(effects: list[Effect], uid: int) -> list[dict[str, object]]:
    return [line for line in records(effects, Event.LEASE) if line["uid"] == uid]


def test_after_a_death_the_partial_is_sent_before_the_prompt() -> None:
    head, _ = head_with()
    uid, other = work_of(head, "generator-0.0")[:2]
    assert not refused(head.on("generator-0.0", partial(uid, 1, n=3), 0.0))
    assert not refused(head.on("generator-0.0", partial(uid, 1, n=7), 0.0))
    effects = die(head, "generator-0.0")
    handed = sent(effects, Partial)
    assert handed == [("generator-0.1", partial(uid, 1, n=7, attempt=1))]
    told = [type(message) for _, message in sent(effects, m.Prompt | Partial) if message.uid == uid]  # type: ignore[arg-type, union-attr]
    assert told == [Partial, m.Prompt]
    assert [line.get("n_done") for line in leases(effects, uid)] == [7]
    assert "n_done" not in leases(effects, other)[0]


def test_a_report_that_contradicts_itself_or_is_of_another_is_refused_and_ends_nothing() -> None:
    head, _ = head_with(n_generators=2)
    uid = work_of(head, "generator-0.0")[0]
    good = partial(uid)
    for name, bad, why in [
        ("generator-1.0", good, "does not hold"),
        ("generator-0.0", replace(good, attempt=1), "does not hold"),
        ("generator-0.0", replace(good, sample=9), "does not hold"),
        ("generator-0.0", partial(99), "does not hold"),
        ("generator-0.0", partial(uid, version=1), "to the clock 0"),
        ("generator-0.0", replace(good, spans=[[0, 4]]), "cover the same tokens"),
        ("generator-0.0", replace(good, segments=[[2, 3], [0, 2]]), "one turn"),
        ("generator-0.0", replace(good, segments=[[0, 5]]), "begins with one or more tokens of its prompt"),
        ("generator-0.0", replace(good, ids=b""), "one turn"),
        ("reward-0.0", good, "a reward may not send Partial"),
    ]:
        effects = head.on(name, bad, 0.0)
        assert why in refused(effects)[0]
        assert [type(effect) for effect in effects if not isinstance(effect, Progress)] == [Record]
    assert len(head.state.partials) == 0
    assert uid in work_of(head, "generator-0.0")


def test_a_prompt_held_by_two_dead_generators_starts_without_its_partial() -> None:
    head, _ = head_with()
    uid = work_of(head, "generator-0.0")[0]
    head.on("generator-0.0", partial(uid), 0.0)
    assert [line.get("n_done") for line in leases(die(head, "generator-0.0"), uid)] == [5]
    head.on("generator-0.1", partial(uid, n=8, attempt=1), 0.0)
    effects = die(head, "generator-0.1")
    assert head.state.ledger.open[uid].alone
    assert [line.get("n_done") for line in leases(effects, uid)] == [None]
    assert not [x for x in sent(effects, Partial) if x[1].uid == uid]  # type: ignore[union-attr]


def revived() -> Head:
    """A head that came back: prompts 1 (one verdict) and 2 (none) are open in the checkpoint of version 1."""
    _, effects = trained_head()
    (frontier,) = saved(effects)
    rules = scenario(batch_size=1, eta=2, n_samples=2, checkpoint_every=1).rules
    state = HeadState(rules, Numbers(None), incarnation=1, term=1, checkpoints={**START, 1: frontier})
    head = Head(state, now=0.0)
    joined(head, "reward-0.0")
    joined(head, "generator-0.0", again=1)
    begin(head, 1)
    return head


def test_a_restarted_head_leases_the_partials_of_the_previous_head() -> None:
    head = revived()
    assert not refused(head.on("generator-0.0", partial(1, 1, n=4), 0.0))
    effects = push_done(head, "learner-0.1", 1) + push_done(head, "generator-0.0", 1)
    assert [message for _, message in sent(effects, Partial)] == [partial(1, 1, n=4, attempt=m.ATTEMPTS)]
    assert [line.get("n_done") for line in leases(effects, 1)] == [4]
    assert "n_done" not in leases(effects, 2)[0]
    assert refused(head.on("generator-0.0", partial(2, 0), 0.0))  # it comes too late: the prompt is leased again


def test_only_offers_of_prompts_open_in_the_checkpoint_are_accepted() -> None:
    head = revived()
    for bad, why in [
        (partial(0), "does not hold"),  # trained
        (partial(1, 0), "does not hold"),  # scored
        (partial(3), "does not hold"),  # admitted later
        (partial(2, attempt=1), "does not hold"),  # of another lease
        (partial(2, version=2), "versions that term 1 made void"),
    ]:
        assert why in refused(head.on("generator-0.0", bad, 0.0))[0]
    assert len(head.state.partials) == 0


def test_partials_up_to_the_base_version_are_offered_in_the_next_term() -> None:
    held = [partial(1, version=1), partial(2, version=2)]
    for term, base, valid in [(1, 1, held[:1]), (1, 2, held), (1, 0, []), (0, 9, []), (2, 9, [])]:
        offers = SampleOffers()
        offers.keep(held, TermHistory())
        offers.keep([], TermHistory())  # asked again before the term began
        assert offers.take(term, base) == valid
        assert offers.take(term, base) == []


# whole rings


def deadly(seed: int) -> Scenario:
    """Long samples, many updates, generators that die often, and at times the learner or the head."""
    rng = random.Random(f"partials {seed}")
    scenario = draw(seed, tuple(StalenessPolicy)[seed % 4])
    calm_s = 200.0
    faults = [
        Fault(rng.choice(("crash", "crash", "stop", "cut")), Role.GENERATOR, rng.randrange(scenario.n_generators),
              rng.uniform(15, calm_s), rng.choice((2.0, 10.0, 30.0)))
        for _ in range(rng.randint(2, 6))
    ]  # fmt: skip
    if rng.random() < 0.5:
        faults.append(Fault("crash", rng.choice((Role.LEARNER, Role.HEAD)), 0, rng.uniform(20, calm_s), 2.0))
    interrupts = rng.random() < 0.9
    return replace(
        scenario, faults=tuple(faults), calm_s=calm_s, eta=max(1, scenario.eta), total_steps=9, n_rows=None,
        lengths=ScenarioLengths(Tail.PARETO, 8.0, 1.0, 300), update_s=0.5, push_s=0.5, link_s=min(scenario.link_s, 0.2),
        report_tokens=rng.choice((1, 1, 3)), capacity=8, interrupts=interrupts, joins_s=(), tick_s=4.0,
        heartbeat_s=6.0, silent_s=20.0, push_timeout_s=25.0 if interrupts and not scenario.finishes else 500.0,
    )  # fmt: skip


def test_a_copy_older_than_the_newest_update_undoes_it_though_a_full_disk_took_its_savepoint() -> None:
    assert not Ring(deadly(1120)).run().violations
