"""Measures speeds and lengths in the journal of a run, as input of a schedule, and the throughput of the run.

A generator's speed is fitted to its samples: the time of each by the number of live samples. So the speed includes
prefills, and predictions for a very different split or number of slots are extrapolations.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from areal_bus.config.capacity import slots
from areal_bus.config.sections import Config
from areal_bus.core.workload import SpeedLaw
from areal_bus.errors import ConfigError
from tools import run
from tools.run import Line, Run
from tools.simulate.schedule import ObservedLengths

WARM_UP_UPDATES = 3  # not measured, and eta more
MIN_UPDATES = 5  # measured


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of one run."""

    lengths: ObservedLengths
    speeds: SpeedLaw  # of a generator
    train_tokens_per_s: float  # of all learner ranks together
    step_s: float
    push_s: float
    reward_s: float
    n_generators: int
    n_learners: int
    n_updates: int  # measured
    tokens_per_s: float  # consumed by the measured updates


def measure(where: Run, config: Config) -> Measured:
    """Raises ConfigError for a run that is too short, or in which the head or a learner was restarted."""
    generators, learners = where.journals("generator"), where.journals("learner")
    heads = where.journals("head")
    if len(heads) != 1 or len({path.stem.partition(".")[0] for path in learners}) != len(learners):
        raise ConfigError(
            f"head and learners must have one incarnation each: {where.folder} has {len(heads)} of the head and "
            f"{len(learners)} of learners"
        )
    head = list(run.lines(heads[0], "batch", "update", "push", "publish", "trajectory", "scored"))
    settle = WARM_UP_UPDATES + config.rollout.max_head_offpolicyness
    updates = [line for line in head if line["event"] == "update"][settle:]
    if len(updates) <= MIN_UPDATES:
        raise ConfigError(
            f"a measurement needs more than {MIN_UPDATES} updates after a warm-up of {settle}: {where.folder} has "
            f"{len(updates)}"
        )
    each = [list(run.lines(path, "request", "completion", "pushed")) for path in generators]
    steps = batch_times(head)
    check_parts(where, learners, steps, head, each)
    stall_s = fmean(line["stall_s"] for lines in each for line in lines if line["event"] == "pushed")
    step_s, token_s = fit_line([(n, s, 1.0) for n, s in steps])
    n_tokens = {line["version"]: line["n_tokens"] for line in updates}
    return Measured(
        lengths=ObservedLengths(sorted(x["n_tokens"] for lines in each for x in lines if is_finished(x))),
        speeds=fit_speeds(each, slots(config), stall_s),
        train_tokens_per_s=1 / max(token_s, 1e-12),
        step_s=step_s,
        push_s=max(0.0, mean_push_s(head) - stall_s),
        reward_s=median_scoring_s(head, each),
        n_generators=len({path.stem.partition(".")[0] for path in generators}),
        n_learners=len(learners),
        n_updates=len(updates) - 1,
        tokens_per_s=sum(n_tokens[line["version"]] for line in updates[1:]) / (updates[-1]["t"] - updates[0]["t"]),
    )


def check_parts(
    where: Run,
    learners: Sequence[Path],
    steps: Sequence[tuple[int, float]],
    head: Sequence[Line],
    each: Sequence[Sequence[Line]],
) -> None:
    """Raises ConfigError when a journal is missing, for example that of a host with a local journal.dir."""
    whole = {sample_key(line) for lines in each for line in lines if is_finished(line)}
    parts = [
        ("journal of a learner", bool(learners)),
        ("batch with its update", bool(steps)),
        ("push that was published", {"push", "publish"} <= {line["event"] for line in head}),
        ("push that a generator received", any(line["event"] == "pushed" for lines in each for line in lines)),
        ("sample with its verdict", any(line["event"] == "scored" and sample_key(line) in whole for line in head)),
    ]
    for part, is_there in parts:
        if not is_there:
            raise ConfigError(
                f"a measurement needs the journals of all actors in one folder: {where.folder} has no {part}"
            )


def is_finished(line: Line) -> bool:
    """Whether it is a training sample that ended with an end token or at its length limit."""
    return line["event"] == "completion" and not line.get("evaluation") and line["finish"] != "abort"


