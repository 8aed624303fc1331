"""Scenarios: sizes, lengths, speeds and faults of one simulated schedule, drawn from one seed."""

import random
from dataclasses import dataclass, replace
from enum import StrEnum

from areal_bus.core.evaluation import EvaluationSet
from areal_bus.core.parts.split import RankPool
from areal_bus.core.parts.stages import Stage
from areal_bus.core.parts.staleness import StalenessPolicy
from areal_bus.core.planner.split_planner import PlannerRules
from areal_bus.core.rows import DataSource, PassRateWindow, Row
from areal_bus.core.rules import HeadRules
from areal_bus.messages import Role
from areal_lab.staleness.simulator.sources import SimulatedSource, mixture


class Tail(StrEnum):
    """Distribution of a sample's tokens."""

    UNIFORM = "uniform"
    LOG_NORMAL = "log-normal"  # shape: sigma of the logarithm
    PARETO = "pareto"  # shape: alpha


@dataclass(frozen=True, slots=True)
class ScenarioLengths:
    """Tokens of a sample: `scale` is the mean (uniform), the median (log-normal) or the least (Pareto)."""

    tail: Tail
    scale: float
    shape: float
    cap: int  # the longest allowed, as gconfig.max_new_tokens

    def draw(self, rng: random.Random) -> int:
        if self.tail is Tail.UNIFORM:
            tokens = rng.uniform(1, 2 * self.scale)
        elif self.tail is Tail.LOG_NORMAL:
            tokens = self.scale * rng.lognormvariate(0.0, self.shape)
        else:
            tokens = self.scale * rng.paretovariate(self.shape)
        return max(1, min(self.cap, int(tokens)))


