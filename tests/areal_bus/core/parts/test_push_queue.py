"""Who is pushed to with whom, and who is to blame for a push that broke."""

from dataclasses import replace

import pytest

from areal_bus import messages as m
from areal_bus.core.effects import Effect
from areal_bus.core.head import Head
from areal_bus.core.parts.push_queue import OWN_SHARE, Push, PushQueue
from areal_bus.core.state import HeadState
from areal_bus.errors import ImpossibleEvent
from areal_lab.staleness.simulator.scenario import Numbers
from tests.areal_bus.core.test_head import end_of, head_with, joined, push_done, scenario, scored, sent

ROOT, A, B, C = "learner-0.0", "generator-0.0", "generator-1.0", "generator-2.0"
TIMEOUT_S = 8.0


def pushes_with(*members: str) -> PushQueue:
    pushes = PushQueue(timeout_s=TIMEOUT_S)
    pushes.begin(version=1, root=ROOT, members=list(members), catch_up=False, now=0.0)
    return pushes


def over(pushes: PushQueue, *done: str, now: float = 1.0, error: str = "it broke") -> Push:
    """The push in flight ends: these complete it, all others say that they did not."""
    push = pushes.current
    assert push is not None
    for name in (push.root, *push.members):
        if name in done:
            pushes.done(push.id, name)
        elif name not in push.broken:
            pushes.broken(push.id, name, error)
    return pushes.finish(now)


@pytest.mark.parametrize(
    ("members", "lost", "done", "misses"),
    [
        ((A, B), "", (), {A: 0, B: 0}),  # its root broke it: nobody is to blame
        ((A,), "", (), {A: 1}),
        ((A, B), "", (ROOT, A), {B: 1}),
        ((A, B), A, (), {}),  # a death is its victim's alone
    ],
)
def test_members_of_a_broken_push_are_apart_and_charged_when_they_alone_missed_it(
    members: tuple[str, ...], lost: str, done: tuple[str, ...], misses: dict[str, int]
) -> None:
    pushes = pushes_with(*members)
    if lost:
        pushes.lose(lost)
    over(pushes, *done)
    assert {name: apart.misses for name, apart in pushes.quarantined.items()} == misses
    assert pushes.next_quarantined(sorted(misses), 1.0) == sorted(misses)[:1]
    if misses:
        pushes.begin(version=1, root=ROOT, members=[max(misses)], catch_up=True, now=2.0)
        with pytest.raises(ImpossibleEvent, match="one push at a time"):
            pushes.begin(version=1, root=ROOT, members=[B], catch_up=True, now=2.0)
        over(pushes, ROOT, max(misses))
        assert max(misses) not in pushes.quarantined  # a completed push ends it


def test_a_silent_root_charges_members_only_when_repeated() -> None:
    pushes = pushes_with(A, B)
    assert pushes.expire(TIMEOUT_S) == [ROOT, A, B]
    pushes.finish(11.0)
    assert not pushes.quarantined
    pushes.begin(version=1, root=ROOT, members=[A, B], catch_up=True, now=11.0)
    pushes.expire(100.0)
    pushes.finish(100.0)
    assert {name: apart.misses for name, apart in pushes.quarantined.items()} == {A: 0, B: 0}
    pushes.begin(version=1, root=ROOT, members=[A], catch_up=True, now=100.0)
    pushes.expire(200.0)
    pushes.finish(200.0)
    assert pushes.quarantined[A].misses == 0, "it may be the root that stands still"


def test_root_and_members_time_out_before_the_head_and_report_the_reason() -> None:
    head, effects = updated(2)
    _, begin = sent(effects, m.PushBegin)[0]
    assert begin.timeout_s == OWN_SHARE * head.state.rules.push_timeout_s < head.state.rules.push_timeout_s  # type: ignore[union-attr]


def test_a_root_at_its_deadline_charges_its_only_member() -> None:
    pushes = pushes_with(A)
    assert pushes.current is not None
    pushes.broken(pushes.current.id, ROOT, "it waits for generator-0.0")
    assert pushes.expire(TIMEOUT_S) == [A]
    pushes.finish(TIMEOUT_S)
    assert (pushes.quarantined[A].misses, pushes.quarantined[A].error) == (1, "it waits for generator-0.0")


