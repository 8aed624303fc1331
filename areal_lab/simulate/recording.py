"""Reads the observations of a run that a calibration fits: samples, steps, pushes, scores and CPU time.

Times of work are those with a core (`work_time.py`), so they do not depend on what else ran on the host.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from areal_bus.config.capacity import slots
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError
from areal_lab.simulate.generator_history import (
    Exposure,
    GeneratorHistory,
    Prefill,
    is_finished,
    prefill_token_s,
    sample_key,
)
from areal_lab.simulate.period import Period, longest_period, wrote_between
from areal_lab.simulate.work_time import Crowd, Window, WorkClock, clock_of, windows, within
from tools import run
from tools.run import Line, Run

WARM_UP_UPDATES = 3  # not measured, and eta more
MIN_UPDATES = 5  # measured
BY_TOKENS = ("s_prox", "s_backward", "s_critic")  # labels of a learner whose time grows with the tokens


@dataclass(frozen=True, slots=True)
class Step:
    """One training step."""

    n_tokens: int  # sampled
    n_groups: int
    seconds: float  # of work
    crowded: float = 0.0  # share of the other cores that was busy


@dataclass(frozen=True, slots=True)
class CpuUse:
    """Cores that actors use while they work, where the journal has CPU times."""

    n_cores: int
    generator: float
    learner: float
    sample_s: float  # of head and rewards, CPU seconds


@dataclass(frozen=True, slots=True)
class Recording:
    """The observations of one run after its warm-up."""

    lengths: Sequence[int]
    exposures: Sequence[Exposure]
    prefills: Sequence[Prefill]
    stalls_s: Sequence[float]
    steps: Sequence[Step]
    by_tokens: float | None  # share of a step that grows with its tokens, where the journal shows it
    pushes_s: Sequence[tuple[float, float]]  # (update to push, push to publication)
    scoring_s: Sequence[float]
    prompt_tokens: float  # mean; 0: not known
    cpu: CpuUse | None
    n_generators: int
    n_slots: int  # of a generator
    n_learners: int
    n_updates: int
    tokens_per_s: float  # consumed by the measured updates
    lag_mean: float  # of their trained tokens


def record(where: Run, config: Config) -> Recording:
    """Of a run whose split changed, the split with most updates is observed.

    Raises ConfigError for a run that is too short, or in which the head or a learner was restarted meanwhile.
    """
    head = head_lines(where)
    period = longest_period(head)
    head = period.of(head)
    updates = measured_updates(where, head, config)
    began, ended = updates[0]["t"], updates[-1]["t"]
    learners = learner_lines(where, period, began, ended)
    by_name = actor_lines(where, "generator", ("request", "completion", "pushed", "spans"), period, began, ended)
    each = [period.of_generator(lines) for _, lines in by_name]
    check_parts(where, learners, head, each)
    of_learner = [window for lines in learners for window in within(windows(lines, "learner"), began, ended)]
    clock = clock_of(windows(learners[0], "learner"))
    histories = [GeneratorHistory(lines, config) for lines in each]
    cpu = cpu_use(where, of_learner, histories, head, began, ended)
    trains = [(t, change * len(learners)) for a, b in batch_times(head) for t, change in ((a["t"], 1), (b["t"], -1))]
    crowd = Crowd([*trains, *(one for history in histories for one in history.busy)], cpu.n_cores if cpu else 0)
    steps = training_steps(head, clock, crowd, began, computes=min(1.0, cpu.learner) if cpu is not None else 0.0)
    computes = min(1.0, cpu.generator) if cpu is not None else 0.0
    n_prompt = prompt_tokens(learners[0], head)
    prefills = [one for history in histories for one in history.prefills(began, ended)]
    token_s = prefill_token_s(prefills, n_prompt)
    return Recording(
        lengths=sorted(x["n_tokens"] for lines in each for x in lines if is_finished(x)),
        exposures=[one for history in histories for one in history.exposures(token_s, n_prompt, crowd, computes)],
        prefills=prefills,
        stalls_s=[line["stall_s"] for lines in each for line in lines if line["event"] == "pushed"],
        steps=steps,
        by_tokens=share_by_tokens(of_learner, steps, (ended - began) / (len(updates) - 1)),
        pushes_s=push_times(head),
        scoring_s=scoring_times(head, each),
        prompt_tokens=n_prompt,
        cpu=cpu,
        n_generators=len({name for name, _ in by_name}),
        n_slots=slots(config),
        n_learners=len(learners),
        n_updates=len(updates) - 1,
        tokens_per_s=sum(line["n_tokens"] for line in updates[1:]) / (ended - began),
        lag_mean=mean_lag(updates[1:]),
    )


def head_lines(where: Run) -> list[Line]:
    """Raises ConfigError if the head has more than one incarnation."""
    heads = where.journals("head")
    if len(heads) != 1:
        raise ConfigError(f"the head must have one incarnation: {where.folder} has {len(heads)}")
    return list(run.lines(heads[0], "batch", "update", "push", "publish", "scored", "spans", "start", "split"))


def actor_lines(
    where: Run, role: str, events: Sequence[str], period: Period, began: float, ended: float
) -> list[tuple[str, list[Line]]]:
    """(generator-0, its lines) for each incarnation; those of this time where the split changed."""
    each = [(path.stem.partition(".")[0], list(run.lines(path, *events))) for path in where.journals(role)]
    return [(name, lines) for name, lines in each if period.is_whole or wrote_between(lines, began, ended)]


def learner_lines(where: Run, period: Period, began: float, ended: float) -> list[list[Line]]:
    """The lines of each learner rank. Raises ConfigError if one has more than one incarnation in this time."""
    each = actor_lines(where, "learner", ("spans", "step", "start"), period, began, ended)
    if len({name for name, _ in each}) != len(each):
        raise ConfigError(
            "learners must have one incarnation each, or one for each change of the split: learners of "
            f"{where.folder} were restarted"
        )
    return [period.of(lines) for _, lines in each]


def measured_updates(where: Run, head: Sequence[Line], config: Config) -> list[Line]:
    """The updates after the warm-up. Raises ConfigError if there are too few."""
    settle = WARM_UP_UPDATES + config.rollout.max_head_offpolicyness
    updates = [line for line in head if line["event"] == "update"][settle:]
    if len(updates) <= MIN_UPDATES:
        raise ConfigError(
            f"too few updates in {where.folder}: {len(updates)} after a warm-up of {settle}, and a measurement needs "
            f"more than {MIN_UPDATES}"
        )
    return updates


def check_parts(
    where: Run, learners: Sequence[Sequence[Line]], head: Sequence[Line], each: Sequence[Sequence[Line]]
) -> None:
    """Raises ConfigError when a journal is missing, for example that of a host with a local journal.dir."""
    whole = {sample_key(line) for lines in each for line in lines if is_finished(line)}
    parts = [
        ("journal of a learner", bool(learners)),
        ("batch with its update", bool(batch_times(head))),
        ("push that was published", {"push", "publish"} <= {line["event"] for line in head}),
        ("push that a generator received", any(line["event"] == "pushed" for lines in each for line in lines)),
        ("sample with its verdict", any(line["event"] == "scored" and sample_key(line) in whole for line in head)),
    ]
    for part, is_there in parts:
        if not is_there:
            raise ConfigError(
                f"missing journal: {where.folder} has no {part}; a measurement needs all actors' journals in one folder"
            )


# learner and head


def batch_times(head: Iterable[Line]) -> list[tuple[Line, Line]]:
    """Each `batch` line with the `update` line of its training step."""
    taken: dict[int, Line] = {}
    found = []
    for line in head:
        if line["event"] == "batch":
            taken[line["step"] + 1] = line
        elif line["event"] == "update" and line["version"] in taken:
            found.append((taken[line["version"]], line))
    return found


def training_steps(
    head: Sequence[Line], clock: WorkClock, crowd: Crowd, began: float, *, computes: float
) -> list[Step]:
    """Each training step since then, from the batch to its update; of all steps if there is none."""
    each = batch_times(head)
    return [
        Step(
            update["n_tokens"],
            batch.get("n_groups", 0),
            clock.between(batch["t"], update["t"]),
            computes * crowd.mean_share(batch["t"], update["t"]),
        )
        for batch, update in [pair for pair in each if pair[0]["t"] >= began] or each
    ]


def share_by_tokens(over: Sequence[Window], steps: Sequence[Step], interval_s: float) -> float | None:
    """Share of the time of a step that its passes over tokens take. None if the labels do not show it.

    `interval_s`: mean time between two updates.
    """
    passes_s, lasted_s = sum(w.worked_s(*BY_TOKENS) for w in over), sum(w.end - w.begin for w in over)
    if not passes_s:
        return None
    return min(1.0, passes_s / lasted_s * interval_s / fmean(step.seconds for step in steps))


def prompt_tokens(learner: Sequence[Line], head: Iterable[Line]) -> float:
    """Mean tokens of a prompt, from the tokens that updates computed: a shared prompt once, no last tokens.

    Groups without a signal are not computed. 0 if no update trained a group without masked tokens.
    """
    batches = {batch["step"] + 1: batch for batch, _ in batch_times(head)}
    found = []
    for line in learner:
        batch = batches.get(line["version"]) if line["event"] == "step" else None
        computed = 1 - line.get("zero_advantage_share", 0.0)
        if batch is None or not line.get("n_tokens_computed") or line.get("n_tokens_masked") or computed <= 0:
            continue
        n_read = line["n_tokens_computed"] - line["n_tokens_trained"] + computed * batch["n_trajectories"]
        found.append(n_read / (computed * batch["n_groups"]))
    return max(0.0, fmean(found)) if found else 0.0


def push_times(head: Iterable[Line]) -> list[tuple[float, float]]:
    """(update to push, push to publication) of each version with a push of its own."""
    at: dict[tuple[str, int], float] = {}
    for line in head:
        if line["event"] in ("update", "push", "publish"):
            at.setdefault((line["event"], line["version"]), line["t"])
    pushed = [version for event, version in at if event == "push" and ("update", version) in at]
    return [
        (at["push", version] - at["update", version], at["publish", version] - at["push", version])
        for version in pushed
        if ("publish", version) in at
    ]


def scoring_times(head: Iterable[Line], each: Sequence[Sequence[Line]]) -> list[float]:
    """Time from each sample's end to its verdict in the head."""
    ended = {sample_key(line): line["wall"] for lines in each for line in lines if is_finished(line)}
    scored = [(line["wall"], sample_key(line)) for line in head if line["event"] == "scored"]
    return [wall - ended[key] for wall, key in scored if key in ended]


