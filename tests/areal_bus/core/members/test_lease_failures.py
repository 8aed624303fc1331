"""Generators whose leases fail: who is paused, for how long, who is evicted, and where their prompts go."""

from dataclasses import replace
from itertools import pairwise

from areal_bus import messages as m
from areal_bus.core.effects import Effect, EvictForGood, Progress
from areal_bus.core.events import Event
from areal_bus.core.head import Head
from areal_bus.core.members.lease_failures import EVICTIONS, FIRST, PATIENCE, LeaseFailures
from areal_bus.messages import Refund
from tests.areal_bus.core.test_head import end_of, head_with, joined, records, sent, warnings

BAD, GOOD = "generator-0.0", "generator-1.0"
GENERATORS = [f"generator-{index}.0" for index in range(4)]


def test_a_generator_that_fails_while_others_succeed_is_paused_with_doubling_delays_then_evicted() -> None:
    failures = LeaseFailures()
    now, pauses = 0.0, []
    for n in range(100):
        failures.succeeded(GOOD)
        failures.failed(BAD, f"error {n}")
        for pause in failures.judge(now):
            assert pause.name == BAD
            pauses.append((n, now, pause.evicts))
        while failures.is_paused(BAD):
            now += 0.5
            assert failures.judge(now) == []
        if pauses and pauses[-1][2]:
            break
    assert [n for n, _, _ in pauses] == list(range(FIRST - 1, FIRST + PATIENCE))
    assert [later - at for (_, at, _), (_, later, _) in pairwise(pauses)] == [1, 2, 4, 8, 16]
    assert [evicts for _, _, evicts in pauses] == [False] * PATIENCE + [True]
    assert failures.is_on_probation("generator-0.1")  # the next incarnation begins with one group at a time
    failures.succeeded("generator-0.1")
    assert not failures.is_on_probation("generator-0.1")
    assert not failures.is_paused("generator-0.1")


def test_failures_at_a_prompt_at_which_several_fail_count_against_none_of_them() -> None:
    failures = LeaseFailures()
    for n in range(50):
        failures.succeeded("generator-2.0")
        failures.failed(BAD, "a bad row")
        failures.failed(GOOD, "a bad row")
        failures.excuse({"generator-0", "generator-1"})
        assert failures.judge(float(n)) == []
    assert not failures.is_failing(BAD)


# the head


def fail(head: Head, uid: int, *, reason: str = Refund.SAMPLING_ERROR, now: float = 0.0) -> list[Effect]:
    """The holder of this prompt cannot sample it."""
    entry = head.state.ledger.open[uid]
    return head.on(entry.holder or "", m.SampleFailed(uid, entry.attempt, "", reason, "no memory"), now)


def test_a_prompt_goes_to_others_before_it_is_refunded() -> None:
    head, _ = head_with(n_generators=4)
    holders = []
    while 0 in head.state.ledger.open:
        holders.append(head.state.ledger.open[0].holder)
        effects = fail(head, 0)
        (line,) = records(effects, Event.UNSAMPLED) or [{}]
        assert not line or (line["attempt"], line["holder"]) == (len(holders) - 1, holders[-1])
        assert holders[-1] not in {to for to, x in sent(effects, m.Prompt) if x.uid == 0}  # type: ignore[union-attr]
    assert len(set(holders)) == len(holders) == 3
    (refund,) = records(effects, Event.REFUND)
    assert (refund["uid"], refund["reason"], refund["error"]) == (0, "sampling_error", "no memory")
    assert head.state.refunds_in_a_row == 1
    alone, _ = head_with(n_generators=1)
    assert [line["uid"] for line in records(fail(alone, 0), Event.REFUND)] == [0]  # no other one can retry it


def test_prompts_that_the_first_generator_fails_at_wait_for_those_that_still_load() -> None:
    head, _ = head_with(n_generators=2)
    head.state.members.ready_generators.discard(1)  # it has not been ready yet, and is not there
    head.state.members.remove("generator-1.0")
    while held := [x for x in head.state.ledger.open.values() if x.holder == BAD]:
        fail(head, held[0].uid, now=1.0)
    waiting = [x.uid for x in head.state.ledger.open.values() if x.failed_at]
    assert waiting
    assert head.state.refunds_in_a_row == 0
    head.state.rules, late = replace(head.state.rules, assemble_s=1.0), 2.5  # it never comes
    head.tick(late)
    held = [x.uid for x in head.state.ledger.open.values() if x.holder == BAD]
    assert held, "then its first holder tries again"
    (refund,) = records(fail(head, held[0], now=late), Event.REFUND)
    assert refund["uid"] == held[0]


def test_an_evaluation_gives_failed_problems_to_others_and_lacks_no_answer() -> None:
    head, _ = head_with(n_generators=2, n_problems=8)
    evaluation = head.state.evaluations.open
    assert evaluation is not None
    for _ in range(100):
        held = [uid for uid, holder in evaluation.leased.items() if holder == BAD]
        if not held:
            break
        uid = held[0]
        head.on(BAD, m.SampleFailed(uid, evaluation.attempts[uid], evaluation.name, Refund.SAMPLING_ERROR, "no"), 0.0)
    assert not evaluation.failed
    assert set(evaluation.leased.values()) <= {GOOD}