def test_the_quarantined_member_with_fewest_misses_is_next_and_pauses_grow() -> None:
    pushes = pushes_with(A, B)
    over(pushes)
    turns, now = [], 0.0
    for _ in range(10):
        while not (due := pushes.next_quarantined([A, B], now)):
            now += TIMEOUT_S / 64
        (name,) = due
        turns.append((name, now))
        pushes.begin(version=1, root=ROOT, members=[name], catch_up=True, now=now)
        over(pushes, now=now)
    assert [name for name, _ in turns] == [A, B] * 5
    assert set(pushes.hopeless()) == {A, B}
    waits = [later - sooner for (_, sooner), (_, later) in zip(turns[::2], turns[2::2], strict=False)]
    assert waits == [0.0, TIMEOUT_S / 16, TIMEOUT_S / 8, TIMEOUT_S / 4]


def test_of_many_each_half_is_pushed_to_next_so_that_one_among_hundreds_is_found_in_few_pushes() -> None:
    names = [f"generator-{i}.0" for i in range(500)]
    bad = {names[123]}
    pushes = pushes_with(*names)
    over(pushes)
    n_pushes = 0
    while pushes.quarantined.keys() != bad or not pushes.quarantined[names[123]].misses:
        due = pushes.next_quarantined([name for name in names if name in pushes.quarantined], 1.0)
        n_pushes += 1
        pushes.begin(version=1, root=ROOT, members=due, catch_up=True, now=1.0)
        over(pushes, *(() if bad & {*due} else (ROOT, *due)))
        if n_pushes == 4:
            assert len(pushes.quarantined) <= len(names) / 2, "most are back soon"
    assert n_pushes <= 20


# the head


def members_of(effects: list[Effect]) -> list[str]:
    """Of the push that begins here."""
    begun = sent(effects, m.PushBegin)
    return begun[0][1].members if begun else []  # type: ignore[union-attr]


def break_push(head: Head, *done: str, now: float = 1.0, error: str = "no") -> list[Effect]:
    """The push in flight fails at everybody but these."""
    push = head.state.pushes.current
    assert push is not None
    effects: list[Effect] = []
    for name in (*push.members, push.root):
        if name in done:
            effects += head.on(name, m.PushDone(push.id, push.version, f"digest {push.version}", 0.0, 0.0), now)
        else:
            effects += head.on(name, m.PushBroken(push.id, push.version, error), now)
    return effects


def updated(n_generators: int = 3) -> tuple[Head, list[Effect]]:
    """A head whose push of version 1 has just begun."""
    head, _ = head_with(n_generators, batch_size=1, n_samples=1, eta=3)
    while (push := head.state.pushes.current) is not None:
        for name in (push.root, *push.members):
            push_done(head, name, 0)
    return head, update(head, 1)


def update(head: Head, version: int) -> list[Effect]:
    """The next batch is trained."""
    head.on(ROOT, m.BatchRequest(version - 1), 1.0)
    held = {entry.uid: entry for entry in head.state.ledger.live()}
    entry = held[min(held)]
    head.on("reward-0.0", scored(entry.uid, 0, entry.attempt, entry.born, entry.holder or ""), 1.0)
    return head.on(ROOT, m.UpdateDone(version, {}, f"digest {version}"), 1.0)


def test_after_a_broken_push_members_come_back_one_by_one_and_the_bad_one_hurts_itself_alone() -> None:
    head, effects = updated()
    assert members_of(effects) == [A, B, C]
    effects = break_push(head)
    assert head.state.gate.v == 1, "the clock goes on"
    assert members_of(effects) == [A]
    assert members_of(break_push(head)) == [B]
    assert members_of(break_push(head, ROOT, B)) == [C]
    assert members_of(break_push(head, ROOT, C)) == [A], "its pause is over, and nothing else is to do"
    break_push(head)
    assert members_of(update(head, 2)) == [B, C]
    assert [member.name for member in head.state.eligible_generators()] == [B, C]


def test_one_that_is_late_waits_for_one_regular_push_at_most() -> None:
    head, _ = updated()
    break_push(head)
    for done in ((ROOT, A), (ROOT, B)):
        break_push(head, *done)
    assert head.state.pushes.current is not None
    assert head.state.pushes.current.members == [C]
    update(head, 2)
    assert members_of(break_push(head)) == [A, B], "the newest version first"
    head.on(ROOT, m.BatchRequest(2), 1.0)
    update(head, 3)
    effects = break_push(head, ROOT, A, B)
    assert members_of(effects) == [C], "though version 3 is there"
    _, begin = sent(effects, m.PushBegin)[0]
    assert begin.version == 3  # type: ignore[union-attr]
    assert members_of(break_push(head, ROOT, C)) == [A, B]
    break_push(head, ROOT, A, B)
    assert head.state.gate.v == 3


def test_members_without_a_completed_push_are_pushed_to_separately() -> None:
    head, _ = updated(2)
    joined(head, "generator-2.0", now=1.0)
    assert members_of(break_push(head, ROOT, A, B)) == ["generator-2.0"]
    assert members_of(break_push(head)) == ["generator-2.0"]
    break_push(head)
    assert members_of(update(head, 2)) == [A, B]


