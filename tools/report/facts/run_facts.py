"""All that the report knows of one run: one merged pass over its journal, then the readers of `tools.breakdown`."""

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite
from types import ModuleType
from typing import Any

from tools import run
from tools.alarms.alarm_reader import AlarmReader
from tools.audit import run_settings
from tools.breakdown import waits
from tools.breakdown.flops import Utilisation, utilisation
from tools.breakdown.incarnations import Incarnation, LabelShare, Straggler, label_shares, read_all, stragglers
from tools.breakdown.steps import Step, read_steps
from tools.breakdown.waits import PushCost, Wait
from tools.follow import JournalFollower
from tools.report.facts import actor_time, ages, incidents, notable_samples, token_account
from tools.report.facts.actor_time import ActorTime
from tools.report.facts.ages import Ages
from tools.report.facts.curves import Curve
from tools.report.facts.incidents import Incidents
from tools.report.facts.notable_samples import NotableSamples, texts_of
from tools.report.facts.token_account import SampleFate, TokenAccount
from tools.run import Line, Run
from tools.run_status import HEAD_EVENTS, RunStatus
from tools.surviving_history import Key
from tools.trackers import series
from tools.trackers.series import Row, SeriesReader, Undone
from tools.why import WhyReport, report_of

EVENTS = frozenset((*series.EVENTS, *HEAD_EVENTS, *actor_time.EVENTS, *ages.EVENTS, *incidents.EVENTS,
                    *notable_samples.EVENTS, *token_account.EVENTS, "call", "profile"))  # fmt: skip
SERVER = "areal_serve.report"  # by name: tools do not depend on the server


@dataclass(slots=True)
class Breakdown:
    """What `tools.breakdown` computes."""

    actors: list[Incarnation]
    steps: list[Step]
    waits: list[Wait]
    pushes: PushCost
    shares: list[LabelShare]
    stragglers: list[Straggler]
    used: list[Utilisation]


@dataclass(slots=True)
class RunFacts:
    """One run, up to the last whole line of its journal. Broken lines are reported on standard error."""

    where: Run
    name: str  # on the page
    config: Line = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=dict)  # name of tools.trackers -> values by version
    time: ActorTime = field(default_factory=ActorTime)
    ages: Ages = field(default_factory=Ages)
    incidents: Incidents = field(default_factory=Incidents)
    notable: NotableSamples = field(default_factory=NotableSamples)
    samples: list[SampleFate] = field(default_factory=list)
    clients: Any = None  # of a server: `Clients` of its report
    texts: dict[Key, Line] = field(default_factory=dict)  # of the notable samples
    breakdown: Breakdown | None = None
    gap: str = ""  # why there is no breakdown
    alarms: AlarmReader | None = None  # None where only curves are read
    profiles: list[Line] = field(default_factory=list)  # `profile` lines
    first_wall: float = 0.0  # seconds since 1970, of the first and the last line
    last_wall: float = 0.0
    n_tokens: float = 0.0  # trained, in all updates, undone ones included
    status: WhyReport | None = None

    @property
    def wall_s(self) -> float:
        return self.last_wall - self.first_wall

    @property
    def n_versions(self) -> int:
        """The newest version. A single process without a head has curves only."""
        curve = self.curve("rollout/reward")
        return max(self.status.version or 0 if self.status else 0, curve.versions[-1] if len(curve) else 0)

    def curve(self, name: str) -> Curve:
        """A curve; an empty one if the run has no such series."""
        return self.curves.get(name) or Curve()

    def setting(self, key: str) -> object:
        """The value of a dotted key; None without a config."""
        found: object = self.config
        for part in key.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return found


def read_facts(where: Run, name: str = "", now: float | None = None) -> RunFacts:
    """Read a run. Raises ConfigError when its journal has another schema."""
    check_schemas(where)
    facts = RunFacts(where, name or where.name, where.config())
    if where.journals("front"):
        facts.clients = of_server().Clients()
    _read_journal(facts, time.time() if now is None else now)
    facts.breakdown, facts.gap = read_breakdown(where)
    notable = [*facts.notable.slowest(), *facts.notable.better(), *facts.notable.worse()]
    facts.texts = texts_of(where, {one.key for one in notable})
    return facts


