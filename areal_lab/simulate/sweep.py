"""Makes the schedules of a sweep from settings and speeds: one for each split of the devices and each eta."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from areal_bus.config.capacity import groups_waiting, slots
from areal_bus.config.sections import Config
from areal_bus.core.parts.staleness import StalenessPolicy
from areal_bus.errors import ConfigError
from areal_lab.ring.workload import LengthLaw, SpeedLaw
from areal_lab.simulate.calibration import Measured
from areal_lab.simulate.cores import Cores
from areal_lab.simulate.schedule import LengthModel, Schedule

LEARNER_SPEED_FACTOR = (
    3.0  # a learner over a full generator of one device, where nothing is said: at 75 % generating they balance
)
MAX_SPLITS = 7


@dataclass(frozen=True, slots=True)
class Split:
    """Number of learner ranks and of generators."""

    learners: int
    generators: int
    shares_device: bool = False

    def __str__(self) -> str:
        return "shared" if self.shares_device else f"{self.learners} + {self.generators}"


@dataclass(frozen=True, slots=True)
class RingSpeed:
    """The speed of a ring, which is not part of the settings."""

    lengths: LengthModel
    speeds: SpeedLaw
    train_tokens_per_s: float  # of one learner rank
    step_s: float
    push_s: float
    reward_s: float
    prompt_tokens: int
    cores: Cores | None = None  # `learners` is that of the split
    shows_no_overlap: bool = False  # the measured halves never computed at once


def assumed_speed(
    config: Config, *, train: float | None, step_s: float, push_s: float, reward_s: float, prompt_tokens: int
) -> RingSpeed:
    """From [engine.simulated] and the options."""
    law = config.engine.simulated
    speeds = SpeedLaw(law.decode_tokens_per_s, law.half_slots, law.prefill_tokens_per_s, law.update_s)
    full = speeds.tokens_per_s(slots(config)) / config.topology.tensor_parallel
    lengths = LengthLaw(law.median_tokens, law.sigma)
    return RingSpeed(lengths, speeds, train or LEARNER_SPEED_FACTOR * full, step_s, push_s, reward_s, prompt_tokens)


def measured_speed(seen: Measured) -> RingSpeed:
    return RingSpeed(
        lengths=seen.lengths,
        speeds=seen.speeds,
        train_tokens_per_s=seen.train_tokens_per_s / seen.n_learners,
        step_s=seen.step_s,
        push_s=seen.push_s,
        reward_s=seen.reward_s,
        prompt_tokens=seen.prompt_tokens,
        cores=seen.cores,
        shows_no_overlap=seen.shows_no_overlap,
    )


def splits(config: Config, n_gpus: int | None) -> list[Split]:
    """The splits of `n_gpus` devices, or the split of the settings. Raises ConfigError if they define none."""
    if n_gpus is None:
        return [configured_split(config)]
    size = config.topology.tensor_parallel
    if n_gpus == size == 1:
        return [Split(1, 1, shares_device=True)]
    every = [Split(n, (n_gpus - n) // size) for n in range(1, n_gpus) if (n_gpus - n) // size]
    if not every:
        raise ConfigError(
            f"a split needs a learner and a generator of topology.tensor_parallel = {size} devices: --gpus is {n_gpus}"
        )
    wanted = {round(i * (len(every) - 1) / (MAX_SPLITS - 1)) for i in range(MAX_SPLITS)}
    return every if len(every) <= MAX_SPLITS else [every[i] for i in sorted(wanted)]


def configured_split(config: Config) -> Split:
    """The split of the settings."""
    topology = config.topology
    generators = topology.generators
    if generators is None and topology.ranks is not None:
        rewards = topology.rewards if topology.reward == "rank" else 0
        generators = (topology.ranks - topology.learners - rewards) // topology.tensor_parallel
    if not generators:
        raise ConfigError("give a split: --gpus N, topology.generators or topology.ranks")
    return Split(topology.learners, generators, shares_device=generators == 1 and topology.ranks_per_gpu > 1)


def schedules(
    config: Config, pace: RingSpeed, each: Sequence[Split], etas: Sequence[int]
) -> Iterator[tuple[Split, int, Schedule]]:
    if config.rollout.on_update == "finish_old":
        raise ConfigError('rollout.on_update = "finish_old" is not simulated: set "recompute", "keep" or "drain"')
    for split in each:
        for eta in etas:
            yield (
                split,
                eta,
                Schedule(
                    batch_size=config.data.batch_size,
                    n_samples=config.gconfig.n_samples,
                    eta=eta,
                    policy=StalenessPolicy(config.rollout.staleness_policy),
                    on_update=config.rollout.on_update,
                    n_generators=split.generators,
                    slots=slots(config),
                    groups_waiting=groups_waiting(config),
                    lengths=pace.lengths,
                    max_tokens=config.gconfig.max_new_tokens,
                    prompt_tokens=pace.prompt_tokens,
                    speeds=pace.speeds,
                    train_tokens_per_s=pace.train_tokens_per_s * split.learners,
                    step_s=pace.step_s,
                    push_s=pace.push_s,
                    reward_s=pace.reward_s,
                    cores=cores_of(split, pace),
                ),
            )


def cores_of(split: Split, pace: RingSpeed) -> Cores | None:
    """The cores that a split shares. One shared device is like one core: half speed while both halves work."""
    if split.shares_device:
        return Cores(1.0)
    return replace(pace.cores, learners=split.learners) if pace.cores is not None else None
