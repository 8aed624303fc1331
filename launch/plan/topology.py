"""Maps ranks to roles, hosts and GPUs: a pure function of the settings and the ranks' hosts. Counts the GPUs of a host.

torch counts them, because it computes on them, and in a subprocess, because supervisors do not import torch.

Learners come first (rank 0 runs learner 0 and the head), then reward actors, then generators. A generator takes
`tensor_parallel` ranks of one host: the first one runs the actor, the members only provide their GPU. Ranks of one host
may share its GPUs (`ranks_per_gpu`); GPUs are assigned in turn, so that a learner shares one with a generator.
"""

import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from areal_bus.config.sections import Config, TopologyConfig
from areal_bus.errors import ConfigError
from areal_bus.messages import Role
from areal_bus.weights.route import home
from launch.plan.environment import VISIBLE_DEVICES, actor_environment


@dataclass(frozen=True, slots=True)
class ActorId:
    """One actor: its role and its index in that role."""

    role: Role
    index: int

    def __str__(self) -> str:
        return f"{self.role}-{self.index}"


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank, its actors and its GPUs."""

    rank: int
    host: str
    actors: tuple[ActorId, ...]  # empty for a member
    gpus: tuple[int, ...]  # GPUs of its actors; empty on CPU, and for a member
    member_of: ActorId | None  # the generator to which it gives its GPU
    own_gpu: int | None  # the GPU that this rank contributes


@dataclass(frozen=True, slots=True)
class Counts:
    """Number of actors of each role."""

    learners: int
    rewards: int
    generators: int


def check_count(topology: TopologyConfig, size: int) -> None:
    """Raises ConfigError unless the settings accept `size` ranks."""
    if topology.ranks is not None and size != topology.ranks:
        raise ConfigError(
            f"too {'few' if size < topology.ranks else 'many'} ranks: {size} started, and topology.ranks is "
            f"{topology.ranks}; start with -np {topology.ranks} (or --set topology.ranks={size})"
        )
    own, width = fixed_ranks(topology), topology.tensor_parallel
    wanted = own + (topology.generators or 1) * width
    parts = f"{topology.learners} learner(s), {own - topology.learners} reward(s), "
    if topology.generators is not None and size != wanted:
        raise ConfigError(
            f"too {'few' if size < wanted else 'many'} ranks: {size} started, and the topology has {wanted} "
            f"({parts}{topology.generators} generator(s) of {width}); start with -np {wanted}, or leave "
            "topology.generators out"
        )
    if size < wanted:
        raise ConfigError(
            f"too few ranks: {size} started, and the topology needs at least {wanted} ({parts}1 generator of {width}); "
            f"start with -np {wanted} or more"
        )
    if (size - own) % width:
        raise ConfigError(
            f"mismatch of ranks: {size - own} are left for generators, which take topology.tensor_parallel = {width} "
            f"each; start with -np {size - (size - own) % width} or {size + width - (size - own) % width}"
        )


def fixed_ranks(topology: TopologyConfig) -> int:
    """Number of learner and reward ranks."""
    return topology.learners + (topology.rewards if topology.reward == "rank" else 0)


def count_actors(topology: TopologyConfig, size: int) -> Counts:
    generators = (size - fixed_ranks(topology)) // topology.tensor_parallel
    return Counts(topology.learners, topology.rewards, generators)


def plan(topology: TopologyConfig, hosts: Sequence[str]) -> tuple[RankPlan, ...]:
    """The plan of each rank, from the host of each. Raises ConfigError when the ranks do not fit the topology."""
    check_count(topology, len(hosts))
    own = fixed_ranks(topology)
    groups = generator_groups(hosts, first=own, width=topology.tensor_parallel)
    gpu = gpu_of_rank(topology, hosts)
    actors: dict[int, list[ActorId]] = defaultdict(list)
    gpus: dict[int, tuple[int, ...]] = {}
    member_of: dict[int, ActorId] = {}
    for index in range(topology.learners):
        actors[index] = [ActorId(Role.HEAD, 0)] if index == 0 else []
        actors[index].append(ActorId(Role.LEARNER, index))
    for index, group in enumerate(groups):
        actors[group[0]] = [ActorId(Role.GENERATOR, index)]
        gpus[group[0]] = tuple(gpu[rank] for rank in group if rank in gpu)
        member_of |= dict.fromkeys(group[1:], ActorId(Role.GENERATOR, index))
    for index in range(topology.rewards):
        beside = topology.reward == "beside"
        actors[groups[index % len(groups)][0] if beside else topology.learners + index].append(
            ActorId(Role.REWARD, index)
        )
    places = tuple(
        RankPlan(
            rank=rank,
            host=host,
            actors=tuple(actors[rank]),
            gpus=() if rank in member_of else gpus.get(rank, (gpu[rank],) if rank in gpu else ()),
            member_of=member_of.get(rank),
            own_gpu=gpu.get(rank),
        )
        for rank, host in enumerate(hosts)
    )
    check_gpu_sharing(topology, places)
    return places


def generator_groups(hosts: Sequence[str], *, first: int, width: int) -> list[list[int]]:
    """Groups of `width` ranks on one host, from rank `first` on, in order of their first rank."""
    by_host: dict[str, list[int]] = defaultdict(list)
    for rank in range(first, len(hosts)):
        by_host[hosts[rank]].append(rank)
    groups = []
    for host, ranks in by_host.items():
        over = len(ranks) % width
        if over:
            rule = f"the topology.tensor_parallel = {width} ranks of a generator must be on one host"
            remedy = f"move {over} ranks, or change topology.learners or topology.rewards"
            raise ConfigError(f"{rule}: {host} has {len(ranks)} ranks for generators; {remedy}")
        groups += [ranks[i : i + width] for i in range(0, len(ranks), width)]
    return sorted(groups)


def gpu_of_rank(topology: TopologyConfig, hosts: Sequence[str]) -> dict[int, int]:
    """GPU by rank: assigned in turn on each host, to at most `ranks_per_gpu` ranks each. Reward ranks have none."""
    if topology.gpus_per_host == 0:
        return {}
    reward_ranks = range(topology.learners, fixed_ranks(topology))
    most = topology.gpus_per_host * topology.ranks_per_gpu
    taken: dict[str, int] = defaultdict(int)
    gpu: dict[int, int] = {}
    for rank, host in enumerate(hosts):
        if rank in reward_ranks:
            continue
        gpu[rank] = taken[host] % topology.gpus_per_host
        taken[host] += 1
        if taken[host] > most:
            n = topology.ranks_per_gpu
            rule = "each rank needs its own GPU" if n == 1 else f"topology.ranks_per_gpu = {n} ranks share a GPU"
            has = f"topology.gpus_per_host = {topology.gpus_per_host} for at least {taken[host]} ranks"
            raise ConfigError(f"{rule}: host {host} has {has}; start fewer ranks there")
    return gpu


def check_gpu_sharing(topology: TopologyConfig, places: Sequence[RankPlan]) -> None:
    """Raises ConfigError when two learners, or two ranks of one generator, would share a GPU."""
    learner_on: dict[tuple[str, int], ActorId] = {}
    for place in places:
        for actor in place.actors:
            if actor.role is Role.LEARNER and place.own_gpu is not None:
                other = learner_on.setdefault((place.host, place.own_gpu), actor)
                if other != actor:
                    what = f"{other} and {actor} would share GPU {place.own_gpu} of {place.host}"
                    remedy = f"set topology.learners to {topology.gpus_per_host} or fewer a host"
                    raise ConfigError(f"each learner needs its own GPU: {what}; {remedy}")
            if actor.role is Role.GENERATOR and len(set(place.gpus)) < len(place.gpus):
                rule = f"each of the topology.tensor_parallel = {topology.tensor_parallel} ranks needs its own GPU"
                what = f"{actor} would get GPUs {', '.join(map(str, place.gpus))} of {place.host}"
                remedy = "lower topology.tensor_parallel, or change topology.learners or topology.generators"
                raise ConfigError(f"{rule}: {what}; {remedy}")


def check_route(config: Config, places: Sequence[RankPlan]) -> None:
    """Raises ConfigError when weights.route = "shared" and a generator cannot open learner 0's memory."""
    if config.weights.route != "shared":
        return
    on_device = home(config, on_gpu=config.topology.gpus_per_host > 0) == "device"
    root = places[0]
    for place, actor in ((one, actor) for one in places for actor in one.actors):
        if actor.role is not Role.GENERATOR:
            continue
        if place.host != root.host:
            elsewhere = f"on {place.host}, learner-0 on {root.host}"
        elif on_device and place.own_gpu != root.own_gpu:
            elsewhere = f"on GPU {place.own_gpu}, learner-0 on GPU {root.own_gpu}"
        else:
            continue
        rule = 'weights.route = "shared" needs all generators on the host and GPU of learner-0'
        remedy = 'set weights.route = "auto", or topology.gpus_per_host = 1 with ranks_per_gpu'
        raise ConfigError(f"{rule}: {actor} is {elsewhere}; {remedy}")