def test_an_evaluation_without_enough_answers_decides_nothing_and_warns() -> None:
    head, _ = head_with(n_generators=1, n_problems=8)
    evaluation = head.state.evaluations.open
    assert evaluation is not None
    effects: list[Effect] = []
    while head.state.evaluations.open is evaluation:
        uid, holder = next(iter(evaluation.leased.items()))
        failed = m.SampleFailed(uid, evaluation.attempts[uid], evaluation.name, Refund.SAMPLING_ERROR, "no")
        effects += head.on(holder, failed, 0.0)
    (figures,) = records(effects, Event.EVALUATION)
    assert (figures["n_asked"], figures["n_missing"]) == (16, 16)
    (warning,) = warnings(effects)
    assert warning.startswith("evaluation 'before' lacks 16 of 16 answers: under 95% are there, so checkpoint.keep")


# evictions for good


def evict(head: Head, name: str, now: float, *, others_succeed: bool = True) -> tuple[list[Effect], float]:
    """Its leases fail until it is evicted, or the job ends, while the others do good work and hold the weights."""
    failures, effects = head.state.lease_failures, list[Effect]()
    while name in head.state.members.by_name and end_of(effects) is None:
        now += 100.0
        for other in list(head.state.members.by_name):
            effects += head.on(other, m.Heartbeat(0, None, ""), now)
        if others_succeed:
            failures.succeeded("generator-9.0")
        for _ in range(FIRST):
            failures.failed(name, "the device is in error")
        effects += head.tick(now)
    return effects, now


def orders(effects: list[Effect]) -> list[bool]:
    """Of each eviction whether it is for good."""
    return [order.for_good for _, order in sent(effects, m.Evict)]  # type: ignore[union-attr]


def evict_for_good(head: Head, index: int, now: float = 0.0) -> tuple[list[Effect], float]:
    effects: list[Effect] = []
    for incarnation in range(EVICTIONS + 1):
        effects, now = evict(head, f"generator-{index}.{incarnation}", now)
        assert orders(effects) == [incarnation == EVICTIONS]
        if incarnation < EVICTIONS:
            joined(head, f"generator-{index}.{incarnation + 1}", now=now)
    return effects, now


def test_a_generator_that_restarts_do_not_help_is_evicted_for_good_and_the_job_goes_on() -> None:
    head, _ = head_with(n_generators=3)
    effects, now = evict_for_good(head, 0)
    assert [x.generators for x in effects if isinstance(x, EvictForGood)] == [(0,)]
    assert end_of(effects) is None
    (gone,) = [line for line in records(effects, Event.MEMBER) if line["state"] == "left"]
    assert gone["name"] == "generator-0.2"
    assert gone["why"].startswith("evicted for good after 2 restarts: its last ")
    assert gone["why"].endswith("the last error: the device is in error")
    (text,) = [x.fields["text"] for x in effects if isinstance(x, Progress) and "for good" in x.fields["text"]]
    assert text.endswith("the job goes on with 2 of 3 generators")
    again = joined(head, "generator-0.3", now=now)  # the order was lost, and it joins again
    assert set(orders(again)) == {True}
    assert "generator-0.3" not in head.state.members.by_name


def test_the_job_ends_with_a_sentence_when_the_last_of_its_generators_would_be_evicted_for_good() -> None:
    head, _ = head_with(n_generators=2)
    _, now = evict_for_good(head, 0)
    effects: list[Effect] = []
    for incarnation in range(EVICTIONS + 1):
        effects, now = evict(head, f"generator-1.{incarnation}", now)
        if incarnation < EVICTIONS:
            joined(head, f"generator-1.{incarnation + 1}", now=now)
    end = end_of(effects)
    assert end is not None
    assert (end.code, end.sentence[:53]) == (1, "no generator of the job is left: generator-1.2 was ev")
    assert end.sentence.endswith("the last error: the device is in error")


def test_a_success_between_two_evictions_restarts_the_count() -> None:
    head, _ = head_with(n_generators=3)
    now = 0.0
    for incarnation in range(2 * EVICTIONS + 1):
        effects, now = evict(head, f"generator-0.{incarnation}", now)
        assert orders(effects) == [False]
        joined(head, f"generator-0.{incarnation + 1}", now=now)
        head.state.lease_failures.succeeded(f"generator-0.{incarnation + 1}")


def test_where_supervisors_restart_nothing_the_first_eviction_is_for_good() -> None:
    head, _ = head_with(n_generators=3)
    head.state.rules = replace(head.state.rules, max_restarts=0)
    effects, _ = evict(head, BAD, 0.0)
    assert orders(effects) == [True]


def test_a_guest_is_never_evicted_for_good() -> None:
    """Its own supervisor ends it."""
    head, _ = head_with(n_generators=2)
    now = 0.0
    for incarnation in range(EVICTIONS + 2):
        joined(head, f"generator-5.{incarnation}", now=now)
        effects, now = evict(head, f"generator-5.{incarnation}", now)
        assert orders(effects) == [False]
    assert not head.state.evicted
