"""Records of the witness: prompts, expected failures and pushes."""

from dataclasses import dataclass, field
from typing import Any

from areal_bus import messages as m
from areal_bus.messages import Refund, Role
from areal_lab.staleness.simulator.reward import ranks, role_rewards
from areal_lab.staleness.simulator.scenario import Scenario
from areal_lab.staleness.simulator.sources import Key, Learned


@dataclass(frozen=True, slots=True)
class Violation:
    """An invariant that did not hold."""

    invariant: str  # "I1" .. "I12"
    what: str
    at_s: float
    uid: int | None = None

    def __str__(self) -> str:
        about = "" if self.uid is None else f" (prompt {self.uid})"
        return f"{self.invariant} at {self.at_s:.2f} s{about}: {self.what}"


@dataclass(slots=True)
class Followed:
    """One admitted prompt, as recorded by the witness."""

    born: int
    row: Key  # source, epoch, row
    attempt: int = 0
    state: str = "live"  # live, training, trained, refunded
    accepted: dict[int, int] = field(default_factory=dict)  # sample -> attempt whose verdict counted
    issue: int = 0  # earlier issues of its row
    batch: int | None = None  # its batch
    tokens: dict[int, int] = field(default_factory=dict)  # sample -> tokens of the verdict that counted
    failures: dict[tuple[int, int], str] = field(default_factory=dict)  # (sample, attempt) -> verdict, if no value
    failed: str = ""  # status of a counted verdict that must lead to a refund
    correct: dict[tuple[int, int], bool] = field(default_factory=dict)  # (sample, attempt) -> whether it is right
    rewards: dict[tuple[int, int], float] = field(default_factory=dict)  # (sample, attempt) -> reward, if it has one
    roles: dict[tuple[int, int], str] = field(default_factory=dict)  # (sample, attempt) -> roles of its trajectories
    n_accounted: int = 0  # trained, masked or dropped
    n_leases: int = 0
    compared: set[frozenset[tuple[int, int]]] = field(default_factory=set)  # `accepted` when its group had a verdict
    is_compared: bool = False  # that verdict counts

    def rewards_of(self) -> dict[int, float]:
        """The reward of each accepted sample that has one: of a compared group, its rank among them."""
        own = {key[0]: self.rewards[key] for key in self.accepted.items() if key in self.rewards}
        if not self.is_compared:
            return own
        ranked = ranks(list(own.values()))
        failed = {sample for sample, attempt in self.failures if self.accepted.get(sample) == attempt}
        return {i: own[i] if i in failed else rank for i, rank in zip(own, ranked, strict=True)}

    def rewards_by_role(self, sample: int) -> list[tuple[str, float]]:
        """Role and reward of each trajectory of an accepted sample with a reward; without roles, ("", reward)."""
        known, reward = (sample, self.accepted[sample]), self.rewards_of()[sample]
        roles = self.roles.get(known, "")
        own = {} if self.is_compared or known in self.failures else role_rewards(roles, reward)
        return [(role, own.get(role, reward)) for role in roles.split() or [""]]

    @property
    def is_flat(self) -> bool:
        """Whether all rewards of each role are equal."""
        by_role: dict[str, set[float]] = {}
        for sample in self.rewards_of():
            for role, reward in self.rewards_by_role(sample):
                by_role.setdefault(role, set()).add(reward)
        return bool(by_role) and all(len(found) == 1 for found in by_role.values())

    @property
    def learned(self) -> Learned:
        """The result of the group for a curriculum."""
        judged = [self.correct[key] for key in self.accepted.items() if key in self.correct]
        return self.row, sum(judged), len(judged)

    @property
    def n_received(self) -> int:
        return sum(self.tokens.values())


THERE = {"healthy", "stale"}
GENERATOR = f"{Role.GENERATOR}-"