@dataclass(frozen=True, slots=True)
class Fault:
    """Something happens to an actor at `at_s` and is over after `for_s`.

    - "crash": a new incarnation starts; "stop": SIGSTOP and SIGCONT
    - "cut": it is partitioned; "deaf": messages of the head do not reach it
    - "reset": its connection to the head breaks, with all messages in flight
    - of the head "kill" (the whole job, which is resumed) and "drain" (it ends by itself, and is resumed)
    - of a generator "leave": it drains, and another one joins in its place
    - of a learner "tear": a crash that damages the newest checkpoint, where more than one are kept
    """

    kind: str
    role: Role
    index: int
    at_s: float
    for_s: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """One schedule's world. Seconds are virtual."""

    seed: int
    policy: StalenessPolicy
    batch_size: int
    eta: int
    n_samples: int
    total_steps: int
    stages: tuple[Stage, ...] = ()  # of another n_samples by version; empty: n_samples throughout
    n_generators: int = 2
    n_rewards: int = 1
    n_learners: int = 1
    schedule: tuple[tuple[int, int], ...] = ()  # (step, learner ranks): the split changes from a step on
    capacity: int = 8  # samples a generator decodes at once
    lengths: ScenarioLengths = ScenarioLengths(Tail.UNIFORM, 6.0, 0.0, 60)
    token_s: float = 1.0
    interrupts: bool = True  # new weights are swapped in between two tokens; else when the running samples have ended
    finishes: bool = False  # with it: a sample ends at the version that it began with; at most eta + 1 are held
    n_rows: int | None = None  # of the data; None: more than are needed
    sources: tuple[SimulatedSource, ...] = ()  # several, without an end, instead of n_rows
    window: PassRateWindow | None = None  # of their curriculum
    drop_last: bool = False
    n_problems: int = 0  # evaluated before and after
    evaluate_every: int = 0  # versions between evaluations of two sets in training
    evaluate_patience: int = 0  # evaluations without a better reward until the run stops early
    update_s: float = 5.0
    push_s: float = 2.0
    score_s: float = 1.0
    link_s: float = 0.2
    p_error: float = 0.0  # a verdict is an error or a timeout
    on_timeout: float | None = None  # reward of such a sample
    on_error: float | None = None
    partial_groups: bool = False
    compares: bool = False  # reward.group: the rank of a sample's reward in its group, from 0 to 1
    max_refill: int = 0  # groups without signal that are replaced for a batch
    p_flat: float = 0.0  # share of prompts whose rewards are all equal
    p_unsampled: float = 0.0  # a group cannot be sampled
    p_lost: float = 0.0  # of the messages that their sender repeats
    p_twice: float = 0.0
    p_push_fault: float = 0.0  # a part of a push is slow, fails, or leaves wrong weights
    checkpoint_every: int = 0
    checkpoint_keep: int = 1
    on_collapse: str = "warn"
    collapses_at: int = 0  # first version whose figures announce a collapse; 0: none
    p_timed: float = 0.0  # an update after which a checkpoint is due by time
    checkpoint_s: float = 2.0  # at most; until then nothing of it is on disk
    checkpoint_at_end: bool = False
    p_held: float = 0.0  # an update of which supervisors hold a copy
    frontier_s: float = 2.0
    p_disk: float = 0.0  # a checkpoint or a frontier cannot be written
    poison: frozenset[int] = frozenset()  # rows that crash every generator that samples them
    slow: float = 0.0  # factor by which pushes to generator 0 take longer, within the deadline; 0: they do not
    refuses: str = ""  # how the first generators fail every push: "said" (reported), "silent", "" (they do not)
    refuses_from_s: float = 0.0
    refuses_until_s: float = 0.0
    n_refusing: int = 1
    n_failing: int = 0  # generators, the first ones, that fail at every prompt
    fails_from_s: float = 0.0
    fails_until_s: float = 0.0
    faults: tuple[Fault, ...] = ()
    calm_s: float = 0.0  # no fault from here on
    joins_s: tuple[float, ...] = ()  # when each generator joins; the last ones may be late
    tick_s: float = 4.0  # between two clock ticks of the head
    heartbeat_s: float = 6.0
    silent_s: float = 20.0
    push_timeout_s: float = 25.0
    resend_s: float = 12.0
    report_tokens: int = 0  # new tokens of a live sample, reported on a weight update; 0: no reports
    report_bytes: int = 1 << 20  # of these reports that the head keeps
    planner: PlannerRules | None = None  # of a split that adapts
    patience_s: float = 4000.0  # without an update, after calm: everyone waits (I11)

    @property
    def pool(self) -> RankPool | None:
        """The ranks that may change their role; None where the split is fixed."""
        if self.planner is not None and self.planner.generators_at:
            least = min(self.planner.generators_at)
            return RankPool(least, self.planner.generators_at[least])
        if not self.schedule:
            return None
        least = min(self.n_learners, *(learners for _, learners in self.schedule))
        return RankPool(least, self.n_generators + self.n_learners - least)

    @property
    def rules(self) -> HeadRules:
        return HeadRules.of(
            self,
            assemble_s=self.calm_s + 1000.0,
            evaluate_before=self.n_problems > 0,
            evaluate_after=self.n_problems > 0,
            evaluate_share=0.5,
            evaluate_metric="reward",
            evaluation_sets=self._sets(),
            partial_bytes=self.report_bytes,
            capacity=None,  # the simulated generators ask for no more than theirs
        )

    def samples_at(self, born: int, source: str = "") -> int:
        """Samples of a group whose prompt is admitted at this version, of a row of this source."""
        begun = [stage for stage in self.stages if stage.from_step <= born]
        own = [one.n_samples for one in begun[-1].sources if one.name == source] if begun else []
        return own[0] if own else begun[-1].n_samples if begun else self.n_samples

    @property
    def most_samples(self) -> int:
        """Samples of the largest group."""
        of_sources = (one.n_samples for stage in self.stages for one in stage.sources)
        return max([self.n_samples, *(stage.n_samples for stage in self.stages), *of_sources])

    def _sets(self) -> tuple[EvaluationSet, ...]:
        main = EvaluationSet("", 2, ("{}",) * self.n_problems)
        return (main, EvaluationSet("small", 1, ("{}",))) if self.evaluate_every else (main,)

    def data_source(self) -> DataSource:
        """A new one, at its beginning."""
        return mixture(self.sources, self.window, seed=self.seed) if self.sources else Numbers(self.n_rows)

    @property
    def slowest_s(self) -> float:
        """Longest transfer of weights that meets the push deadline: the announcement and the report take time, too."""
        return 0.8 * self.push_timeout_s - 4 * self.link_s

    def is_refused(self, members: list[str], now: float) -> bool:
        """Whether a push to these members fails for all, because a refusing generator is among them."""
        if not self.refuses or not self.refuses_from_s <= now < self.refuses_until_s:
            return False
        return any(int(name.partition("-")[2].partition(".")[0]) < self.n_refusing for name in members)

    def fails(self, name: str, now: float) -> bool:
        """Whether this generator fails at every prompt now."""
        is_bad = int(name.partition("-")[2].partition(".")[0]) < self.n_failing
        return is_bad and self.fails_from_s <= now < self.fails_until_s

    @property
    def rejects_all(self) -> bool:
        """No prompt can ever be trained."""
        return self.p_unsampled >= 1.0 or (self.p_error >= 1.0 and self.on_timeout is None and self.on_error is None)

    def is_flat(self, uid: int) -> bool:
        """Whether the values of this prompt's samples are all equal."""
        return self.p_flat > 0 and random.Random(f"flat {self.seed} {uid}").random() < self.p_flat


