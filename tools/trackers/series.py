"""Scalar series of a run by version, under the field's names (docs/trackers.md). Pure: lines in, rows out."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import fmean, pstdev

from tools.audit import run_settings
from tools.audit.run_settings import RunSettings
from tools.run import Line, is_number
from tools.trackers.length_bias import LengthBiasReader

UPDATE = "update"  # key of the rows of training steps
EVENTS = ("admit", "batch", "evaluation", "member", "publish", "push", "pushed", "refund", "scored", "spans", "start",
          "step", "term", "trajectory", "update")  # fmt: skip

FIGURES: Mapping[str, tuple[str, str]] = {  # figure of a `step` or `update` line -> series, meaning
    "reward": ("rollout/reward", "mean reward of the batch"),
    "correct": ("rollout/accuracy", "share of correct answers among the judged ones"),
    "completed_accuracy": (
        "rollout/completed_accuracy",
        "share of judged answers that are correct and ended by an accepted stop",
    ),
    "n_tokens": ("rollout/n_tokens", "sampled tokens of the batch"),
    "truncated_share": ("rollout/truncated_share", "share of answers cut at the limit"),
    "zero_advantage_share": ("rollout/zero_advantage_share", "share of groups without a signal"),
    "lag_mean": ("staleness/lag", "mean lag of the trained tokens, in versions"),
    "lag_max": ("staleness/lag_max", "largest lag of a trained token"),
    "masked_share": ("staleness/masked_share", "share of tokens too old to train"),
    "loss": ("train/loss", "loss of the update"),
    "mismatch_kl": ("train/kl", "KL between sampler and learner"),
    "mismatch_max": ("train/kl_max", "largest difference of their log-probs"),
    "kl_ref": ("train/kl_ref", "KL from the reference model"),
    "kl_teacher": ("train/kl_teacher", "KL from the teacher"),
    "entropy": ("train/entropy", "mean entropy"),
    "clip_share": ("train/clip_share", "share of clipped tokens"),
    "ess": ("train/ess", "effective sample size (share)"),
    "grad_norm": ("train/grad_norm", "gradient norm before clipping"),
    "lr": ("train/lr", "learning rate"),
    "value_loss": ("train/value_loss", "value loss"),
    "critic_grad_norm": ("train/critic_grad_norm", "gradient norm of the critic"),
    "explained_variance": ("train/explained_variance", "explained variance of returns"),
    "returns_mean": ("train/returns_mean", "mean return"),
    "update_s": ("perf/update_s", "seconds of the learner's update"),
}
OTHERS: Mapping[str, str] = {  # series from other lines
    "rollout/reward_std": "standard deviation of the trajectories' rewards",
    "rollout/reward_min": "least of these",
    "rollout/reward_max": "largest of these rewards",
    "rollout/length": "mean sampled tokens of a trajectory",
    "rollout/length_max": "largest of these",
    "rollout/length_bias": "of the run so far: mean trained tokens of a trained sample / mean tokens of a sampled one",
    "staleness/trajectory_lag": "mean lag of the oldest token of a trajectory, masked ones too",
    "staleness/trajectory_lag_max": "largest of these",
    "perf/step_s": "seconds since the update before",
    "perf/tokens_per_s": "sampled tokens over perf/step_s",
    "perf/push_s": "seconds of the last complete push until it was published",
    "perf/push_stall_s": "longest decoding pause in it",
    "ring/live_prompts": "live prompts at the last admission",
    "ring/in_training": "prompts in training then",
    "ring/generators": "healthy generators",
    "ring/restarts": "restarts of actors in the run",
    "ring/refunds": "prompts refunded since the update before",
    "ring/dropped_tokens": "tokens that these refunds dropped",
}
PATTERNS: Mapping[str, str] = {  # series whose names depend on the run
    "rollout/reward/NAME": "mean of one of several rewards (docs/rewards.md)",
    "rollout/length_bias/SOURCE": "of each [[data.source]]",
    "train/FIGURE": "any other figure of the step",
    "ring/refunds/REASON": "ring/refunds for one reason",
    "time/ROLE/LABEL": "share of the time of a role's actors since the update before",
    "eval/FIELD": "evaluation: accuracy, completed_accuracy, reward, avg_at_k, avg_at_k_se, maj_at_k, pass_at_k, n, "
    "n_failed, n_missing",
    "eval/reward/NAME": "mean of one of several rewards; of a further set: eval/SET/reward/NAME",
    "eval/SET/FIELD": "of a further set of problems",
}
PART = "reward:"  # prefix of the fields of rewards by name
OF_ANOTHER_SCHEMA = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)
ENVELOPE = frozenset({"t", "wall", "term", "role", "rank", "inc", "seq", "event", "chain", "version", "u", "digest"})
EVALUATION_FIELDS = (
    "accuracy",
    "completed_accuracy",
    "reward",
    "avg_at_k",
    "avg_at_k_se",
    "maj_at_k",
    "pass_at_k",
    "n",
    "n_failed",
    "n_missing",
)


@dataclass(frozen=True, slots=True)
class Row:
    """Values of one version. A (key, step) occurs once in a history of the run."""

    key: str  # UPDATE, or evaluation/NAME
    step: int  # version
    wall: float  # seconds since 1970
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class Undone:
    """A term began at `version`: all rows of later versions are undone."""

    version: int


@dataclass(slots=True)
class _Trajectories:
    """The trajectories of one batch."""

    parts: dict[str, float] = field(default_factory=dict)  # mean of each reward that the scores report by name
    rewards: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)

    def add(self, line: Line) -> None:
        if is_number(line.get("reward")):
            self.rewards.append(float(line["reward"]))
        self.lengths.append(int(line["n_tokens"]))
        if line["versions"]:
            self.lags.append(int(line["clock"]) - int(line["versions"][0]))  # versions never decrease (I5)

    def values(self) -> Iterator[tuple[str, float]]:
        if self.rewards:
            yield "rollout/reward_std", pstdev(self.rewards)
            yield "rollout/reward_min", min(self.rewards)
            yield "rollout/reward_max", max(self.rewards)
        if self.lengths:
            yield "rollout/length", fmean(self.lengths)
            yield "rollout/length_max", float(max(self.lengths))
        if self.lags:
            yield "staleness/trajectory_lag", fmean(self.lags)
            yield "staleness/trajectory_lag_max", float(max(self.lags))
        for name, mean in self.parts.items():
            yield f"rollout/reward/{name}", mean


@dataclass(slots=True)
class SeriesReader:
    """Turns the lines of EVENTS, merged by wall time, into rows."""

    setup: RunSettings = field(default_factory=lambda: run_settings.read({}))
    version: int = 0
    _lengths: LengthBiasReader = field(init=False)
    _term: int = 0
    _last_wall: float | None = None  # of the update before, in the same term
    _batches: dict[int, _Trajectories] = field(default_factory=dict)  # by step
    _pushes: dict[int, float] = field(default_factory=dict)  # version -> wall of its regular push
    _stalls: dict[int, float] = field(default_factory=dict)  # version -> longest pause of a generator
    _push: dict[str, float] = field(default_factory=dict)  # of the last complete push
    _ring: dict[str, float] = field(default_factory=dict)  # newest values
    _refunds: dict[str, float] = field(default_factory=dict)  # since the update before
    _spans: dict[str, dict[str, float]] = field(default_factory=dict)  # role -> label -> seconds, likewise
    _healthy: set[str] = field(default_factory=set)
    _started: set[str] = field(default_factory=set)  # actors, without incarnation
    _n_restarts: int = 0

    def __post_init__(self) -> None:
        self._lengths = LengthBiasReader(self.setup)

    def take(self, line: Line) -> list[Row | Undone]:
        """Rows that this line completes. A line without the fields of its event is ignored."""
        with suppress(*OF_ANOTHER_SCHEMA):
            self._lengths.take(line)
        with suppress(*OF_ANOTHER_SCHEMA):
            return self._dispatch(line)
        return []

    def _dispatch(self, line: Line) -> list[Row | Undone]:
        match line["event"]:
            case "step" | "update":
                return self._update(line)
            case "term":
                return self._begin_term(line)
            case "evaluation":
                return self._evaluation(line)
            case "trajectory":
                self._batches.setdefault(int(line["step"]), _Trajectories()).add(line)
            case "batch":
                self._batches[int(line["step"])] = _Trajectories(dict(_parts(line)))
            case "spans":
                self._add_spans(line)
            case "push" | "pushed" | "publish":
                self._on_push(line)
            case _:
                self._on_ring(line)
        return []

    def _update(self, line: Line) -> list[Row | Undone]:
        """The row of a version, from the first of its two lines: the learner's `step` and the head's `update`."""
        version = int(line["version"])
        if version <= self.version or int(line["term"]) < self._term:
            return []
        values = dict(_figures(line))
        if version - 1 in self._batches:
            values |= dict(self._batches[version - 1].values())
        if self._last_wall is not None and line["wall"] > self._last_wall:
            values["perf/step_s"] = line["wall"] - self._last_wall
            if "rollout/n_tokens" in values:
                values["perf/tokens_per_s"] = values["rollout/n_tokens"] / values["perf/step_s"]
        with suppress(*OF_ANOTHER_SCHEMA):
            values |= dict(self._lengths.values(version, line))
        values |= self._push | self._ring | {"ring/refunds": 0.0, "ring/dropped_tokens": 0.0} | self._refunds
        values |= dict(self._time_shares())
        self.version, self._last_wall = version, float(line["wall"])
        self._batches = {step: batch for step, batch in self._batches.items() if step >= version}
        self._refunds, self._spans = {}, {}
        return [Row(UPDATE, version, float(line["wall"]), values)]

    def _begin_term(self, line: Line) -> list[Row | Undone]:
        version = int(line["version"])
        was_later = version < self.version
        self.version, self._term, self._last_wall = version, int(line["term"]), None
        self._batches, self._pushes, self._stalls, self._push = {}, {}, {}, {}
        return [Undone(version)] if was_later else []

    def _evaluation(self, line: Line) -> list[Row | Undone]:
        name = str(line["name"])
        problems = name.partition(":")[2]  # step-8:SET
        prefix = f"eval/{problems}/" if problems else "eval/"
        values = {prefix + key: float(line[key]) for key in EVALUATION_FIELDS if is_number(line.get(key))}
        values |= {f"{prefix}reward/{name}": mean for name, mean in _parts(line)}
        return [Row(f"evaluation/{name}", int(line["version"]), float(line["wall"]), values)]

    def _on_push(self, line: Line) -> None:
        version = int(line["version"])
        if line["event"] == "push" and not line.get("catch_up"):
            self._pushes[version] = float(line["wall"])
        elif line["event"] == "pushed" and line["role"] == "generator":
            self._stalls[version] = max(self._stalls.get(version, 0.0), float(line["stall_s"]))
        elif line["event"] == "publish" and version in self._pushes:
            self._push = {"perf/push_s": line["wall"] - self._pushes[version]}
            if version in self._stalls:
                self._push["perf/push_stall_s"] = self._stalls[version]
            self._pushes = {v: wall for v, wall in self._pushes.items() if v > version}
            self._stalls = {v: stall for v, stall in self._stalls.items() if v > version}

    def _on_ring(self, line: Line) -> None:
        event = line["event"]
        if event == "admit":
            self._ring |= {
                "ring/live_prompts": float(line["live"]),
                "ring/in_training": float(line["in_training"]),
            }
        elif event == "refund":
            counts = {"refunds": 1, f"refunds/{line['reason']}": 1, "dropped_tokens": line["n_tokens_dropped"]}
            for name, n in counts.items():
                self._refunds[f"ring/{name}"] = self._refunds.get(f"ring/{name}", 0.0) + n
        elif event == "member" and str(line["name"]).startswith("generator-"):
            (self._healthy.add if line["state"] == "healthy" else self._healthy.discard)(line["name"])
            self._ring["ring/generators"] = float(len(self._healthy))
        elif event == "start":
            place = f"{line['role']}-{line['rank']}"
            self._n_restarts += place in self._started
            self._started.add(place)
            self._ring["ring/restarts"] = float(self._n_restarts)
            if line["role"] == "head":
                self._healthy.clear()  # a new head has no members

    def _add_spans(self, line: Line) -> None:
        labels = self._spans.setdefault(str(line["role"]), {})
        for key, seconds in line.items():
            if key.startswith("s_") and is_number(seconds):
                labels[key[2:]] = labels.get(key[2:], 0.0) + seconds

    def _time_shares(self) -> Iterator[tuple[str, float]]:
        for role, labels in self._spans.items():
            total = sum(labels.values())
            for label, seconds in labels.items() if total > 0 else ():
                yield f"time/{role}/{label}", seconds / total


def _parts(line: Line) -> Iterator[tuple[str, float]]:
    """(name, mean) of the rewards that a `batch` or `evaluation` line reports by name."""
    for key, value in line.items():
        if key.startswith(PART) and is_number(value):
            yield key.removeprefix(PART), float(value)


def _figures(line: Line) -> Iterator[tuple[str, float]]:
    """The figures of a step under their series' names. NaN and infinity are kept: they are a finding."""
    for key, value in line.items():
        if key not in ENVELOPE and isinstance(value, int | float) and not isinstance(value, bool):
            yield FIGURES.get(key, (f"train/{key}", ""))[0], float(value)


def catalogue() -> list[tuple[str, str]]:
    """All series with their meaning, as docs/trackers.md lists them."""
    return [*FIGURES.values(), *OTHERS.items(), *PATTERNS.items()]