def ranks_by_gpu(places: Sequence[RankPlan]) -> dict[tuple[str, int], list[RankPlan]]:
    """The ranks of each GPU, by host and GPU number."""
    found: dict[tuple[str, int], list[RankPlan]] = defaultdict(list)
    for place in places:
        if place.own_gpu is not None:
            found[place.host, place.own_gpu].append(place)
    return dict(found)


def planned_hosts(topology: TopologyConfig, size: int) -> list[str]:
    """Host names for a dry run: `ranks_per_host` on each, in order."""
    return [f"host-{rank // topology.ranks_per_host}" for rank in range(size)]


def min_ranks(topology: TopologyConfig) -> int:
    """The smallest number of ranks that this topology accepts."""
    return topology.ranks or fixed_ranks(topology) + (topology.generators or 1) * topology.tensor_parallel


COUNT_PROGRAM = "import torch; print(torch.cuda.device_count(), torch.__version__)"
TIMEOUT_S = 300.0  # importing torch from a network file system is slow


def count_gpus() -> tuple[int, str]:
    """(number of GPUs, torch version). CUDA_VISIBLE_DEVICES limits the GPUs that torch finds."""
    try:
        number, version = ask_torch(COUNT_PROGRAM).split()
        return int(number), version
    except (subprocess.SubprocessError, OSError, ValueError):  # torch does not import
        return 0, "none that imports"


