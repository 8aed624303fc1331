"""Who waits for whom: each state in which the ring can stand still, and the sentence about it."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

import pytest

from actors.head.stall_monitor import StallMonitor
from areal_bus import messages as m
from areal_bus.config.sections import WatchdogConfig
from areal_bus.core.diagnosis import ProgressTracker, StallVerdict, Wait, verdict
from areal_bus.core.effects import Effect, Progress, Send
from areal_bus.core.evaluation import EvaluationSet
from areal_bus.core.events import Event
from areal_bus.core.head import Head
from areal_bus.core.parts.staleness import StalenessPolicy
from areal_bus.core.rules import HeadRules
from areal_bus.core.state import HeadState
from areal_bus.messages import Role
from areal_lab.staleness.simulator.ring import Ring
from areal_lab.staleness.simulator.scenario import Fault, Numbers, Scenario
from tests.areal_bus.core.test_head import end_of, joined, records, scored

LEARNER, REWARD = "learner-0.0", "reward-0.0"
G0, G1 = "generator-0.0", "generator-1.0"
ROLES = {LEARNER: Role.LEARNER, REWARD: Role.REWARD, G0: Role.GENERATOR, G1: Role.GENERATOR}
RULES = HeadRules(
    batch_size=2, eta=1, n_samples=2, total_steps=9, n_generators=2, n_rewards=1, n_learners=1, silent_s=3.0,
    assemble_s=600.0, push_timeout_s=60.0,
)  # fmt: skip


class Bench:
    """A head on a bench: a clock that the test turns, a watch, and members that do what the test says."""

    def __init__(self, n_rows: int | None = None, **changes: Any) -> None:
        self.now = 100.0
        self.head = Head(HeadState(replace(RULES, **changes), Numbers(n_rows)), now=self.now)
        self.watch = ProgressTracker(quiet_s=3.0, still_s=30.0)
        self.progress: dict[str, int] = {}
        self.notes: dict[str, str] = {}
        self.silent: set[str] = set()
        self.look()

    def say(self, name: str, message: m.Message) -> Self:
        self.head.on(name, message, self.now)
        return self

    def note(self, name: str, note: str) -> Self:
        """What its heartbeats tell from now on."""
        self.notes[name] = note
        return self

    def silence(self, *names: str) -> Self:
        self.silent |= set(names)
        return self

    def join(self, *names: str) -> Self:
        joined(self.head, *names, now=self.now)
        return self

    def assemble(self, *names: str) -> Self:
        """These, by default all, are there and hold version 0."""
        return self.join(*(names or ROLES)).say(LEARNER, m.BeginTerm(0, "digest 0")).push()

    def push(self, *names: str) -> Self:
        """These, or all, complete the pushes in flight."""
        while (push := self.head.state.pushes.current) is not None:
            awaited = [name for name in (push.root, *push.members) if name not in push.done]
            if not [name for name in awaited if not names or name in names]:
                break
            for name in awaited:
                if not names or name in names:
                    self.say(name, m.PushDone(push.id, push.version, f"digest {push.version}", 0.0, 0.0))
        return self

    def wait(self, seconds: int, *, working: tuple[str, ...] = ()) -> Self:
        """Time goes by, a second at a time; all but the silent send heartbeats, those at work with progress."""
        self.look()
        for _ in range(seconds):
            self.now += 1.0
            for name in list(self.head.state.members.by_name):
                self.progress[name] = self.progress.get(name, 0) + (name in working)
                if name not in self.silent:
                    self.say(name, m.Heartbeat(self.progress[name], None, self.notes.get(name, "")))
            self.head.tick(self.now)
            self.look()
        return self

    def look(self) -> None:
        self.watch.look(self.head.state, self.now)

    def leased(self, name: str) -> list[tuple[str, int, int, int]]:
        return sorted(self.head.state.members.by_name[name].leased)

    def sample(self, name: str, *, keep: int = 0, only: int | None = None, score: bool = True) -> Self:
        """All that this generator holds (`only` of one prompt), but the last `keep`, is sampled, and scored."""
        held = [lease for lease in self.leased(name) if only in (None, lease[1])]
        for evaluation, uid, attempt, sample in held[: len(held) - keep]:
            self.say(name, m.Sampled(uid, sample, attempt, evaluation, n_tokens=3))
            if score:
                held_version = self.head.state.members.by_name[name].version
                self.say(REWARD, replace(scored(uid, sample, attempt, held_version or 0, name), evaluation=evaluation))
        return self

    def train(self) -> Self:
        """The update that is under way is finished; its push is not."""
        version = self.head.state.gate.u + 1
        return self.say(LEARNER, m.UpdateDone(version, {}, f"digest {version}"))

    def sample_all(self, **more: Any) -> Self:
        return self.sample(G0, **more).sample(G1, **more)

    def verdict(self) -> StallVerdict:
        self.look()
        return verdict(self.head.state, self.watch, self.now)

    def first(self) -> Wait:
        return self.verdict().waits[0]


def asked(**changes: Any) -> Bench:
    """The learner waits for its first batch."""
    return Bench(**changes).assemble().say(LEARNER, m.BatchRequest(0))


def rejoined(bench: Bench, name: str, role: Role, index: int, incarnation: int) -> Bench:
    """It joins, and is not ready."""
    endpoint = "" if role is Role.GENERATOR else "there"
    return bench.say(name, m.Join(name, role, index, incarnation, endpoint, 1, ""))


# the beginning


def test_wait_graph_names_members_that_have_not_joined() -> None:
    bench = Bench()
    for name in (LEARNER, G0):
        rejoined(bench, name, ROLES[name], 0, 0)
    bench.notes[LEARNER] = "loads the model"
    bench.wait(20)
    found = bench.verdict()
    assert found.waits[0].on == (LEARNER, "reward-0", G0, "generator-1")
    assert "nobody has joined as reward-0" in found.sentence
    assert "learner-0 loads the model" in found.sentence
    assert found.waits[0].since_s == pytest.approx(20)


def test_a_ring_needs_no_second_generator_to_begin_unless_eta_is_0() -> None:
    for eta, on in ((1, ()), (0, ("generator-1",))):
        bench = Bench(eta=eta).assemble(G0, LEARNER)
        assert bench.wait(5).first().on == ("reward-0", *on)


def test_a_ring_of_eta_0_waits_for_no_generator_that_is_left_out_of_its_shares() -> None:
    bench = Bench(eta=0).join(G0, G1, LEARNER)
    bench.say(LEARNER, m.BeginTerm(0, "digest 0"))
    assert bench.first().on == ("reward-0", G0, G1)
    push = bench.head.state.pushes.current
    assert push is not None
    bench.push(LEARNER, G0)
    assert bench.first().on == ("reward-0", G1)
    bench.say(G1, m.PushBroken(push.id, 0, "it is full"))
    assert [x.name for x in bench.head.state.excluded_generators()] == [G1]
    assert bench.first().on == ("reward-0",)


EVALUATING: dict[str, Any] = {"evaluate_before": True, "evaluation_sets": (EvaluationSet("", 1, ("{}",) * 6),)}
BUSY = (G0, G1)


def two_trained() -> Bench:
    """Two batches are trained, and neither version is published: no credit is left."""
    bench = asked()
    for step in (1, 2):
        bench.sample_all().train().say(LEARNER, m.BatchRequest(step))
    return bench


def held_up() -> Bench:
    """Prompt 1 overtook prompt 0, which is due in the next batch."""
    bench = asked(batch_size=1, policy=StalenessPolicy.HOLD).sample(G0, only=1).train().push()
    return bench.say(LEARNER, m.BatchRequest(1)).sample(G1)


@pytest.mark.parametrize(
    ("bench", "text", "on", "culprits"),
    [
        # a batch
        (lambda: asked(batch_size=4, silent_s=60.0).sample(G0).sample(G1, keep=3).silence(REWARD)
         .wait(25, working=BUSY),
         "learner-0 waits for 3 trajectories of step 0 (prompt 3 and 1 more at generator-1 since 25 s); reward-0 "
         "silent for 25 s", (G1,), (REWARD,)),
        (lambda: asked(batch_size=4).sample(G0).note(G1, "samples 4").wait(31, working=(G0,)),
         "; generator-1 stands still for 31 s (samples 4)", (G1,), (G1,)),
        (lambda: asked().sample_all(score=False).note(REWARD, "scores 4").wait(40, working=BUSY),
         "learner-0 waits for 4 trajectories of step 0 (4 samples at the rewards since 40 s)", (REWARD,), (REWARD,)),
        (lambda: asked().silence(G0, G1).wait(10),
         "queued since|(generator-0 is dead, generator-1 is dead)|generator-0 dead, silent for 10 s", (G0, G1),
         (G0, G1)),
        (lambda: two_trained().wait(5),
         "(2 prompts not admitted: the gate is shut, 0 live + 4 in training of 4)", (), ()),
        (lambda: held_up().wait(7), "learner-0 waits for prompt 0, which must be in batch 1 (|, 1 ready)", (G0,), ()),
        (lambda: Bench(**EVALUATING).assemble().sample(G0, score=False).sample(G1, keep=1).wait(5, working=(G1,)),
         "evaluation 'before' waits for |at generator-1|at the rewards", (G1, REWARD), ()),
        # the learner
        (lambda: Bench().join(*ROLES).wait(6),
         "; generator-0, generator-1 waits for a push of version 0 (none is in flight)", (LEARNER,), ()),
        (lambda: asked().sample_all().note(LEARNER, "trains step 0").wait(20, working=BUSY),
         "version 1 waits for learner-0 (learner-0 trains step 0)", (LEARNER,), ()),
        (lambda: asked().sample_all().note(LEARNER, "trains step 0").wait(40, working=BUSY),
         "learner-0 stands still for 40 s (trains step 0)", (LEARNER,), (LEARNER,)),
        (lambda: Bench(n_learners=2).assemble(*ROLES, "learner-1.0").say(LEARNER, m.BatchRequest(0))
         .note("learner-1.0", "meets the others").wait(4),
         "batch 0 waits for learner-1 to ask for it (learner-1 meets the others)", ("learner-1.0",), ()),
        (lambda: rejoined(asked().wait(5), "learner-0.1", Role.LEARNER, 0, 1).note("learner-0.1", "loads").wait(8),
         "the ring waits for learner-0 to begin (learner-0 loads)", ("learner-0.1",), ()),
        (lambda: asked(total_steps=1).sample_all().train().push().note(LEARNER, "writes the last checkpoint").wait(3),
         "the end waits for learner-0 (learner-0 writes the last checkpoint)", (LEARNER,), ()),
        # pushes and rewards
        (lambda: asked().sample_all().train().push(LEARNER, G1).wait(20, working=BUSY),
         "push of version 1 waits for generator-0 (no answer for 20 s, deadline in 40 s)", (G0,), ()),
        (lambda: asked().sample_all().train().silence(LEARNER).wait(12), "learner-0 silent for 12 s", None, (LEARNER,)),
        (lambda: asked().silence(REWARD).wait(9, working=BUSY),
         "samples wait for a reward (reward-0 is dead)", (REWARD,), (REWARD,)),
    ],
)  # fmt: skip
def test_a_wait_has_a_sentence_names_its_members_and_who_is_to_blame(
    bench: Callable[[], Bench], text: str, on: tuple[str, ...] | None, culprits: tuple[str, ...]
) -> None:
    found = bench().verdict()
    assert all(part in found.sentence for part in text.split("|")), found.sentence
    assert on is None or on in [wait.on for wait in found.waits]
    assert found.culprits[: len(culprits)] == culprits


def test_at_the_end_of_the_data_only_trajectories_of_open_prompts_are_awaited() -> None:
    bench = asked(n_rows=1)
    holder = G0 if bench.leased(G0) else G1
    first = bench.wait(5, working=(holder,)).first()
    assert (first.for_what, first.on) == ("2 trajectories of step 0", (holder,))
    assert "not admitted" not in first.detail


def test_the_end_waits_for_nobody_once_all_have_finished_and_a_drain_for_the_learner() -> None:
    bench = asked(total_steps=1).sample_all().train().push().say(LEARNER, m.Finished("", ""))
    assert bench.verdict() == StallVerdict("the job ends", (), ())
    bench = asked().sample_all()
    bench.head.drain(bench.now)
    assert bench.wait(2).first().on == (LEARNER,)


# the watch


def test_waits_reported_by_actors_are_registered_and_equal_ones_merged() -> None:
    bench = asked()
    bench.notes = {G0: "waits for 2 scores", G1: "waits for 3 scores", REWARD: "waits for a trajectory"}
    bench.wait(1)
    found = bench.wait(10, working=(G0, G1)).verdict()
    idle = [wait for wait in found.waits if not wait.on]
    assert [(wait.who, wait.for_what) for wait in idle] == [
        ("reward-0", "a trajectory"),
        ("generator-0, generator-1", "2 scores"),
    ]
    assert all(wait.since_s == pytest.approx(10, abs=1) for wait in idle)


def test_failures_are_no_progress() -> None:
    bench = asked()
    bench.wait(10)
    for i in range(5):  # a generator falls silent and comes back, its leases go round: nothing is made
        bench.silent = {G0} if i % 2 else {G1}
        bench.wait(8)
    assert bench.watch.stalled_s == pytest.approx(50)
    bench.wait(1, working=(G0,))
    assert bench.watch.stalled_s == pytest.approx(0)


def test_a_head_that_stood_still_counts_no_wait_meanwhile() -> None:
    bench = asked()
    bench.wait(10)
    bench.now += 5000.0
    bench.head.tick(bench.now)
    assert bench.first().since_s == pytest.approx(10)
    assert bench.watch.stalled_s == pytest.approx(10)


# the watchdog


class Guarded(Bench):
    """The same with a watchdog, as the head's shell has it: what it wants is collected, an end ends."""

    def __init__(self, **settings: Any) -> None:
        changes = {key: settings.pop(key) for key in list(settings) if key in HeadRules.__slots__}
        self.effects: list[Effect] = []
        self.dog = StallMonitor(WatchdogConfig(**settings), heartbeat_s=1.0)
        super().__init__(**changes)
        self.watch = self.dog.tracker

    def look(self) -> None:
        if self.watch is self.dog.tracker:
            self.effects += self.dog.look(self.head, self.now)

    def lines(self, event: Event) -> list[dict[str, Any]]:
        return records(self.effects, event)

    @property
    def said(self) -> list[str]:
        return [x.fields["text"] for x in self.effects if isinstance(x, Progress)]