class Numbers:
    """Rows 0, 1, 2, ... up to a limit."""

    def __init__(self, n_rows: int | None) -> None:
        self._n_rows = n_rows
        self.position = 0

    def draw(self) -> Row | None:
        if self._n_rows is not None and self.position >= self._n_rows:
            return None
        self.position += 1
        return Row(self.position - 1, 0, str(self.position - 1))

    def learn(self, row: Row, n_right: int, n_judged: int) -> None:
        """Nothing."""

    def state(self) -> str:
        return ""

    def go_to(self, position: int, state: str) -> None:
        self.position = position


def draw(seed: int, policy: StalenessPolicy | None = None) -> Scenario:
    """The schedule of this seed: small, and with faults of every kind in about half of the seeds."""
    p_held = random.Random(f"copies of {seed}").choice((0.0, 0.0, 0.5, 1.0))
    return replace(_with_splits(_draw(seed, policy), random.Random(f"splits of {seed}")), p_held=p_held)


def _draw(seed: int, policy: StalenessPolicy | None) -> Scenario:
    rng, more = random.Random(seed), random.Random(f"more of {seed}")
    scenario = _with_times(_with_sizes(seed, policy, rng), rng)
    scenario = _with_later_options(_with_storage_and_reports(scenario, more))
    is_rough = scenario.calm_s > 0
    if is_rough and more.random() < 0.05:
        return _in_a_storm(scenario, more)
    heads = random.Random(f"heads of {seed}")
    return _under_many_heads(scenario, heads) if is_rough and heads.random() < 0.05 else scenario


def _with_sizes(seed: int, policy: StalenessPolicy | None, rng: random.Random) -> Scenario:
    """Sizes, lengths and rows of a schedule. Faults end at `calm_s`; a schedule without faults has calm_s = 0."""
    policies = tuple(StalenessPolicy)
    chosen = policies[rng.randrange(len(policies))]
    n_generators, n_rewards, n_learners = rng.randint(1, 3), rng.randint(1, 2), rng.choice((1, 1, 1, 2))
    calm_s = rng.uniform(20, 100) if rng.random() < 0.5 else 0.0
    interrupts = rng.random() < 0.8
    return Scenario(
        seed=seed,
        policy=policy or chosen,
        calm_s=calm_s,
        interrupts=interrupts,
        p_error=1.0 if rng.random() < 0.02 else 0.0,
        batch_size=rng.choice((1, 1, 2, 2, 3)),
        eta=rng.choice((0, 1, 1, 2, 2, 3, 4, 6)),
        n_samples=rng.choice((1, 1, 2, 2, 3)),
        total_steps=rng.choice((2, 2, 3, 3, 4, 6)),
        n_generators=n_generators,
        n_rewards=n_rewards,
        n_learners=n_learners,
        capacity=rng.choice((1, 3, 8)),
        lengths=_lengths(rng),
        n_rows=rng.randint(1, 14) if rng.random() < 0.25 else None,
        drop_last=rng.random() < 0.4,
        n_problems=rng.randint(1, 3) if rng.random() < 0.1 else 0,
    )