def test_one_that_may_still_come_is_hoped_for() -> None:
    """The only one that is there goes, and its supervisor brings it back: that the job ends so is up to supervisors."""
    head = Head(HeadState(scenario(n_generators=2, batch_size=1, eta=1).rules, Numbers(None)), now=0.0)
    joined(head, ROOT, "reward-0.0", A)
    effects, now = head.on(ROOT, m.BeginTerm(0, "digest 0"), 0.0), 0.0
    while not sent(effects, m.Evict):
        now += 10.0
        for name in (ROOT, "reward-0.0", A):
            head.on(name, m.Heartbeat(0, None, ""), now)
        head.tick(now)
        effects = break_push(head, now=now)
    assert end_of(effects) is None
    assert sent(effects, m.Evict)[0][0] == A


def test_a_view_in_which_something_broke_is_never_used_again() -> None:
    pushes = pushes_with(A, B)
    first = over(pushes, ROOT, A)
    pushes.begin(version=2, root=ROOT, members=[A, B], catch_up=False, now=2.0)
    second = over(pushes, ROOT, A, B)
    pushes.begin(version=3, root=ROOT, members=[A, B], catch_up=False, now=3.0)
    third = over(pushes, ROOT, A, B)
    assert first.view != second.view == third.view
    assert replace(third, members=[A]).missing == []


# eta = 0: who is left out of the shares


def assembling(*generators: str) -> Head:
    """A head at eta = 0 whose first push is in flight, to these of three generators."""
    rules = scenario(n_generators=3, batch_size=3, n_samples=1, eta=0).rules
    head = Head(HeadState(rules, Numbers(None)), now=0.0)
    joined(head, ROOT, "reward-0.0", *(generators or (A, B, C)))
    head.on(ROOT, m.BeginTerm(0, "digest 0"), 0.0)
    assert head.state.pushes.current is not None
    return head


def in_turn(head: Head, bad: str) -> list[Effect]:
    """The push of all is broken by `bad`; then each is pushed to alone, once. Returns what follows at last."""
    effects = break_push(head)
    for _ in range(3):
        (member,) = members_of(effects)
        effects = break_push(head) if member == bad else break_push(head, ROOT, member)
    return effects


def holders(effects: list[Effect]) -> dict[int, str]:
    """Uid of each prompt given out here -> to whom."""
    return {message.uid: to for to, message in sent(effects, m.Prompt)}  # type: ignore[union-attr]


def finish_batch(head: Head, version: int) -> list[Effect]:
    """All three prompts are sampled and scored, and the update is done."""
    head.on(ROOT, m.BatchRequest(version - 1), 1.0)
    for entry in list(head.state.ledger.live()):
        holder, uid = entry.holder or "", entry.uid
        head.on(holder, m.Sampled(uid, 0, entry.attempt, "", 3), 1.0)
        head.on("reward-0.0", scored(uid, 0, entry.attempt, entry.born, holder), 1.0)
    return head.on(ROOT, m.UpdateDone(version, {}, f"digest {version}"), 1.0)


def test_at_eta_0_one_that_completes_a_push_again_has_a_share_of_the_next_batch_and_no_other_changes() -> None:
    head = assembling()
    assert holders(in_turn(head, A)) == {0: B, 1: C, 2: B}
    head.tick(1.0)
    push = head.state.pushes.current
    assert push is not None
    assert push.members == [A]
    assert not holders(break_push(head, ROOT, A)), "the share in flight is dealt"
    assert {entry.uid: entry.holder for entry in head.state.ledger.live()} == {0: B, 1: C, 2: B}
    assert members_of(finish_batch(head, 1)) == [A, B, C]
    assert holders(break_push(head, ROOT, A, B, C)) == {3: A, 4: B, 5: C}


def test_an_incarnation_that_is_replaced_is_kept_apart_no_more_and_one_that_is_silent_is() -> None:
    head = assembling()
    in_turn(head, A)
    assert head.state.pushes.misses_its_own(A)
    head.requeue(A, 1.0)
    assert head.state.pushes.misses_its_own(A), "it may be heard again"
    joined(head, "generator-0.1", now=1.0)
    assert not head.state.pushes.quarantined


def test_an_incomplete_ring_names_the_last_error_of_a_push() -> None:
    head = assembling()
    break_push(head, error="a port is shut")
    end = end_of(head.tick(2000.0))
    assert end is not None
    assert "generator-0 is stale (a port is shut)" in end.sentence