def of_server() -> ModuleType:
    """The server's part of the report."""
    return importlib.import_module(SERVER)


def read_curves(where: Run, name: str) -> RunFacts:
    """Read the curves of a run and nothing else. Raises ConfigError when its journal has another schema."""
    check_schemas(where)
    facts, reader = RunFacts(where, name, where.config()), SeriesReader()
    for line in JournalFollower(where, series.EVENTS).read():
        for item in reader.take(line):
            _add_item(facts, item)
    return facts


def check_schemas(where: Run) -> None:
    """Raises ConfigError when a journal file begins with another schema."""
    for path in where.journals():
        run.check_schema(next(run.lines(path), {}), path)


def _read_journal(facts: RunFacts, now: float) -> None:
    status = RunStatus(facts.where)
    alarms = facts.alarms = AlarmReader(facts.where)
    starts = [{"actor": start.get("actor", {})} for start in (facts.config, *facts.where.earlier_configs())]
    setup = run_settings.read(starts[0], starts[1:])
    account, reader = TokenAccount(setup), SeriesReader(setup)
    takers = _takers(facts, status, account)
    takers.setdefault("spans", []).append(alarms.count)
    wall = 0.0
    for line in JournalFollower(facts.where, EVENTS).read():
        wall = float(line["wall"])
        facts.first_wall = facts.first_wall or wall
        for item in reader.take(line):
            _add_item(facts, item)
            alarms.take(item)
        for take in takers.get(line["event"], ()):
            take(line)
    facts.last_wall = wall
    facts.time.finish(wall)
    facts.notable.end_group()
    facts.samples = account.samples()
    facts.status = report_of(status, now)


def _takers(facts: RunFacts, status: RunStatus, account: TokenAccount) -> dict[str, list[Callable[[Line], None]]]:
    """Event -> who takes its lines."""
    found: dict[str, list[Callable[[Line], None]]] = {}
    modules = (actor_time, facts.time), (ages, facts.ages), (incidents, facts.incidents)
    taken = [(module.EVENTS, part.take) for module, part in (*modules, (notable_samples, facts.notable))]
    taken += [(HEAD_EVENTS, status.take), (token_account.EVENTS, account.take), (("profile",), facts.profiles.append)]
    taken += [(("call",), facts.clients.take)] if facts.clients is not None else []
    for events, take in taken:
        for event in events:
            found.setdefault(event, []).append(take)
    return found


def _add_item(facts: RunFacts, item: Row | Undone) -> None:
    if isinstance(item, Row):
        _add_row(facts, item)
        return
    for curve in facts.curves.values():
        curve.cut(item.version)


def _add_row(facts: RunFacts, row: Row) -> None:
    for name, value in row.values.items():
        if not name.startswith("time/"):  # facts.time has them by actor
            facts.curves.setdefault(name, Curve()).add(row.step, value)
    trained = row.values.get("train/n_tokens_trained", 0.0)
    facts.n_tokens += trained if isfinite(trained) else 0.0


def read_breakdown(where: Run) -> tuple[Breakdown | None, str]:
    """The breakdown, or None with the reason: a journal of an older version may lack fields."""
    try:
        found, taken = read_all(where), read_steps(where)
        made = Breakdown(
            found,
            taken,
            waits.waits(found, taken),
            waits.push_cost(where, found, taken),
            label_shares(found),
            stragglers(found),
            utilisation(where, found, taken, peak=None),
        )
    except KeyError as error:
        return None, f"the breakdown needs the field {error} in every line of its events, and this journal lacks it"
    except (TypeError, ValueError) as error:
        return None, f"the breakdown cannot read a line of this journal: {error}"
    return made, ""