def _with_times(scenario: Scenario, rng: random.Random) -> Scenario:
    """Durations, limits, lost messages and faults of actors."""
    calm_s, is_rough = scenario.calm_s, scenario.calm_s > 0
    n_generators = scenario.n_generators
    return replace(
        scenario,
        update_s=rng.choice((0.5, 3.0, 10.0)),
        push_s=rng.choice((0.5, 2.0, 8.0)),
        score_s=rng.choice((0.1, 1.0, 5.0)),
        link_s=rng.choice((0.01, 0.2, 2.0)),
        p_error=scenario.p_error or rng.choice((0.0, 0.0, 0.05, 0.2)),
        p_unsampled=rng.choice((0.0, 0.0, 0.0, 0.05)),
        p_lost=rng.choice((0.0, 0.05, 0.2)) if is_rough else 0.0,
        p_twice=rng.choice((0.0, 0.05, 0.2)) if is_rough else 0.0,
        p_push_fault=rng.choice((0.0, 0.1, 0.3)) if is_rough else 0.0,
        checkpoint_every=rng.choice((0, 1, 1, 2, 3)),
        checkpoint_keep=rng.choice((1, 1, 2)),
        checkpoint_s=rng.choice((0.1, 5.0)),
        frontier_s=rng.choice((0.1, 5.0, 20.0)),
        faults=_faults(rng, n_generators, scenario.n_rewards, scenario.n_learners, calm_s) if is_rough else (),
        joins_s=tuple(rng.uniform(0, 3) if rng.random() < 0.8 else rng.uniform(3, 60) for _ in range(n_generators)),
        tick_s=6.0 if is_rough else 25.0,
        heartbeat_s=8.0 if is_rough else 100.0,
        silent_s=25.0 if is_rough else 1000.0,
        push_timeout_s=25.0 if scenario.interrupts else 500.0,
    )


def _with_storage_and_reports(scenario: Scenario, rng: random.Random) -> Scenario:
    """Disk faults, rows that kill their sampler, slow weights, further faults and reports of unfinished samples."""
    calm_s, is_rough = scenario.calm_s, scenario.calm_s > 0
    return replace(
        scenario,
        checkpoint_at_end=rng.random() < 0.5,
        p_disk=rng.choice((0.0, 0.0, 0.0, 0.3)) if is_rough else 0.0,
        poison=frozenset({rng.randint(0, 6)}) if rng.random() < 0.05 else frozenset(),
        slow=6.0 if rng.random() < 0.15 else 0.0,
        faults=(*scenario.faults, *_further(rng, scenario.n_generators, calm_s)) if is_rough else (),
        report_tokens=rng.choice((0, 1, 1, 3)),
        report_bytes=rng.choice((2000, 1 << 20)),
    )


def _with_later_options(scenario: Scenario) -> Scenario:
    """Options with a random stream each, so that the schedules of older seeds stay the same but for the option."""
    seed = scenario.seed
    timed = random.Random(f"checkpoints by time of {seed}")
    scenario = replace(scenario, p_timed=timed.choice((0.0, 0.0, 0.0, 0.5)))
    if scenario.interrupts and random.Random(f"versions of {seed}").random() < 0.2:
        scenario = replace(scenario, finishes=True, push_timeout_s=500.0)
    if scenario.n_problems:
        evaluates = random.Random(f"evaluations of {seed}")
        scenario = replace(scenario, evaluate_every=evaluates.choice((0, 1, 1, 2)))
    scenario = _with_sources(scenario, random.Random(f"sources of {seed}"))
    if scenario.p_error:
        scenario = _under_declared_verdicts(scenario, random.Random(f"verdicts of {seed}"))
    if scenario.n_samples > 1:
        scenario = _with_refills(scenario, random.Random(f"refill of {seed}"))
    if scenario.n_samples > 1 and random.Random(f"compares of {seed}").random() < 0.1:
        scenario = replace(scenario, compares=True)
    return _with_failing_generators(scenario, random.Random(f"failing generators of {seed}"))