def guarded(**settings: Any) -> Guarded:
    bench = Guarded(batch_size=4, **settings).assemble()
    bench.say(LEARNER, m.BatchRequest(0))
    bench.notes = {G0: "samples 4", G1: "samples 4"}
    for name in (G0, G1):
        bench.say(name, m.Heartbeat(0, 0, bench.notes[name]))
    bench.look()
    return bench


def test_a_stall_is_logged_after_its_time_and_then_at_growing_intervals() -> None:
    bench = guarded(stall_s=10, act_s=1000, progress_s=1000)
    bench.wait(9)
    assert not bench.said
    bench.wait(91)
    assert [line["stalled_s"] for line in bench.lines(Event.STALL)] == [10, 20, 40, 80]
    assert len(bench.said) == 4
    assert bench.said[0].startswith("nothing has moved for 10 s: learner-0 waits for 8 trajectories of step 0 (prompt ")
    assert set(bench.lines(Event.STALL)[0]["on"].split()) <= {G0, G1}


def test_a_ring_that_moves_again_is_no_longer_stalled() -> None:
    bench = guarded(stall_s=10, act_s=1000, progress_s=1000)
    bench.wait(12)
    bench.wait(2, working=(G0,))
    assert [line["action"] for line in bench.lines(Event.STALL)] == ["warn", "over"]
    assert bench.said[-1] == "the ring moves again"
    bench.wait(12)
    assert [line["action"] for line in bench.lines(Event.STALL)] == ["warn", "over", "warn"]


