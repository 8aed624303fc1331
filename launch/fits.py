"""Compares the memory that a plan needs with that of its GPUs, and names single settings that make it fit."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from areal_bus.config.gpu_memory import gib_of
from areal_bus.config.sections import Config
from areal_bus.messages import Role
from launch.gpus import smallest_gpu_mib
from launch.memory import (
    BYTES,
    GIB,
    MIB,
    SUPERVISOR,
    DecoderShape,
    Need,
    estimate,
    receives_on_device,
)
from launch.topology import RankPlan, by_gpu

CUDA = 768 * MIB  # a process's context, kernels and workspaces
NCCL = 1 * GIB  # buffers of one process group
LEAST_SLOTS = 1  # with so many a server runs, and lets other samples wait


@dataclass(frozen=True, slots=True)
class Load:
    """The ranks of one GPU; of GPUs alike the one that needs most."""

    places: tuple[RankPlan, ...]
    n_alike: int
    n_bytes: int  # what they need together, with `on_top`

    @property
    def roles(self) -> str:
        return " + ".join(dict.fromkeys(str(role) for place in self.places for role in roles(place)))


@dataclass(frozen=True, slots=True)
class Fit:
    """The comparison, as lines; `is_too_large`: some GPU cannot hold what is planned for it."""

    lines: tuple[str, ...] = ()
    is_too_large: bool = False


def compare(config: Config, places: Sequence[RankPlan], shape: DecoderShape | None, n_prompt: int) -> Fit:
    """On GPUs with topology.gpu_memory_gib, else with those of this machine; on CPU with this machine's memory."""
    if shape is None:
        return Fit()
    if config.topology.gpus_per_host == 0:
        return compare_host(config, places, shape, n_prompt)
    capacity, origin = device(config)
    if not capacity:
        return Fit(('memory is compared with nothing: set topology.gpu_memory_gib = 80, or a card\'s name ("H100")',))
    lines = [f"each GPU has {amount(capacity)} ({origin}); CUDA, NCCL and what FSDP gathers included, needed are:"]
    is_too_large = False
    for load in loads(config, places, shape, n_prompt):
        where = f"  {load.roles} ({load.n_alike} GPU{'s' if load.n_alike > 1 else ''}): {amount(load.n_bytes)}"
        if load.n_bytes <= capacity:
            lines.append(f"{where}, fits")
        elif is_served(config, load) and total(with_slots(config), load.places, shape, n_prompt) <= capacity:
            lines.append(f"{where} with all slots at full length: the server lets samples wait where they do not fit")
        else:
            is_too_large = True
            lines.append(f"{where}, DOES NOT FIT: {advice(config, load, shape, n_prompt, capacity)}")
    return Fit(tuple(lines), is_too_large)


def device(config: Config) -> tuple[int, str]:
    """Bytes of one GPU, and who says so; 0 where nobody does."""
    if config.topology.gpu_memory_gib:
        gib = gib_of(config.topology.gpu_memory_gib) or 0.0
        return int(gib * GIB), f"topology.gpu_memory_gib = {config.topology.gpu_memory_gib}"
    return smallest_gpu_mib() * MIB, "nvidia-smi on this machine; topology.gpu_memory_gib is unset"


def loads(config: Config, places: Sequence[RankPlan], shape: DecoderShape, n_prompt: int) -> list[Load]:
    """A load for each combination of roles on a GPU."""
    found: dict[str, Load] = {}
    for ranks in by_gpu(places).values():
        one = Load(tuple(ranks), 1, total(config, ranks, shape, n_prompt))
        before = found.get(one.roles)
        most = one if before is None or one.n_bytes > before.n_bytes else before
        found[one.roles] = Load(most.places, 1 + (before.n_alike if before else 0), most.n_bytes)
    return [load for load in found.values() if load.n_bytes]


def total(config: Config, places: Sequence[RankPlan], shape: DecoderShape, n_prompt: int) -> int:
    """Bytes on the device of these ranks together."""
    return sum(need(config, place, shape, n_prompt).device + on_top(config, place, shape) for place in places)


def need(config: Config, place: RankPlan, shape: DecoderShape, n_prompt: int) -> Need:
    """Of one rank, its actors and its supervisor; a member needs what its generator does on the device."""
    seats = place.seats if place.member_of is None else (place.member_of,)
    needs = [estimate(config, shape, seat.role, seat.index, n_prompt=n_prompt) for seat in seats]
    host = SUPERVISOR + (0 if place.member_of else sum(need.host for need in needs))
    return Need(sum(need.device for need in needs), host)


