"""Checks evaluations against the verdicts and the completions of their answers (I3, I5, I6, I10)."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from areal_bus.core import evaluation as metrics
from tools.audit.journal_reader import JournalFile, Line
from tools.audit.replay.actor_logs import Evidence
from tools.audit.replay.clock import Clock
from tools.audit.run_settings import RunSettings
from tools.surviving_history import span_pairs


@dataclass(slots=True)
class Evaluated:
    """Verdicts of one evaluation."""

    n: int = 0
    rewards: list[float] = field(default_factory=list)
    judged: list[bool] = field(default_factory=list)
    n_by_uid: Counter[int] = field(default_factory=Counter)
    rows: dict[int, list[bool]] = field(default_factory=dict)  # judged answers by uid
    versions: list[int] = field(default_factory=list)  # oldest and newest of each answer
    n_by_version: Counter[int] = field(default_factory=Counter)  # tokens, where the completions are known
    n_tokens: int = 0
    named: dict[str, list[float]] = field(default_factory=dict)  # values of rewards reported by name


class Evaluations:
    """Checks `scored` and `evaluation` lines of the head. A new term restarts an open evaluation."""

    def __init__(self, setup: RunSettings, file: JournalFile, clock: Clock, evidence: Evidence) -> None:
        self.setup, self.file, self.clock, self.evidence = setup, file, clock, evidence
        self.n = 0
        self._open: dict[str, Evaluated] = {}

    def go_back(self) -> None:
        self._open.clear()

    def score(self, line: Line) -> None:
        known = self._open.setdefault(line["evaluation"], Evaluated())
        known.n += 1
        known.n_by_uid[line["uid"]] += 1
        known.versions += [x for x in (line["min_version"], line["max_version"]) if x is not None]
        known.n_tokens += line["n_tokens"]
        made = self.evidence.answers.get((line["evaluation"], line["uid"], line["sample"], line["attempt"]))
        for version, n in span_pairs(made.versions) if made is not None else ():
            known.n_by_version[version] += n
        if line["status"] == "value":
            for name in named_rewards(line):
                known.named.setdefault(name, []).append(line[name])
            known.rewards.append(line["reward"])
            if line["correct"] is not None:
                known.judged.append(line["correct"])
                known.rows.setdefault(line["uid"], []).append(line["correct"])

    def close(self, line: Line) -> None:
        """A timeout or an error is counted, never a 0."""
        known = self._open.pop(line["name"], Evaluated())
        self.n += 1
        told = (line["n"], line["reward"], line["accuracy"])
        mine = (known.n, _mean(known.rewards), _mean(known.judged))
        n_without = known.n - len(known.rewards)
        if line["n_failed"] < n_without or not all(map(_same, told, mine)):
            rule = f"an evaluation's n, reward and accuracy are of its values alone ({n_without} have none)"
            self.file.add("I10", f"{rule}: {mine}, not {told}", version=line["version"])
        n_missing = line.get("n_asked", 0) - len(known.rewards)
        if "n_asked" in line and line["n_missing"] != n_missing:
            text = f"an evaluation names the answers that it lacks: {n_missing}, not {line['n_missing']}"
            self.file.add("I10", text, version=line["version"])
        named = {name: _mean(values) for name, values in known.named.items()}
        shown = {name: line[name] for name in named_rewards(line)}
        if shown.keys() != named.keys() or not all(_same(shown[name], named[name]) for name in shown):
            text = f"rewards by name are means over the values of the evaluation: {named}, not {shown}"
            self.file.add("I10", text, version=line["version"])
        if "k" in line:  # journals of older runs have no metrics
            self._check_metrics(line, known)

    def check_moment(self, line: Line) -> None:
        """`before` is of version 0, `after` of the last one, `step-N` of N or a later one before the next moment."""
        moment, version, every = line["name"].partition(":")[0], line["version"], self.setup.evaluates_every
        first, last = {"before": (0, 0), "after": (self.clock.v, self.clock.v)}.get(moment, (0, self.clock.v))
        if moment.startswith("step-"):
            first = int(moment.removeprefix("step-"))
            last = min(last, first + every - 1) if every else last
        if not first <= version <= last:
            text = f"evaluation {line['name']} is of a version from {first} to {last}: {version}"
            self.file.add("I6", text, version=version)
        if line.get("set", "") != line["name"].partition(":")[2]:
            self.file.add("I6", f"evaluation {line['name']} is of the set in its name: {line['set']}", version=version)

    def _check_metrics(self, line: Line, known: Evaluated) -> None:
        """Each problem has all its samples or counts as failed. Metrics and versions match the answers."""
        k, rows, version = line["k"], list(known.rows.values()), line["version"]
        short = [uid for uid, n in known.n_by_uid.items() if n != k]
        if len(short) > line["n_failed"]:
            rule = f"an evaluation ends when each problem has its {k} samples or has failed"
            self.file.add("I3", f"{rule}: {len(short)} have another number, {line['n_failed']} failed", version=version)
        told = (line["avg_at_k"], line["avg_at_k_se"], line["pass_at_k"])
        mine = (metrics.average(rows), metrics.standard_error(rows), metrics.pass_at(k, rows))
        if not all(map(_same, told, mine)):
            self.file.add("I10", f"avg@k, its error and pass@k are of the answers: {mine}, not {told}", version=version)
        if n_asked := line.get("n_asked", 0):
            n_failed = known.n - len(known.rewards) + n_asked // k - (len(known.n_by_uid) - len(short))
            if line["n_failed"] != n_failed or n_asked % k:
                text = f"an evaluation counts samples without a value and problems without all samples: {n_failed}"
                self.file.add("I10", f"{text}, not {line['n_failed']} of {n_asked} asked", version=version)
        n = known.n_by_version.total()
        mean = sum(v * tokens for v, tokens in known.n_by_version.items()) / n if n else None
        if n == known.n_tokens and not _same(line.get("version_mean", mean), mean):
            text = f"version_mean of an evaluation is over its tokens: {mean}, not {line['version_mean']}"
            self.file.add("I5", text, version=version)
        span = (min(known.versions, default=None), max(known.versions, default=None))
        if (line["version_first"], line["version_last"]) != span or (span[0] is not None and span[0] < version):
            named = (line["version_first"], line["version_last"])
            rule = f"the answers of an evaluation begun at version {version} have the versions that it names"
            self.file.add("I5", f"{rule}: {span}, not {named}", version=version)


def named_rewards(line: Mapping[str, object]) -> list[str]:
    """Fields with a reward that is reported by name."""
    return [name for name in line if name.startswith("reward:")]


def _mean(values: list[float] | list[bool]) -> float | None:
    return sum(values) / len(values) if values else None


def _same(one: float | None, other: float | None) -> bool:
    return one == other or (one is not None and other is not None and math.isclose(one, other))