def ask_torch(program: str) -> str:
    """The output of a program with torch, in a process of its own. Raises SubprocessError or OSError."""
    inner = actor_environment(os.environ, gpus=(), cpu=True)
    del inner[VISIBLE_DEVICES]
    inner |= {VISIBLE_DEVICES: os.environ[VISIBLE_DEVICES]} if VISIBLE_DEVICES in os.environ else {}
    words = [sys.executable, "-P", "-c", program]
    done = subprocess.run(
        words,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=inner,
        timeout=TIMEOUT_S,
        check=True,
        encoding="utf-8",
    )
    return done.stdout


def smallest_gpu_mib() -> int:
    """Memory in MiB of this machine's smallest GPU, from nvidia-smi; 0 without a GPU."""
    if not (program := shutil.which("nvidia-smi")):
        return 0
    words = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=True, encoding="utf-8")
        return min(int(line) for line in done.stdout.split())
    except (subprocess.SubprocessError, OSError, ValueError):
        return 0


def check_gpus(wanted: int, hosts: Sequence[str], found: Sequence[tuple[int, str]]) -> None:
    """Raises ConfigError for the first host with fewer than `wanted` GPUs. `found`: result of `count_gpus` by rank."""
    by_host: Mapping[str, tuple[int, str]] = dict(zip(hosts, found, strict=True))
    for host, (number, version) in by_host.items():
        if number < wanted:
            rule = f"topology.gpus_per_host = {wanted} needs {wanted} GPUs on each host"
            remedy = "run on a machine that has them, lower it (0: all on CPU), or only plan with --dry-run"
            raise ConfigError(f"{rule}: torch ({version}) finds {number} on {host}; {remedy}")