def test_abort_ends_the_job_with_the_verdict_and_an_error() -> None:
    bench = guarded(stall_s=10, act_s=30, action="abort", progress_s=1000)
    bench.wait(29)
    assert end_of(bench.effects) is None
    bench.wait(1)
    end = end_of(bench.effects)
    assert end is not None
    assert end.code == 1
    assert end.sentence.startswith("nothing moved for 30 s: learner-0 waits for 8 trajectories of step 0")
    assert {x.to for x in bench.effects if isinstance(x, Send) and isinstance(x.message, m.Stop)} == set(ROLES)


@pytest.mark.parametrize("names", [(REWARD,), (G0, G1)])
def test_a_ring_without_rewards_or_without_generators_ends_by_its_name(names: tuple[str, ...]) -> None:
    """Whatever `watchdog.action` is: nobody is left who could move it."""
    bench = guarded(stall_s=10, act_s=30, progress_s=1000)
    for name in names:
        bench.silent.add(name)
        bench.say(name, m.Disconnected())
    bench.wait(29)
    assert end_of(bench.effects) is None
    bench.wait(2)
    end = end_of(bench.effects)
    assert end is not None
    assert end.code == 1
    role = ROLES[names[0]]
    assert f"wait for a {role} ({role}-0 is dead" in end.sentence