class Pushed:
    """The generators according to the journal: state, version held, pushes missed."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget all members: the head has restarted."""
        self._state: dict[str, str] = {}  # generator -> its last state
        self._holds: dict[str, int] = {}
        self.begin_term(0)

    def begin_term(self, version: int) -> None:
        """No push is in flight, none was missed, and held versions after `version` do not count."""
        self._push: m.PushBegin | None = None  # the last one
        self._begun_s = 0.0  # when it began
        self._is_catch_up = False
        self._root_is_done = False
        self._done: set[str] = set()  # members that completed it
        self._missed: dict[str, list[float]] = {}  # member -> begin of each own push missed in a row
        self._holds = {name: held for name, held in self._holds.items() if held <= version}

    # events

    def on_joined(self, line: dict[str, Any]) -> None:
        """A member joins: its earlier incarnation has ended."""
        name = line["name"]
        if name.startswith(GENERATOR):
            actor = name.rpartition(".")[0]
            self._state = {x: state for x, state in self._state.items() if x.rpartition(".")[0] != actor}
            self._state[name] = "joining"
            self._holds.pop(name, None)

    def on_member(self, line: dict[str, Any]) -> None:
        name = line["name"]
        if name.startswith(GENERATOR):
            if line["why"] == "heard again":
                self._holds.pop(name, None)
            self._state[name] = line["state"]
            if "version" in line:
                self._holds[name] = line["version"]
                self._done.add(name)
                self._missed.pop(name, None)

    def on_begin(self, begin: m.PushBegin, now: float) -> None:
        self._close()
        self._push, self._begun_s = begin, now

    def on_push(self, line: dict[str, Any]) -> None:
        self._is_catch_up = line["catch_up"]

    def on_root_done(self, done: m.PushDone) -> None:
        """The root completed its part: from now on a miss is the member's own."""
        self._root_is_done |= self._push is not None and self._push.push == done.push

    def _close(self) -> None:
        """Count misses of the last push: a miss is the member's own if it was alone or the root completed its part."""
        if self._push is not None:
            is_own = self._root_is_done or len(self._push.members) == 1
            for name in set(self._push.members) - self._done:
                self._missed.setdefault(name, []).extend([self._begun_s] * is_own)
        self._push, self._root_is_done = None, False
        self._done.clear()

    # questions

    def on_publish(self, line: dict[str, Any]) -> str:
        """The broken rule, or "": a version is pushed first to all live generators that missed no push."""
        version, push = line["version"], self._push
        if push is not None and push.version == version and not self._is_catch_up:
            n_done = len(self._done.intersection(push.members))
            wrong = f"the journal counts {line['members']} members with version {version}, {n_done} completed its push"
            return "" if line["members"] == n_done else wrong
        self._close()  # perhaps a catch-up push of this version
        there = [name for name, state in self._state.items() if state in THERE and name not in self._missed]
        passed_over = [name for name in there if self._holds.get(name) != version]
        return f"version {version} is published and was never pushed to {passed_over}" if passed_over else ""

    def hopeless(self, patience: int, before_s: float) -> int:
        """Number of generators with `patience` own misses in a row, all of pushes that began before `before_s`."""
        self._close()
        return sum(len(missed) >= patience and max(missed) < before_s for missed in self._missed.values())


EXPECTED = (Refund.TOO_OLD, Refund.NO_SIGNAL, Refund.END_OF_DATA, Refund.END_OF_RUN)  # no failure
PATIENCE = 5  # own pushes in a row that a generator may miss
FOR_GOOD = "evicted for good"


class Excuses:
    """Valid reasons for a job to fail: prompts in a row without a value, generators that complete no push."""

    def __init__(self, scenario: Scenario, pushed: Pushed) -> None:
        self._scenario, self._pushed = scenario, pushed
        self._limit = max(3 * scenario.batch_size, 16)
        self.gone: set[str] = set()  # actors that are evicted for good
        self.begin_term()

    def begin_term(self) -> None:
        self._n_failed = 0

    def on_ready(self, line: dict[str, Any]) -> None:
        self._n_failed = 0

    def on_member(self, line: dict[str, Any]) -> None:
        if line["why"].startswith(FOR_GOOD):
            self.gone.add(line["name"].rpartition(".")[0])

    def on_refund(self, reason: str) -> None:
        self._n_failed += reason not in EXPECTED

    def explain(self, sentence: str) -> bool:
        """Whether the reason of a failed run is true. Faults end pushes only before the calm."""
        if "in a row ended without a reward" in sentence:
            return self._n_failed >= self._limit
        if "no generator of the job is left" in sentence:
            return len(self.gone) == self._scenario.n_generators - 1
        n_hopeless = self._pushed.hopeless(PATIENCE, self._scenario.calm_s)
        return "no generator completes a push" in sentence and n_hopeless >= self._scenario.n_generators