def _with_failing_generators(scenario: Scenario, rng: random.Random) -> Scenario:
    """In 10 % of the schedules with two generators or more: some fail at every prompt, for a while or for ever."""
    if scenario.n_generators < 2 or scenario.poison or rng.random() >= 0.1:
        return scenario
    begins_s, lasts_s = rng.choice((0.0, rng.uniform(0, 60))), rng.choice((30.0, 1e9))
    n_failing = rng.randint(1, scenario.n_generators - 1)
    return replace(scenario, n_failing=n_failing, fails_from_s=begins_s, fails_until_s=begins_s + lasts_s)


def _with_sources(scenario: Scenario, rng: random.Random) -> Scenario:
    """In 15 % of the schedules without an end of the data: one to three small sources, most with a curriculum."""
    if scenario.n_rows is not None or scenario.poison or rng.random() >= 0.15:
        return scenario
    names, weights = ("a", "b", "c")[: rng.randint(1, 3)], (0.3, 1.0, 1.0, 2.0, 5.0)
    sources = tuple(SimulatedSource(name, rng.choice(weights), rng.randint(1, 5)) for name in names)
    window = PassRateWindow(rng.choice((0.0, 0.3)), rng.choice((0.7, 1.0)), rng.choice((2, 3, 4)))
    return replace(scenario, sources=sources, window=window if rng.random() < 0.8 else None)


def _with_splits(scenario: Scenario, rng: random.Random) -> Scenario:
    """In 25 % of the schedules with two generators or more: one to three changes of the split."""
    if scenario.n_generators < 2 or rng.random() >= 0.25:
        return scenario
    return splitting(scenario, rng)


def splitting(scenario: Scenario, rng: random.Random) -> Scenario:
    """With one to three changes of the split; a generator is always left."""
    most = scenario.n_learners + scenario.n_generators - 1
    steps = sorted(rng.sample(range(1, scenario.total_steps), min(rng.randint(1, 3), scenario.total_steps - 1)))
    return replace(scenario, schedule=tuple((step, rng.randint(1, most)) for step in steps))


def _with_refills(scenario: Scenario, rng: random.Random) -> Scenario:
    """In 40 % of the schedules: prompts with equal rewards, and a bound on the groups that replace them."""
    if rng.random() >= 0.4:
        return scenario
    return replace(scenario, p_flat=rng.choice((0.2, 0.5, 0.9, 1.0)), max_refill=rng.choice((0, 1, 2, 5)))


def _under_declared_verdicts(scenario: Scenario, rng: random.Random) -> Scenario:
    """Failed scores: some schedules declare a reward for them, others allow groups without them."""
    on_timeout, on_error = rng.choice((None, None, -1.0)), rng.choice((None, None, -2.0))
    declared = replace(scenario, on_timeout=on_timeout, on_error=on_error)
    if rng.random() < 0.6 or None not in (on_timeout, on_error):
        return declared
    p_error = max(scenario.p_error, rng.choice((0.05, 0.2, 0.4)))
    return replace(declared, partial_groups=True, n_samples=rng.choice((3, 3, 4, 5)), p_error=p_error)


def _under_many_heads(scenario: Scenario, rng: random.Random) -> Scenario:
    """Many crashes of the head, with one to three learner ranks that keep running."""
    calm_s = 150.0
    faults = list(scenario.faults)
    for _ in range(rng.randint(2, 10)):
        faults.append(Fault("crash", Role.HEAD, 0, rng.uniform(2, calm_s), rng.choice((0.05, 0.5, 2.0, 10.0))))
    return replace(
        scenario,
        total_steps=rng.choice((4, 8, 12)),
        n_learners=rng.choice((1, 2, 2, 3)),
        update_s=rng.choice((0.5, 3.0, 10.0, 30.0)),
        checkpoint_every=rng.choice((0, 0, 1, 3)),
        n_rows=None if scenario.sources else rng.choice((None, None, 20)),
        faults=tuple(faults),
        calm_s=calm_s,
    )


