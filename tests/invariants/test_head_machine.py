"""The whole production head in any order of events that hypothesis can think of: I1 to I8 and I12, at the end I11.

Actors speak the truth, whenever they like and as often as they like; they, the head and its disk die at any time.
"""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from areal_bus import messages as m
from areal_bus.core.parts.ledger import PromptState
from areal_bus.core.parts.staleness import StalenessPolicy
from areal_bus.messages import Role
from tests.invariants import left_out
from tests.invariants.head_actors import Actor, GeneratorModel, RewardModel
from tests.invariants.head_stage import Stage, plan_of

CHOICE = st.integers(0, 99)
PUSH_ENDS = st.sampled_from(["done", "done", "done", "broken", "wrong", "silent"])
NOBODY_MOVES = "everybody waits"
ROUNDS = st.integers(0, 8)  # in which all goes well, first
VERDICTS = st.sampled_from(["value"] * 6 + ["error", "timeout"])


class HeadMachine(RuleBasedStateMachine):
    """One rule for everything that somebody may do or that may happen to somebody."""

    stage: Stage

    @initialize(
        policy=st.sampled_from(StalenessPolicy),
        batch_size=st.integers(1, 3),
        eta=st.integers(0, 3),
        n_samples=st.integers(1, 2),
        n_generators=st.integers(1, 2),
        n_learners=st.sampled_from([1, 1, 1, 2]),
        checkpoint_every=st.sampled_from([0, 1, 1, 2]),
        checkpoint_keep=st.integers(1, 2),
        n_problems=st.sampled_from([0, 0, 0, 1]),
        n_rows=st.sampled_from([None, None, 7]),
        report_tokens=st.integers(0, 1),
        total_steps=st.sampled_from([3, 30, 30]),
        rounds=st.integers(0, 20),
    )
    def begin(self, rounds: int, **drawn: object) -> None:
        self.stage = Stage(plan_of(capacity=4, n_rewards=2, **drawn))
        self.flow(rounds)

    def flow(self, rounds: int, without: str = "") -> None:
        for _ in range(rounds):
            self.stage.flow(without)

    # whom and what

    def actor(self, choice: int) -> Actor | None:
        actors = sorted(self.stage.cast.items())
        return actors[choice % len(actors)][1] if actors else None

    def generator(self, choice: int, *, reads: bool) -> GeneratorModel | None:
        generators = self.stage.generators
        if not generators:
            return None
        generator = generators[choice % len(generators)]
        if reads:
            generator.read()
        return generator if generator.is_there else None

    # what actors do

    @rule(rounds=ROUNDS)
    def all_goes_well(self, rounds: int) -> None:
        self.flow(rounds)

    @rule(rounds=ROUNDS, without=st.sampled_from(["rewards", "learner", "disk", "pushes", "generator 0"]))
    def some_wait(self, rounds: int, without: str) -> None:
        self.flow(rounds, without)

    @rule(who=CHOICE, n=st.integers(1, 6), loses=st.booleans())
    def read(self, who: int, n: int, loses: bool) -> None:
        if (actor := self.actor(who)) is not None:
            actor.read(n, loses=loses)

    @rule(who=CHOICE, which=CHOICE, n=st.integers(1, 3), ends=st.booleans(), tells=st.booleans(), reads=st.booleans())
    def sample(self, who: int, which: int, n: int, ends: bool, tells: bool, reads: bool) -> None:
        generator = self.generator(who, reads=reads)
        if generator is None or not generator.running:
            return
        key = sorted(generator.running)[which % len(generator.running)]
        for _ in range(n):
            generator.decode(key)
        if ends:
            generator.finish(key, tells=tells)

    @rule(who=CHOICE, which=CHOICE, reads=st.booleans())
    def give_up(self, who: int, which: int, reads: bool) -> None:
        generator = self.generator(who, reads=reads)
        if generator is not None and generator.running:
            generator.give_up(sorted(generator.running)[which % len(generator.running)])

    @rule(who=CHOICE, how=PUSH_ENDS, reads=st.booleans())
    def end_a_members_push(self, who: int, how: str, reads: bool) -> None:
        generator = self.generator(who, reads=reads)
        if generator is not None:
            generator.end_push(how)

    @rule(how=PUSH_ENDS, reads=st.booleans())
    def end_the_roots_push(self, how: str, reads: bool) -> None:
        learner = self.stage.learner
        if learner is not None:
            learner.read(10**9 if reads else 0)
            learner.end_push(how)

    @rule(who=CHOICE)
    def get_ready(self, who: int) -> None:
        generator = self.generator(who, reads=False)
        if generator is not None:
            generator.get_ready()

    @rule(who=CHOICE, which=CHOICE, n=st.integers(1, 6), status=VERDICTS)
    def judge(self, who: int, which: int, n: int, status: str) -> None:
        """Some of what was ever made, the newest more often."""
        made, judges = self.stage.made, self.stage.of(Role.REWARD)
        if not made or not judges:
            return
        judge = judges[who % len(judges)]
        assert isinstance(judge, RewardModel)
        last = len(made) - (0 if which < 80 else which % len(made))
        for trajectory in made[max(0, last - n) : last]:
            judge.judge(trajectory, status)

    @rule(reads=st.booleans())
    def the_learners_go_on(self, reads: bool) -> None:
        for learner in self.stage.learners:
            learner.read(10**9 if reads else 0)
            learner.go_on()

    @rule(n=st.integers(1, 3))
    def write(self, n: int) -> None:
        self.stage.write(n)

    @rule(who=CHOICE)
    def leave(self, who: int) -> None:
        generator = self.generator(who, reads=False)
        if generator is not None:
            generator.leave()

    # what happens to them

    @rule(which=CHOICE)
    def say_again(self, which: int) -> None:
        """What was said to this head arrives a second time."""
        if said := self.stage.said:
            self.stage.say(*said[-1 - which % len(said)])

    @rule(rounds=ROUNDS, seconds=st.sampled_from([1.0, 3.0, 30.0, 90.0]), who=CHOICE, all_beat=st.booleans())
    def wait(self, seconds: float, who: int, all_beat: bool, rounds: int) -> None:
        self.flow(rounds)
        self.stage.wait(seconds, quiet=None if all_beat else self.actor(who))

    @rule(rounds=ROUNDS, who=CHOICE, is_heard_of=st.booleans(), comes_back=st.booleans())
    def crash(self, who: int, is_heard_of: bool, comes_back: bool, rounds: int) -> None:
        self.flow(rounds)
        actor = self.actor(who)
        if actor is None:
            return
        if is_heard_of:
            actor.say(m.Disconnected())
        actor.end()
        if comes_back:
            self.come_back()

    @rule(rounds=ROUNDS, unjudged=st.integers(0, 2), n=st.integers(0, 6))
    def the_learner_goes_back(self, rounds: int, unjudged: int, n: int) -> None:
        """A term begins while verdicts on what was made before are under way, and no generator has heard of it."""
        self.flow(rounds)
        self.flow(unjudged, "rewards")
        if self.stage.end is None:
            self.stage.start(Role.LEARNER, 0)
            for learner in self.stage.learners:
                learner.read()  # that it is the end of others, too
            self.come_back()
            self.the_learners_go_on(reads=True)
            self.judge(who=0, which=0, n=n, status="value")

    @rule()
    def come_back(self) -> None:
        for role, index in self.stage.n_lives:
            if (role, index) not in self.stage.cast and self.stage.end is None:
                self.stage.start(role, index)

    @rule(rounds=ROUNDS, who=CHOICE)
    def lose_the_connection(self, who: int, rounds: int) -> None:
        self.flow(rounds)
        actor = self.actor(who)
        if actor is not None:
            actor.inbox.clear()
            actor.say(m.Disconnected())

    @rule(rounds=ROUNDS, who=CHOICE)
    def hear_nothing(self, who: int, rounds: int) -> None:
        self.flow(rounds)
        actor = self.actor(who)
        if actor is not None:
            actor.say(m.Heartbeat(0, None, "", hears=False))

    @rule(rounds=ROUNDS, who=CHOICE)
    def stand_still(self, who: int, rounds: int) -> None:
        """The watchdog's verdict."""
        self.flow(rounds)
        actor = self.actor(who)
        if actor is not None and self.stage.end is None:
            self.stage.carry_out(self.stage.head.requeue(actor.name, self.stage.now))

    @rule(which=CHOICE, what=st.integers(0, 3))
    def a_replaced_learner_speaks(self, which: int, what: int) -> None:
        stage, n = self.stage, self.stage.n_lives[Role.LEARNER, 0]
        name = f"learner-0.{which % n}"
        if stage.learner is None or stage.learner.name == name:
            return
        u = stage.head.state.gate.u
        said = (
            m.UpdateDone(u + 1, {}, "a ghost's"),
            m.BatchRequest(u),
            m.BeginTerm(u, "a ghost's"),
            m.Checkpointed(u, ""),
        )
        before = u, stage.head.state.gate.w, stage.head.state.terms.term
        stage.say(name, said[what])
        assert before == (stage.head.state.gate.u, stage.head.state.gate.w, stage.head.state.terms.term)

    @rule(rounds=ROUNDS)
    def crash_the_head(self, rounds: int) -> None:
        self.flow(rounds)
        if self.stage.end is None:
            self.stage.crash_head()

    @rule(rounds=ROUNDS)
    def kill_all(self, rounds: int) -> None:
        self.flow(rounds)
        if self.stage.end is None:
            self.stage.kill_all()

    @rule(rounds=ROUNDS)
    def drain(self, rounds: int) -> None:
        self.flow(rounds)
        if self.stage.end is None:
            self.stage.carry_out(self.stage.head.drain(self.stage.now))

    # what holds

    @invariant()
    def the_witness_has_nothing_to_say(self) -> None:
        if hasattr(self, "stage"):
            assert not self.stage.witness.violations, str(self.stage.witness.violations[0])

    @precondition(lambda self: hasattr(self, "stage"))
    @invariant()
    def the_heads_own_counts_add_up(self) -> None:
        head = self.stage.head
        gate, ledger = head.state.gate, head.state.ledger
        states = [entry.state for entry in ledger.open.values()]
        assert gate.live == ledger.n_live == len(states) - states.count(PromptState.TRAINING)  # I3
        assert gate.live + gate.in_training <= (gate.eta + 1) * gate.batch_size  # I1
        assert sum(ledger.counts.values()) + ledger.n_before == ledger.next_uid  # I3
        assert gate.v <= gate.u <= gate.w <= gate.u + 1  # I6
        assert len(ledger.ready) == states.count(PromptState.READY)
        assert len(ledger.queued) == states.count(PromptState.QUEUED)
        held = [entry for entry in ledger.open.values() if entry.state in (PromptState.LEASED, PromptState.SCORING)]
        gone = [entry.uid for entry in held if entry.holder not in head.state.members.by_name]
        assert not gone, f"prompts {gone} are held by somebody who is not there"

    @precondition(lambda self: hasattr(self, "stage"))
    @invariant()
    def nobody_keeps_the_slots_of_what_is_not_leased_to_it(self) -> None:
        """I9: of those who are alive; who is taken for dead gets all of them back when it is heard."""
        head = self.stage.head
        for member in head.state.members.alive():
            for evaluation, uid, attempt, _ in member.leased:
                entry = None if evaluation else head.state.ledger.open.get(uid)
                is_leased = entry is not None and (entry.holder, entry.attempt) == (member.name, attempt)
                assert evaluation or is_leased, f"{member.name} keeps the slots of {sorted(member.leased)}"

    def teardown(self) -> None:
        """I11: once everybody answers, an update comes or the job ends; with a reason when it ends in error."""
        if not hasattr(self, "stage"):
            return
        stage = self.stage
        counts = stage.head.state.ledger.counts
        assert stage.recover(), f"{NOBODY_MOVES}: {stage.head.state.phase}, u {stage.head.state.gate.u}, {counts}"
        self.the_witness_has_nothing_to_say()
        self.the_heads_own_counts_add_up()
        if stage.end is not None and stage.end.code:
            assert stage.witness.excuses.explain(stage.end.sentence), stage.end
        elif stage.end is not None:
            stage.witness.end()
            self.the_witness_has_nothing_to_say()


