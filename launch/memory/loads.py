"""Computes the memory that a plan needs and has on each GPU and host, in each stage. `fits.py` compares."""

import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from areal_bus.config.names.engines import kind_of
from areal_bus.config.names.gpu_memory import gib_of
from areal_bus.config.sections import Config
from areal_bus.config.stages import KEYS, largest, settings_by_stage, value_at
from areal_bus.messages import Role
from areal_bus.process import terminal
from launch.memory.ranks import estimate, fsdp_bytes
from launch.memory.shape import ATTENDANT, FORK_SERVER, FORKED_SUPERVISOR, GIB, MIB, SUPERVISOR, DecoderShape, Need
from launch.plan.seats import plan_ranks
from launch.plan.topology import RankPlan, check_route, min_ranks, planned_hosts, ranks_by_gpu, smallest_gpu_mib

CUDA = 768 * MIB  # context, kernels and workspaces of a process
NCCL = 1 * GIB  # buffers of one process group
CGROUP = Path("/sys/fs/cgroup/memory.max")  # limit of this container in bytes, or "max"


@dataclass(frozen=True, slots=True)
class Proposal:
    """A planned job. `size` None: topology.ranks, or the smallest possible number of ranks."""

    config: Config
    size: int | None
    shape: DecoderShape
    n_prompt: int  # tokens of the longest prompt

    def places(self) -> tuple[RankPlan, ...]:
        """Raises ConfigError when the ranks do not fit the topology, or weights.route is impossible."""
        topology = self.config.topology
        places = plan_ranks(topology, planned_hosts(topology, self.size or min_ranks(topology)))
        check_route(self.config, places)
        return places

    def changed(self, key: str, value: Any) -> "Proposal":
        """A copy with another value of `section.key`, unchecked."""
        section, _, name = key.partition(".")
        inner = getattr(self.config, section).model_copy(update={name: value})
        return replace(self, config=self.config.model_copy(update={section: inner}))


@dataclass(frozen=True, slots=True)
class Load:
    """The ranks of one GPU or host. It stands for `n_alike` loads with the same roles, of which it is the largest."""

    places: tuple[RankPlan, ...]
    n_alike: int
    n_bytes: int  # of all ranks; on a GPU with `gpu_overhead`

    @property
    def roles(self) -> str:
        return " + ".join(dict.fromkeys(str(role) for place in self.places for role in roles(place)))


def gpu_memory(config: Config) -> tuple[int, str]:
    """Bytes of one GPU, and their origin; 0 if unknown."""
    if config.topology.gpu_memory_gib:
        gib = gib_of(config.topology.gpu_memory_gib) or 0.0
        return int(gib * GIB), f"topology.gpu_memory_gib = {config.topology.gpu_memory_gib}"
    return smallest_gpu_mib() * MIB, "nvidia-smi on this machine; topology.gpu_memory_gib is unset"


def host_memory(config: Config) -> tuple[int, str]:
    """Bytes of one host, and their origin."""
    if config.topology.host_memory_gib is not None:
        gib = config.topology.host_memory_gib
        return int(gib * GIB), f"topology.host_memory_gib = {gib:g}"
    n_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = CGROUP.read_text(encoding="utf-8").strip() if CGROUP.is_file() else "max"
    n_bytes = min(n_bytes, int(limit)) if limit.isdecimal() else n_bytes
    return n_bytes, f"this machine, {socket.gethostname()}; topology.host_memory_gib is unset"


def gpu_loads(proposal: Proposal) -> list[Load]:
    groups = ranks_by_gpu(proposal.places()).values()
    return merge_alike(Load(tuple(ranks), 1, sum(device_bytes(proposal, place) for place in ranks)) for ranks in groups)


def host_loads(proposal: Proposal) -> list[Load]:
    """One load for each combination of roles on a host. On CPU, device memory is host memory."""
    by_host: dict[str, list[RankPlan]] = {}
    for place in proposal.places():
        by_host.setdefault(place.host, []).append(place)
    shared = FORK_SERVER if proposal.config.launch.start == "fork" else 0
    needs = ((ranks, shared + sum(host_bytes(proposal, place) for place in ranks)) for ranks in by_host.values())
    return merge_alike(Load(tuple(ranks), 1, need) for ranks, need in needs)


def merge_alike(every: Iterable[Load]) -> list[Load]:
    found: dict[str, Load] = {}
    for one in every:
        before = found.get(one.roles)
        most = one if before is None or one.n_bytes > before.n_bytes else before
        found[one.roles] = replace(most, n_alike=1 + (before.n_alike if before else 0))
    return [load for load in found.values() if load.n_bytes]