def test_a_ring_whose_reward_comes_back_does_not_end() -> None:
    bench = guarded(stall_s=10, act_s=30, progress_s=1000)
    bench.silent.add(REWARD)
    bench.say(REWARD, m.Disconnected())
    bench.wait(20)
    bench.join("reward-0.1")  # and loads for long
    bench.wait(60)
    assert end_of(bench.effects) is None


def test_requeue_gives_the_work_of_the_one_to_blame_to_another() -> None:
    bench = guarded(stall_s=10, act_s=30, action="requeue", progress_s=5)
    held = {lease[1] for lease in bench.leased(G1)}
    assert held
    bench.sample(G0)
    bench.wait(30, working=(G0,))
    assert end_of(bench.effects) is None
    assert [(x["on"], x["action"]) for x in bench.lines(Event.STALL)] == [(G1, "warn")] * 3 + [(G1, "requeue")]
    assert bench.said[-1] == "the work of generator-1 goes to others"
    bench.wait(2, working=(G0,))  # it is heard again, and gets nothing before it completes a push
    bench.sample(G0)
    assert not bench.leased(G1)
    assert {lease[1] for lease in bench.leased(G0)} == held


def test_a_member_that_stands_still_is_named_though_the_others_move() -> None:
    bench = guarded(stall_s=10, act_s=1000, progress_s=20)
    bench.sample(G0)
    bench.wait(60, working=(G0,))
    assert [(line["scope"], line["on"], line["stalled_s"]) for line in bench.lines(Event.STALL)] == [
        ("member", G1, 21),
        ("member", G1, 40),
    ]
    assert bench.said[0] == "generator-1 has made no progress for 21 s and holds 4 samples (samples 4)"