def batch_times(head: Iterable[Line]) -> list[tuple[int, float]]:
    """(tokens, seconds from the batch to its update) of each batch."""
    taken: dict[int, float] = {}
    found = []
    for line in head:
        if line["event"] == "batch":
            taken[line["step"] + 1] = line["t"]
        elif line["event"] == "update" and line["version"] in taken:
            found.append((line["n_tokens"], line["t"] - taken[line["version"]]))
    return found


def mean_push_s(head: Iterable[Line]) -> float:
    """Mean time from an update to the publication of its version, over versions with a push of their own."""
    at: dict[tuple[str, int], float] = {}
    for line in head:
        if line["event"] in ("update", "push", "publish"):
            at.setdefault((line["event"], line["version"]), line["t"])
    pushed = [version for event, version in at if event == "push" and ("update", version) in at]
    pushed = [version for version in pushed if ("publish", version) in at]
    begins_s: float = median(at["push", version] - at["update", version] for version in pushed)
    return begins_s + fmean(at["publish", version] - at["push", version] for version in pushed)


def median_scoring_s(head: Iterable[Line], each: Sequence[Sequence[Line]]) -> float:
    """Median time from a sample's end to its verdict in the head."""
    ended = {sample_key(line): line["wall"] for lines in each for line in lines if is_finished(line)}
    scored = [(line["wall"], sample_key(line)) for line in head if line["event"] == "scored"]
    took_s: list[float] = [wall - ended[key] for wall, key in scored if key in ended]
    return max(0.0, median(took_s))


def sample_key(line: Line) -> tuple[str, int, int, int]:
    return line.get("evaluation") or "", line["uid"], line["sample"], line["attempt"]


def fit_speeds(each: Sequence[Sequence[Line]], n_slots: int, stall_s: float) -> SpeedLaw:
    """Fit seconds a token as a linear function of the number of live samples."""
    fixed_s, live_s = fit_line([point for lines in each for point in sample_paces(lines, n_slots)])
    return SpeedLaw(
        decode_tokens_per_s=1 / max(live_s, 1e-12),
        half_slots=fixed_s / max(live_s, 1e-12),
        prefill_tokens_per_s=math.inf,  # the seconds a token include it
        update_s=stall_s,
    )


def sample_paces(lines: Sequence[Line], n_slots: int) -> list[tuple[float, float, float]]:
    """(mean number of live samples, seconds a token, tokens) of each sample of one generator."""
    begun: dict[tuple[str, int, int, int], tuple[float, float, float]] = {}  # time, live seconds, stalls by then
    waiting: deque[tuple[str, int, int, int]] = deque()
    now, live_s, stalled_s = lines[0]["t"] if lines else 0.0, 0.0, 0.0
    found = []
    for line in lines:
        live_s += (line["t"] - now) * len(begun)
        now = line["t"]
        if line["event"] == "pushed":
            stalled_s += line["stall_s"]
        elif line["event"] == "request":
            waiting.append(sample_key(line))
        elif sample_key(line) in begun:
            began, live_before, stalled_before = begun.pop(sample_key(line))
            seconds = now - began - (stalled_s - stalled_before)
            if line["n_tokens"] > 0 and now > began and seconds > 0:
                found.append(((live_s - live_before) / (now - began), seconds / line["n_tokens"], line["n_tokens"]))
        elif sample_key(line) in waiting:
            waiting.remove(sample_key(line))
        while waiting and len(begun) < n_slots:
            begun[waiting.popleft()] = now, live_s, stalled_s
    return found


def fit_line(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """(intercept, slope) of the weighted least-squares line through (x, y, weight), neither below 0.

    Through the origin when the slope is below twice its standard error.
    """
    total = sum(w for _, _, w in points)
    x, y = sum(a * w for a, _, w in points) / total, sum(b * w for _, b, w in points) / total
    xx = sum((a - x) ** 2 * w for a, _, w in points)
    xy = sum((a - x) * (b - y) * w for a, b, w in points)
    off = sum((b - y) ** 2 * w for _, b, w in points) - (xy * xy / xx if xx else 0.0)
    shows = xy > 0 and xy * xy * (len(points) - 2) > 4 * xx * max(0.0, off)
    slope = min(xy / xx, y / x) if shows else y / x
    return y - slope * x, slope


def config_of(where: Run) -> Config:
    """The resolved settings of a run."""
    path = Path(where.folder) / "config.json"
    try:
        return Config.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"config.json of a run must hold its settings: {path}: {error}") from None