def device_bytes(proposal: Proposal, place: RankPlan) -> int:
    need = rank_need(proposal.config, place, proposal.shape, proposal.n_prompt)
    return need.device + gpu_overhead(proposal.config, place, proposal.shape)


def host_bytes(proposal: Proposal, place: RankPlan) -> int:
    """Bytes in the host's memory of this rank."""
    found = rank_need(proposal.config, place, proposal.shape, proposal.n_prompt)
    return found.host + (found.device if proposal.config.topology.gpus_per_host == 0 else 0)


def rank_need(config: Config, place: RankPlan, shape: DecoderShape, n_prompt: int) -> Need:
    """Memory of one rank, of its largest stage: its actors and its supervisor."""
    needs = [need_in_stage(largest(stage), place, shape, n_prompt) for stage in settings_by_stage(config).values()]
    return Need(max(need.device for need in needs), max(need.host for need in needs))


def need_in_stage(config: Config, place: RankPlan, shape: DecoderShape, n_prompt: int) -> Need:
    """A member needs the device memory of its generator."""
    actors = place.actors if place.member_of is None else (place.member_of,)
    needs = [estimate(config, shape, actor.role, actor.index, n_prompt=n_prompt) for actor in actors]
    host = supervisor_bytes(config, place) + (0 if place.member_of else sum(need.host for need in needs))
    return Need(sum(need.device for need in needs), host)


def supervisor_bytes(config: Config, place: RankPlan) -> int:
    """Host memory of a rank beside its actors."""
    if config.launch.start != "fork":
        return SUPERVISOR
    return ATTENDANT + (FORKED_SUPERVISOR if place.actors else 0)


def gpu_overhead(config: Config, place: RankPlan, shape: DecoderShape) -> int:
    """Memory of CUDA, NCCL buffers and layers that FSDP gathers; 0 for a rank without a GPU."""
    found = roles(place)
    if place.own_gpu is None or not {Role.LEARNER, Role.GENERATOR} & set(found):
        return 0
    if Role.LEARNER not in found or config.topology.learners == 1:
        return CUDA
    return CUDA + NCCL + fsdp_bytes(config, shape)


def is_served(config: Config, load: Load) -> bool:
    return kind_of(config.rollout.engine).is_server and load.roles == str(Role.GENERATOR)


def roles(place: RankPlan) -> list[Role]:
    actors = place.actors if place.member_of is None else (place.member_of,)
    return [actor.role for actor in actors if actor.role in (Role.LEARNER, Role.GENERATOR)]


def format_bytes(n_bytes: int) -> str:
    """A size in MiB or GiB, as text."""
    if n_bytes == 0:
        return "-"
    size, unit = (n_bytes / GIB, "GiB") if n_bytes >= GIB else (n_bytes / MIB, "MiB")
    return f"{size:.0f} {unit}" if size >= 100 else f"{size:.3g} {unit}"


ROLES = (Role.LEARNER, Role.GENERATOR)
HEADINGS = ("stage from step", *KEYS, *(f"{role}: device memory" for role in ROLES))


def stage_lines(config: Config, shape: DecoderShape | None, n_prompt: int) -> list[str]:
    """One line a stage, the largest memory marked; none without [[run.stage]]. `n_prompt`: of the longest prompt."""
    if not config.run.stage:
        return []
    stages = settings_by_stage(config)
    needs = {role: [stage_bytes(settings, shape, role, n_prompt) for settings in stages.values()] for role in ROLES}
    rows = [
        (
            str(start),
            *(str(value_at(settings, key)) for key in KEYS),
            *(memory_cell(needs[role], index) for role in ROLES),
        )
        for index, (start, settings) in enumerate(stages.items())
    ]
    return terminal.table([HEADINGS, *rows])


def stage_bytes(settings: Config, shape: DecoderShape | None, role: Role, n_prompt: int) -> int | None:
    """Of the first actor of this role; None for a model of unknown shape."""
    return None if shape is None else estimate(largest(settings), shape, role, 0, n_prompt=n_prompt).device


def memory_cell(needs: list[int | None], index: int) -> str:
    need = needs[index]
    if need is None:
        return "unknown"
    others = [other for other in needs if other is not None and other != need]
    is_largest = bool(others) and need > max(others)
    return f"{format_bytes(need)}{', the largest' if is_largest else ''}"