def test_waits_are_journalled_when_they_change_and_now_and_then() -> None:
    bench = guarded(stall_s=1000, act_s=1000)
    bench.wait(4, working=(G0, G1))
    (first,) = bench.lines(Event.WAIT)
    assert (first["i"], first["n"], first["who"]) == (0, 1, "learner-0")
    assert first["what"] == "8 trajectories of step 0"
    bench.silent = {REWARD}
    bench.wait(8, working=(G0, G1))
    assert "reward-0 is dead" in bench.lines(Event.WAIT)[-1]["detail"]
    n = len(bench.lines(Event.WAIT))
    bench.wait(50, working=(G0, G1))
    assert len(bench.lines(Event.WAIT)) == n
    bench.wait(15, working=(G0, G1))
    assert len(bench.lines(Event.WAIT)) == n + bench.lines(Event.WAIT)[-1]["n"]
    assert all(type(value) in (int, float, str) for line in bench.lines(Event.WAIT) for value in line.values())
    json.dumps(bench.lines(Event.WAIT))


@pytest.mark.parametrize("seed", range(4))
def test_every_moment_of_a_simulated_ring_has_a_wait_with_a_reason(seed: int) -> None:
    faults = (Fault("stop", Role.GENERATOR, 0, 15.0, 40.0), Fault("crash", Role.REWARD, 0, 40.0, 30.0))
    sizes = {"batch_size": 2, "eta": seed % 3, "n_samples": 2, "total_steps": 4, "n_problems": seed % 2}
    ring = Ring(Scenario(seed=seed, policy=list(StalenessPolicy)[seed % 4], faults=faults, calm_s=80.0, **sizes))
    watch = ProgressTracker(quiet_s=18.0, still_s=60.0)
    tick = ring.head.tick
    seen: list[StallVerdict] = []

    def look(now: float) -> list[Effect]:
        effects = tick(now)
        watch.look(ring.head.state, now)
        seen.append(verdict(ring.head.state, watch, now))
        return effects

    ring.head.tick = look  # type: ignore[method-assign]
    assert not ring.run().violations
    assert len(seen) > 10
    for found in seen[:-1]:
        assert found.waits or found.sentence == "the job ends"
        assert all(wait.since_s >= 0 for wait in found.waits)
        assert not [wait for wait in found.waits if not wait.on and not wait.who.startswith(tuple(Role))], found