def mean_lag(updates: Sequence[Line]) -> float:
    """Mean lag of the trained tokens of these updates, in versions."""
    weights = [(line.get("lag_mean", 0.0), line.get("n_tokens_trained", 0)) for line in updates]
    n_tokens = sum(n for _, n in weights)
    return sum(lag * n for lag, n in weights) / n_tokens if n_tokens else 0.0


def cpu_use(
    where: Run,
    of_learner: Sequence[Window],
    histories: Sequence[GeneratorHistory],
    head: Sequence[Line],
    began: float,
    ended: float,
) -> CpuUse | None:
    """None if the journal has no CPU times, or the actors are on several hosts."""
    starts = [next(run.lines(path, "start"), {}) for path in where.journals()]
    rewards = [list(run.lines(path, "spans")) for path in where.journals("reward")]
    served = [window for lines in rewards for window in within(windows(lines, "reward"), began, ended)]
    served += within(windows(head, "head"), began, ended)
    of_generators = [window for history in histories for window in within(history.windows, began, ended)]
    every = [*of_learner, *of_generators, *served]
    one_host = len({(line.get("host"), str(line.get("machine")).partition(" ")[0]) for line in starts}) == 1
    n_scored = sum(line["event"] == "scored" and began <= line["t"] <= ended for line in head)
    if not one_host or "cores" not in starts[0] or not n_scored or any(window.cpu_s is None for window in every):
        return None
    return CpuUse(
        n_cores=starts[0]["cores"],
        generator=cores_used(of_generators),
        learner=cores_used(of_learner),
        sample_s=sum(window.cpu_s or 0.0 for window in served) / n_scored,
    )


def cores_used(over: Sequence[Window]) -> float:
    """CPU seconds for a second of work."""
    work_s = sum(window.work_s for window in over)
    return sum(window.cpu_s or 0.0 for window in over) / work_s if work_s else 0.0
