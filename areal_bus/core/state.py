"""The state of the head, shared by the modules that change it (`transitions/`), and the phases of a run."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from areal_bus.authorization import LeaseIds, index_of
from areal_bus.core.evaluation import Evaluation, Evaluations
from areal_bus.core.members.console_reports import Deaths, ScoreFailures
from areal_bus.core.members.lease_failures import LeaseFailures, LeaseLimit, actor_of
from areal_bus.core.members.membership import Member, Membership, MemberState
from areal_bus.core.parts.collapse import CollapseForecast, Rollback
from areal_bus.core.parts.gate import Gate
from areal_bus.core.parts.head_checkpoint import START, HeadCheckpoint, HeadSavepoint, OpenPrompt
from areal_bus.core.parts.ledger import Ledger
from areal_bus.core.parts.partial_rollouts import PartialRollouts
from areal_bus.core.parts.push_queue import PushQueue
from areal_bus.core.parts.terms import Terms
from areal_bus.core.rows import DataCursor, DataSource
from areal_bus.core.rules import HeadRules
from areal_bus.messages import Role


class Phase(StrEnum):
    """Where the run is."""

    ASSEMBLING = "assembling"
    BEFORE = "evaluating before"
    TRAINING = "training"
    CLOSING = "closing"  # the last version is on its way to the generators
    AFTER = "evaluating after"
    STOPPING = "stopping"


@dataclass(slots=True)
class SplitChange:
    """A change of the split that is under way (core/transitions/split_changes.py)."""

    target: int | None = None  # learner ranks that are wanted; None: no change is under way
    wanted_at: int = 0  # version at which it was wanted: it does not begin below that
    is_next: bool = False  # it follows the update in progress: no evaluation begins before it
    is_handing_over: bool = False  # the learners write the checkpoint from which the next ones go on
    handed_over: int | None = None  # the version that the next learners begin at; None: they have begun


class HeadState:
    """Everything that one incarnation of the head knows. A restarted head gets what its predecessor wrote to disk."""

    def __init__(
        self,
        rules: HeadRules,
        source: DataSource,
        *,
        incarnation: int = 0,
        term: int = 0,
        checkpoints: Mapping[int, HeadCheckpoint] = START,
        savepoints: Iterable[HeadSavepoint] = (),
    ) -> None:
        newest = checkpoints[max(checkpoints)]
        self.rules = rules
        self.now = 0.0  # of the event that is handled, in monotonic seconds
        self.incarnation = incarnation
        self.split = rules.split
        self.change = SplitChange()
        self.phase = Phase.ASSEMBLING
        self.is_draining = False
        self.gate = Gate(batch_size=rules.batch_size, eta=rules.eta, policy=rules.policy)
        self.ledger = Ledger(compares=rules.compares)
        self.members = Membership(silent_s=rules.silent_s)
        self.rows = DataCursor(source, max_reissues=rules.max_reissues)
        self.partials = PartialRollouts(rules.partial_bytes)
        self.evaluations = Evaluations()
        self.pushes = PushQueue(timeout_s=rules.push_timeout_s, incarnation=incarnation)
        self.terms = Terms(term, checkpoints, savepoints, every=rules.checkpoint_every, keep=rules.checkpoint_keep)
        self.forecast = CollapseForecast()
        self.rollback: Rollback | None = None  # that the run has ordered
        self.is_rolling_back = False  # the next term obeys it
        self.stopped = ""  # why training ends before its last step; "" if it does not
        self.lease_ids = LeaseIds(rules.lease_secret)
        self.deaths = Deaths()
        self.lease_failures = LeaseFailures()
        self.evicted = set[int]()  # generators of the job, by index, that are evicted for good, also by earlier heads
        self.first_failure: float | None = None  # when a lease first failed, in monotonic seconds
        self.lease_limit = LeaseLimit()  # of guests
        self.score_failures = ScoreFailures()
        self.results: dict[str, Evaluation] = {}  # finished evaluations of this incarnation
        self.figures = dict(newest.results)  # of all finished evaluations, also of earlier incarnations
        self.max_lag = newest.max_lag  # of trained tokens that count; None: there are none
        self.refunds_in_a_row = 0  # unexpected ones, without a complete group in between
        self.last_refund_error = ""

    def remember(self, order: Rollback | None) -> None:
        """The rollback that an earlier head of this run has ordered."""
        self.rollback, self.is_rolling_back = order, order is not None and order.is_open(self.terms.term)

    @property
    def version(self) -> int:
        """The version of the run. Before a learner has begun: that of the newest checkpoint."""
        return max(self.gate.u, *self.terms.checkpoints)

    def eligible_generators(self) -> list[Member]:
        """Generators that may get work: they hold the published version or a newer one (I7)."""
        healthy = self.with_share(self.members.of(Role.GENERATOR, MemberState.HEALTHY))
        return [x for x in healthy if x.version is not None and x.version >= self.gate.v and not x.leaving]

    def with_share(self, generators: list[Member]) -> list[Member]:
        """Those that may get work: at eta = 0 the job's own, because a guest would change the share of each."""
        return generators if self.rules.eta else [x for x in generators if not self.is_guest(x)]

    def own_generators(self) -> list[int]:
        """The generators of the job, by index, without those that are evicted for good."""
        return [index for index in range(self.split.generators) if index not in self.evicted]

    def is_guest(self, member: Member) -> bool:
        """Whether it is a generator that joined the running job from outside."""
        return member.role is Role.GENERATOR and self.is_guests(member.name)

    def is_guests(self, generator: str) -> bool:
        """Whether this is the name of a guest, also of one that is gone."""
        return index_of(generator) >= self.split.generators

    def others_than(self, failed_at: set[str]) -> list[Member]:
        """Generators that may sample a prompt at which these failed: alive, neither paused nor leaving."""
        there = self.with_share(self.members.of(Role.GENERATOR, MemberState.STALE, MemberState.HEALTHY))
        paused = self.lease_failures.is_paused
        return [x for x in there if not x.leaving and not paused(x.name) and actor_of(x.name) not in failed_at]

    def others_still_load(self, failed_at: set[str]) -> bool:
        """Whether others than `failed_at` were never ready yet; false after the time a ring takes to assemble."""
        self.first_failure = self.now if self.first_failure is None else self.first_failure
        if self.now - self.first_failure > self.rules.assemble_s:
            return False
        awaited = (index for index in self.own_generators() if index not in self.members.ready_generators)
        return any(f"{Role.GENERATOR}-{index}" not in failed_at for index in awaited)

    def may_sample(self, member: Member, failed_at: set[str]) -> bool:
        """Whether it may be leased a prompt at which these failed: not again, while there are others."""
        if actor_of(member.name) not in failed_at:
            return True
        return not self.others_than(failed_at) and not self.others_still_load(failed_at)

    def excluded_generators(self) -> list[Member]:
        """Stale generators that get no share at eta = 0, as long as they miss pushes of their own."""
        return [x for x in self.members.of(Role.GENERATOR, MemberState.STALE) if self.pushes.misses_its_own(x.name)]

    def checkpoint(self, version: int, *, verdicts: bool = True, reopens: bool = False) -> HeadCheckpoint:
        """Capture the state at `version`. A batch in training counts as trained, or with `reopens` as not taken."""
        open_prompts = tuple(
            OpenPrompt(
                entry.uid,
                entry.born,
                entry.n_samples,
                entry.attempt,
                entry.n_deaths,
                self.rows.of(entry.uid),
                tuple(entry.verdicts.values()) if verdicts else (),
                entry.group if verdicts else None,
            )
            for entry in (self.ledger.open.values() if reopens else self.ledger.live())
        )
        rows, figures = self.rows, dict(self.figures)
        return HeadCheckpoint(
            version,
            self.ledger.next_uid,
            rows.position,
            rows.waiting,
            open_prompts,
            figures,
            self.max_lag,
            rows.state,
            dict(self.forecast.first),
        )
