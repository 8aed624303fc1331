"""Compares the memory of a plan with that of its GPUs and hosts, and finds single settings that make it fit."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from areal_bus.config.names.engines import kind_of
from areal_bus.config.sections import Config
from areal_bus.config.stages import largest
from areal_bus.config.validation import check
from areal_bus.errors import ConfigError
from areal_bus.messages import Role
from launch.memory.loads import (
    Load,
    Proposal,
    device_bytes,
    format_bytes,
    gpu_loads,
    gpu_memory,
    host_loads,
    host_memory,
    is_served,
)
from launch.memory.ranks import receives_on_device
from launch.plan.settings_text import toml_value

MIN_SERVER_SLOTS = 1  # a server runs with it; other samples wait
SPARE_SHARE = 0.05  # of the memory: an advised plan leaves it free, because the formula does not count everything
SLOTS = "rollout.max_concurrent_rollouts"


@dataclass(frozen=True, slots=True)
class Fit:
    """The comparison, as lines. `is_too_large`: the plan needs more memory than a GPU or a host has."""

    lines: tuple[str, ...] = ()
    is_too_large: bool = False


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of one GPU (`is_gpu`) or of one host."""

    n_bytes: int
    is_gpu: bool

    def loads(self, proposal: Proposal) -> list[Load]:
        return gpu_loads(proposal) if self.is_gpu else host_loads(proposal)

    def holds(self, proposal: Proposal, load: Load) -> bool:
        return load.n_bytes <= self.n_bytes or self.serves(proposal, load)

    def serves(self, proposal: Proposal, load: Load) -> bool:
        """Whether a server fits with one slot; its other samples wait."""
        if not self.is_gpu or not is_served(proposal.config, load):
            return False
        least = proposal.changed(SLOTS, MIN_SERVER_SLOTS)
        return sum(device_bytes(least, place) for place in load.places) <= self.n_bytes


def compare(proposal: Proposal) -> Fit:
    """Compare with topology.gpu_memory_gib or the GPUs of this machine; on CPU with the memory of a host."""
    topology = proposal.config.topology
    if topology.gpus_per_host == 0:
        return compare_hosts(proposal)
    gpus = compare_gpus(proposal)
    hosts = compare_hosts(proposal) if topology.host_memory_gib is not None else Fit()
    return Fit(gpus.lines + hosts.lines, gpus.is_too_large or hosts.is_too_large)


def compare_gpus(proposal: Proposal) -> Fit:
    n_bytes, origin = gpu_memory(proposal.config)
    if not n_bytes:
        return Fit(('GPU memory is not checked: set topology.gpu_memory_gib = 80, or the name of a card ("H100")',))
    first = f"each GPU has {format_bytes(n_bytes)} ({origin}); needed, with CUDA, NCCL and gathered FSDP layers:"
    return compare_loads(proposal, Memory(n_bytes, is_gpu=True), first)


def compare_hosts(proposal: Proposal) -> Fit:
    """Compare the hosts' memory. For several hosts, topology.host_memory_gib must be set."""
    n_hosts = len({place.host for place in proposal.places()})
    if n_hosts > 1 and proposal.config.topology.host_memory_gib is None:
        unknown = f"the memory of {n_hosts} hosts is not checked: set topology.host_memory_gib to that of one host"
        return Fit((unknown,))
    n_bytes, origin = host_memory(proposal.config)
    first = f"each host has {format_bytes(n_bytes)} ({origin}); needed:"
    return compare_loads(proposal, Memory(n_bytes, is_gpu=False), first)


def compare_loads(proposal: Proposal, memory: Memory, first: str) -> Fit:
    lines, is_too_large, kind = [first], False, "GPU" if memory.is_gpu else "host"
    for load in memory.loads(proposal):
        where = f"  {load.roles} ({load.n_alike} {kind}{'s' if load.n_alike > 1 else ''}): {format_bytes(load.n_bytes)}"
        if load.n_bytes <= memory.n_bytes:
            lines.append(f"{where}, fits")
        elif memory.serves(proposal, load):
            lines.append(f"{where} with all slots at full length: samples that do not fit wait in the server")
        else:
            is_too_large = True
            lines.append(f"{where}, DOES NOT FIT: {advice(proposal, load, memory)}")
    return Fit(tuple(lines), is_too_large)


def advice(proposal: Proposal, load: Load, memory: Memory) -> str:
    """Single settings with which the plan passes all checks and leaves SPARE_SHARE of this memory free."""
    found = [
        f"{key} = {toml_value(value)} (it is {toml_value(value_of(proposal.config, key))})"
        for key, values in remedies(proposal, load, memory)
        if (value := first_good_value(proposal, key, values, load, memory)) is not None
    ]
    lacks = f"{format_bytes(load.n_bytes - memory.n_bytes)} too much; "
    if found:
        return f"{lacks}set {'; or '.join(found)}; each leaves {SPARE_SHARE:.0%} or more free"
    larger = "GPUs, or more of them" if memory.is_gpu else "hosts, or fewer ranks on each"
    return f"{lacks}no single setting is enough: use a smaller model, larger {larger}, or change several settings"


def remedies(proposal: Proposal, load: Load, memory: Memory) -> Iterator[tuple[str, list[Any]]]:
    """(key, values in order of preference) for the actors of this load."""
    config, has = largest(proposal.config), set(load.roles.split(" + "))
    if Role.LEARNER in has:
        if memory.is_gpu and config.topology.ranks_per_gpu == 1:
            yield "topology.learners", [n for f in (2, 4, 8, 16) if (n := f * config.topology.learners) <= 1024]
        if not config.learner.gradient_checkpointing:
            yield "learner.gradient_checkpointing", [True]
        longest, most = proposal.n_prompt + config.gconfig.max_new_tokens, config.learner.max_tokens_per_mb
        yield "learner.max_tokens_per_mb", [n for f in (2, 4, 8, 16) if (n := most // f) >= longest]
    if Role.GENERATOR in has:
        yield SLOTS, list(range(config.rollout.max_concurrent_rollouts - 1, config.gconfig.n_samples - 1, -1))
        if memory.is_gpu and receives_on_device(config):
            yield "weights.staging", ["host"]
        if memory.is_gpu and kind_of(config.rollout.engine).is_server:
            yield "topology.tensor_parallel", [n for f in (2, 4, 8) if (n := f * config.topology.tensor_parallel) <= 8]
    if config.model.dtype == "float32":
        yield "model.dtype", ["bfloat16"]


def first_good_value(proposal: Proposal, key: str, values: Sequence[Any], load: Load, memory: Memory) -> Any | None:
    def does(value: Any) -> bool:
        return is_good_plan(proposal.changed(key, value), load, memory, proposal)

    if key == SLOTS:  # fewer slots always need less
        place = bisect_left(values, True, key=does)
        return values[place] if place < len(values) else None
    return next((value for value in values if does(value)), None)


def is_good_plan(new: Proposal, load: Load, memory: Memory, old: Proposal) -> bool:
    """Whether the new plan passes all checks, has spare memory for this load, and makes no other load worse."""
    try:
        check(new.config)
        loads = memory.loads(new)
    except ConfigError:
        return False
    before = {one.roles: one.n_bytes for one in memory.loads(old)}
    roomy = memory.n_bytes * (1 - SPARE_SHARE)
    return all(
        one.n_bytes <= roomy
        if one.roles == load.roles
        else memory.holds(new, one) or one.n_bytes <= before.get(one.roles, 0)
        for one in loads
    )


def value_of(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)
