"""Records of the witness: prompts, expected failures and pushes."""

from dataclasses import dataclass, field
from typing import Any

from areal_bus import messages as m
from areal_bus.messages import Refund, Role
from tools.staleness.simulator.scenario import Scenario
from tools.staleness.simulator.sources import Key, Learned


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
    """One admitted prompt, as the witness knows it."""

    born: int
    row: Key  # source, epoch, row
    attempt: int = 0
    state: str = "live"  # live, training, trained, refunded
    accepted: dict[int, int] = field(default_factory=dict)  # sample -> attempt whose verdict counted
    issue: int = 0  # times its row was issued before
    batch: int | None = None  # that it was taken in
    tokens: dict[int, int] = field(default_factory=dict)  # sample -> tokens of the verdict that counted
    failures: dict[tuple[int, int], str] = field(default_factory=dict)  # (sample, attempt) -> verdict, if no value
    failed: str = ""  # status of a verdict that counted, and after which only a refund can follow
    correct: dict[tuple[int, int], bool] = field(default_factory=dict)  # (sample, attempt) -> whether it is right
    rewards: dict[tuple[int, int], float] = field(default_factory=dict)  # (sample, attempt) -> reward, if it has one
    n_accounted: int = 0  # trained, masked or dropped
    n_leases: int = 0

    @property
    def is_flat(self) -> bool:
        """All its rewards are equal."""
        return len({self.rewards[key] for key in self.accepted.items() if key in self.rewards}) == 1

    @property
    def learned(self) -> Learned:
        """What a curriculum learns when the group leaves."""
        judged = [self.correct[key] for key in self.accepted.items() if key in self.correct]
        return self.row, sum(judged), len(judged)

    @property
    def n_received(self) -> int:
        return sum(self.tokens.values())


THERE = {"healthy", "stale"}
GENERATOR = f"{Role.GENERATOR}-"


class Pushed:
    """The generators by the journal: state, version held, and pushes missed."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget all members: the head has restarted."""
        self._state: dict[str, str] = {}  # generator -> its last state
        self._holds: dict[str, int] = {}
        self.begin_term(0)

    def begin_term(self, version: int) -> None:
        """No push is in flight, no push was missed, and held versions after `version` are void."""
        self._push: m.PushBegin | None = None  # the last one
        self._begun_s = 0.0  # when it began
        self._is_catch_up = False
        self._root_is_done = False
        self._done: set[str] = set()  # who completed it
        self._missed: dict[str, list[float]] = {}  # who -> when each push of its own began that it missed, in a row
        self._holds = {name: held for name, held in self._holds.items() if held <= version}

    # what happens

    def on_joined(self, line: dict[str, Any]) -> None:
        """Its earlier incarnation is gone."""
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
        """Its own part is whole: what a member missed from here on was that member's doing."""
        self._root_is_done |= self._push is not None and self._push.push == done.push

    def _close(self) -> None:
        """Of the last push, who missed it: its own miss where it was alone, or where the root completed its part."""
        if self._push is not None:
            is_own = self._root_is_done or len(self._push.members) == 1
            for name in set(self._push.members) - self._done:
                self._missed.setdefault(name, []).extend([self._begun_s] * is_own)
        self._push, self._root_is_done = None, False
        self._done.clear()

    # what is asked

    def on_publish(self, line: dict[str, Any]) -> str:
        """What is wrong with it: a version is pushed first to everybody there who has missed no push."""
        version, push = line["version"], self._push
        if push is not None and push.version == version and not self._is_catch_up:
            n_done = len(self._done.intersection(push.members))
            wrong = f"{line['members']} have version {version} they say, {n_done} completed its push"
            return "" if line["members"] == n_done else wrong
        self._close()  # a catch-up push, of this version perhaps
        there = [name for name, state in self._state.items() if state in THERE and name not in self._missed]
        passed_over = [name for name in there if self._holds.get(name) != version]
        return f"version {version} is published and was never pushed to {passed_over}" if passed_over else ""

    def hopeless(self, patience: int, before_s: float) -> int:
        """Generators that missed so many pushes of their own in a row, none of which began later than this."""
        self._close()
        return sum(len(missed) >= patience and max(missed) < before_s for missed in self._missed.values())


EXPECTED = (Refund.TOO_OLD, Refund.NO_SIGNAL, Refund.END_OF_DATA, Refund.END_OF_RUN)  # no failure
PATIENCE = 5  # pushes of its own in a row that a generator may miss


class Excuses:
    """Prompts in a row that ended without a value, generators that complete no push."""

    def __init__(self, scenario: Scenario, pushed: Pushed) -> None:
        self._scenario, self._pushed = scenario, pushed
        self._limit = max(3 * scenario.batch_size, 16)
        self.begin_term()

    def begin_term(self) -> None:
        self._n_failed = 0

    def on_ready(self, line: dict[str, Any]) -> None:
        self._n_failed = 0

    def on_refund(self, reason: str) -> None:
        self._n_failed += reason not in EXPECTED

    def explain(self, sentence: str) -> bool:
        """Whether what a run that ended in error says of itself is so; faults end pushes only before the calm."""
        if "in a row ended without a reward" in sentence:
            return self._n_failed >= self._limit
        n_hopeless = self._pushed.hopeless(PATIENCE, self._scenario.calm_s)
        return "no generator completes a push" in sentence and n_hopeless >= self._scenario.n_generators