def _in_a_storm(scenario: Scenario, rng: random.Random) -> Scenario:
    """Long samples, learners and generators that die again and again between checkpoints, one that is always behind."""
    calm_s = 120.0
    faults = list(scenario.faults)
    for role, index, n in ((Role.LEARNER, 0, rng.randint(1, 3)), (Role.GENERATOR, 1, rng.randint(0, 2))):
        faults += [Fault("crash", role, index, rng.uniform(40, calm_s), rng.choice((1.0, 5.0))) for _ in range(n)]
    return replace(
        scenario,
        batch_size=1,
        eta=rng.choice((2, 4)),
        n_samples=3,
        total_steps=15,
        n_generators=max(2, scenario.n_generators),
        joins_s=(0.0,) * max(2, scenario.n_generators),
        capacity=rng.choice((2, 8)),
        lengths=ScenarioLengths(Tail.LOG_NORMAL, 6.0, 1.0, 200),
        n_rows=None,
        update_s=0.5,
        push_s=0.5,
        score_s=rng.choice((1.0, 5.0)),
        link_s=rng.choice((0.2, 2.0)),
        p_error=0.0,
        p_unsampled=0.0,
        checkpoint_every=rng.choice((2, 3)),
        checkpoint_s=0.1,
        frontier_s=0.1,
        slow=rng.choice((0.0, 0.0, 6.0)),
        faults=tuple(faults),
        calm_s=calm_s,
    )


def _lengths(rng: random.Random) -> ScenarioLengths:
    return rng.choice(
        (
            ScenarioLengths(Tail.UNIFORM, 6.0, 0.0, 60),
            ScenarioLengths(Tail.LOG_NORMAL, 5.0, 1.0, 120),
            ScenarioLengths(Tail.PARETO, 2.0, 1.2, 200),
        )
    )


KINDS = {Role.HEAD: ("crash", "crash", "stop", "cut", "kill", "drain")}


def _faults(rng: random.Random, n_generators: int, n_rewards: int, n_learners: int, calm_s: float) -> tuple[Fault, ...]:
    """At most four faults that end by `calm_s`. Some are long enough for the head to declare the actor dead."""
    faults = []
    n_of = {Role.GENERATOR: n_generators, Role.REWARD: n_rewards, Role.LEARNER: n_learners, Role.HEAD: 1}
    for _ in range(rng.randint(0, 4)):
        role = rng.choices(tuple(n_of), (5, 2, 2, 2))[0]
        index = rng.randrange(n_of[role])
        at_s = rng.uniform(0, calm_s)
        for_s = min(rng.choice((2.0, 10.0, 30.0, 60.0)), calm_s - at_s)
        faults.append(Fault(rng.choice(KINDS.get(role, ("crash", "stop", "cut"))), role, index, at_s, for_s))
    return tuple(faults)


def _further(rng: random.Random, n_generators: int, calm_s: float) -> list[Fault]:
    """Rare faults: a broken connection, a learner that finds a damaged checkpoint, a generator that leaves."""
    faults = []
    for kind, share in (("reset", 0.25), ("deaf", 0.1)):
        if rng.random() < share:
            role = rng.choice((Role.GENERATOR, Role.GENERATOR, Role.REWARD, Role.LEARNER))
            at_s = rng.uniform(0, calm_s)
            index = rng.randrange(n_generators) if role is Role.GENERATOR else 0
            faults.append(Fault(kind, role, index, at_s, min(40.0, calm_s - at_s)))
    if rng.random() < 0.1:
        faults.append(Fault("tear", Role.LEARNER, 0, rng.uniform(0, calm_s), 2.0))
    if rng.random() < 0.15:
        faults.append(Fault("leave", Role.GENERATOR, rng.randrange(n_generators), rng.uniform(0, calm_s), 0.0))
    return faults