def on_top(config: Config, place: RankPlan, shape: DecoderShape) -> int:
    """What CUDA takes for itself, NCCL's buffers and the layers that FSDP gathers; 0 for a rank without a GPU."""
    found = roles(place)
    if place.own_gpu is None or not {Role.LEARNER, Role.GENERATOR} & set(found):
        return 0
    if Role.LEARNER not in found or config.topology.learners == 1:
        return CUDA
    return CUDA + NCCL + gathered(config, shape)


def gathered(config: Config, shape: DecoderShape) -> int:
    """FSDP2 at the peak, where logits are: embedding and head, a layer and the next one; without their gradients."""
    one = BYTES[config.model.dtype]
    root = shape.vocabulary * shape.hidden * (1 if shape.tied else 2)
    layer = (shape.n_parameters - root) // shape.layers
    return one * (root + 2 * layer)


def advice(config: Config, load: Load, shape: DecoderShape, n_prompt: int, capacity: int) -> str:
    """Single settings, each of which makes it fit."""
    found = [
        f"{key} = {shown(value)} (it is {shown(read(config, key))})"
        for key, values in remedies(config, load, n_prompt)
        if (value := first_that_fits(config, key, values, load, shape, n_prompt, capacity)) is not None
    ]
    lacks = f"{amount(load.n_bytes - capacity)} too much; "
    if not found:
        return lacks + "no single setting is enough: use larger GPUs, or change several of those of its actors"
    return f"{lacks}set {'; or '.join(found)}"


def remedies(config: Config, load: Load, n_prompt: int) -> Iterator[tuple[str, list[Any]]]:
    """(key, values to try in order of preference) for the actors of this GPU."""
    has, longest = set(load.roles.split(" + ")), n_prompt + config.gconfig.max_new_tokens
    if Role.LEARNER in has:
        if config.topology.ranks_per_gpu == 1:
            yield "topology.learners", [n for f in (2, 4, 8, 16) if (n := f * config.topology.learners) <= 1024]
        if not config.learner.gradient_checkpointing:
            yield "learner.gradient_checkpointing", [True]
        yield (
            "learner.max_tokens_per_mb",
            [n for f in (2, 4, 8, 16) if (n := config.learner.max_tokens_per_mb // f) >= longest],
        )
    if Role.GENERATOR in has:
        most = config.rollout.max_concurrent_rollouts
        yield "rollout.max_concurrent_rollouts", list(range(most - 1, config.gconfig.n_samples - 1, -1))
        if receives_on_device(config):
            yield "weights.staging", ["host"]
        if config.rollout.engine in ("sglang", "vllm"):
            yield "topology.tensor_parallel", [n for f in (2, 4, 8) if (n := f * config.topology.tensor_parallel) <= 8]
    if config.model.dtype == "float32":
        yield "model.dtype", ["bfloat16"]


def first_that_fits(
    config: Config, key: str, values: Sequence[Any], load: Load, shape: DecoderShape, n_prompt: int, capacity: int
) -> Any | None:
    for value in values:
        if total(replaced(config, key, value), load.places, shape, n_prompt) <= capacity:
            return value
    return None


def is_served(config: Config, load: Load) -> bool:
    return config.rollout.engine in ("sglang", "vllm") and load.roles == str(Role.GENERATOR)


def with_slots(config: Config) -> Config:
    return replaced(config, "rollout.max_concurrent_rollouts", LEAST_SLOTS)


def replaced(config: Config, key: str, value: Any) -> Config:
    """With another value of `section.key`; nothing is checked."""
    section, _, name = key.partition(".")
    return config.model_copy(update={section: getattr(config, section).model_copy(update={name: value})})


def read(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def roles(place: RankPlan) -> list[Role]:
    """That compute on this rank's GPU."""
    seats = place.seats if place.member_of is None else (place.member_of,)
    return [seat.role for seat in seats if seat.role in (Role.LEARNER, Role.GENERATOR)]


def compare_host(config: Config, places: Sequence[RankPlan], shape: DecoderShape, n_prompt: int) -> Fit:
    """All ranks on one host's CPU: with the memory of this machine."""
    if len({place.host for place in places}) > 1:
        return Fit()
    needs = [need(config, place, shape, n_prompt) for place in places]
    n_bytes, here = (
        sum(one.device + one.host for one in needs),
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    )
    verdict = "fits" if n_bytes <= here else "more than there is: use a smaller model, or fewer ranks on this host"
    return Fit((f"all ranks together need {amount(n_bytes)}; this machine has {amount(here)}: {verdict}",))


def amount(n_bytes: int) -> str:
    """A size with the unit that suits it."""
    if n_bytes == 0:
        return "-"
    return f"{n_bytes / GIB:.3g} GiB" if n_bytes >= GIB else f"{n_bytes / MIB:.3g} MiB"