def settings_of(n_examples: int, *, always_the_same: bool) -> settings:
    return settings(
        max_examples=n_examples,
        stateful_step_count=50,
        deadline=None,
        derandomize=always_the_same,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


class VerdictMachine(HeadMachine):
    """Verdicts without a value, and what is declared for them."""

    @initialize(
        policy=st.sampled_from(StalenessPolicy),
        batch_size=st.integers(1, 2),
        eta=st.integers(0, 2),
        n_samples=st.integers(2, 4),
        n_generators=st.integers(1, 2),
        checkpoint_every=st.sampled_from([0, 1, 2]),
        partial_groups=st.booleans(),
        on_timeout=st.sampled_from([None, None, -1.0]),
        on_error=st.sampled_from([None, None, -2.0]),
        total_steps=st.sampled_from([3, 30]),
        rounds=st.integers(0, 20),
    )
    def begin(self, rounds: int, **drawn: object) -> None:
        super().begin(rounds, **drawn)

    @rule(which=CHOICE, n=st.integers(1, 3), status=st.sampled_from(["error", "timeout"]))
    def fail_some(self, which: int, n: int, status: str) -> None:
        """What was just made has no value."""
        self.flow(2, "rewards")
        self.judge(who=0, which=which % 80, n=n, status=status)


TestHead = HeadMachine.TestCase
TestHead.settings = settings_of(200, always_the_same=True)
TestVerdicts = VerdictMachine.TestCase
TestVerdicts.settings = settings_of(100, always_the_same=True)


@pytest.mark.parametrize(
    ("sabotage", "noticed"),
    [
        (left_out.older_attempts_count, "I6 "),
        (left_out.credits_return_early, "I1 "),
        (left_out.attempts_begin_again, f"I6 |{NOBODY_MOVES}"),
        (left_out.nobody_catches_up, NOBODY_MOVES),
        (left_out.leases_of_the_dead_are_forgotten, f"who is not there|{NOBODY_MOVES}"),
        (left_out.a_term_ends_no_lease, "keeps the slots|I9 "),
        (left_out.data_does_not_go_back, "I4 "),
        (left_out.a_group_is_ready_early, "I8 "),
    ],
)
def test_the_head_machine_detects_a_rule_left_out(
    monkeypatch: pytest.MonkeyPatch, sabotage: left_out.Sabotage, noticed: str
) -> None:
    sabotage(monkeypatch)
    quick = settings(settings_of(200, always_the_same=True), phases=[Phase.generate])
    with pytest.raises(AssertionError, match=noticed):
        run_state_machine_as_test(HeadMachine, settings=quick)


@pytest.mark.soak
@pytest.mark.parametrize("part", range(5))  # hypothesis remembers all that it has drawn: 150 KB an example
def test_the_head_in_many_more_orders_of_events(part: int) -> None:
    run_state_machine_as_test(HeadMachine, settings=settings_of(4_000, always_the_same=False))
