"""Ranks to roles, hosts and GPUs: a pure function of the settings and the ranks' hosts.

Learners come first (rank 0 is learner 0, with the head beside it), then reward actors, then generators. A generator of
`tensor_parallel` ranks is its first rank (it runs the actor) and members that hold their GPU for it, on one host. Ranks
of one host may share its GPUs (`ranks_per_gpu`): as they take them in turn, a learner and a generator come together.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from areal_bus.config.sections import Config, TopologyConfig
from areal_bus.errors import ConfigError
from areal_bus.messages import Role
from areal_bus.weights.route import home


@dataclass(frozen=True, slots=True)
class ActorId:
    """One actor: its role and its index among that role."""

    role: Role
    index: int

    def __str__(self) -> str:
        return f"{self.role}-{self.index}"


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank and what it runs."""

    rank: int
    host: str
    seats: tuple[ActorId, ...]  # actors it starts; none for a member
    gpus: tuple[int, ...]  # that its actors compute on; none on CPU, and none for a member
    member_of: ActorId | None  # the generator that it holds a GPU for
    own_gpu: int | None  # the one that this rank brings


@dataclass(frozen=True, slots=True)
class Counts:
    """How many actors of each role."""

    learners: int
    rewards: int
    generators: int


def check_count(topology: TopologyConfig, size: int) -> None:
    """Raises ConfigError unless `size` ranks are what the settings ask for."""
    if topology.ranks is not None and size != topology.ranks:
        raise ConfigError(
            f"topology.ranks says {topology.ranks} ranks: {size} started; run mpirun -np {topology.ranks} "
            f"(or --set topology.ranks={size})"
        )
    own, width = fixed_ranks(topology), topology.tensor_parallel
    wanted = own + (topology.generators or 1) * width
    parts = f"{topology.learners} learner(s), {own - topology.learners} reward(s), "
    if topology.generators is not None and size != wanted:
        raise ConfigError(
            f"the topology takes exactly {wanted} ranks ({parts}{topology.generators} generator(s) of {width}): "
            f"{size} started; run mpirun -np {wanted}, or leave topology.generators out"
        )
    if size < wanted:
        raise ConfigError(
            f"the topology takes at least {wanted} ranks ({parts}1 generator of {width}): {size} started; "
            f"run mpirun -np {wanted} or more"
        )
    if (size - own) % width:
        raise ConfigError(
            f"generators take topology.tensor_parallel = {width} ranks each: {size - own} ranks are left for them; "
            f"run mpirun -np {size - (size - own) % width} or {size + width - (size - own) % width}"
        )


def fixed_ranks(topology: TopologyConfig) -> int:
    """Ranks that are not a generator's."""
    return topology.learners + (topology.rewards if topology.reward == "rank" else 0)


def counts(topology: TopologyConfig, size: int) -> Counts:
    generators = (size - fixed_ranks(topology)) // topology.tensor_parallel
    return Counts(topology.learners, topology.rewards, generators)


def plan(topology: TopologyConfig, hosts: Sequence[str]) -> tuple[RankPlan, ...]:
    """What each rank runs, given the host of each. Raises ConfigError when the ranks do not fit."""
    check_count(topology, len(hosts))
    own = fixed_ranks(topology)
    groups = generator_groups(hosts, first=own, width=topology.tensor_parallel)
    gpu = gpu_of_rank(topology, hosts)
    seats: dict[int, list[ActorId]] = defaultdict(list)
    gpus: dict[int, tuple[int, ...]] = {}
    member_of: dict[int, ActorId] = {}
    for index in range(topology.learners):
        seats[index] = [ActorId(Role.HEAD, 0)] if index == 0 else []
        seats[index].append(ActorId(Role.LEARNER, index))
    for index, group in enumerate(groups):
        seats[group[0]] = [ActorId(Role.GENERATOR, index)]
        gpus[group[0]] = tuple(gpu[rank] for rank in group if rank in gpu)
        member_of |= dict.fromkeys(group[1:], ActorId(Role.GENERATOR, index))
    for index in range(topology.rewards):
        beside = topology.reward == "beside"
        seats[groups[index % len(groups)][0] if beside else topology.learners + index].append(
            ActorId(Role.REWARD, index)
        )
    places = tuple(
        RankPlan(
            rank=rank,
            host=host,
            seats=tuple(seats[rank]),
            gpus=() if rank in member_of else gpus.get(rank, (gpu[rank],) if rank in gpu else ()),
            member_of=member_of.get(rank),
            own_gpu=gpu.get(rank),
        )
        for rank, host in enumerate(hosts)
    )
    check_shared(topology, places)
    return places


def generator_groups(hosts: Sequence[str], *, first: int, width: int) -> list[list[int]]:
    """Ranks from `first` on, in groups of `width` on one host, in order of their first rank."""
    by_host: dict[str, list[int]] = defaultdict(list)
    for rank in range(first, len(hosts)):
        by_host[hosts[rank]].append(rank)
    groups = []
    for host, ranks in by_host.items():
        over = len(ranks) % width
        if over:
            raise ConfigError(
                f"a generator's topology.tensor_parallel = {width} ranks stay on one host: {host} has {len(ranks)} "
                f"ranks for generators; move {over} ranks, or change topology.learners or topology.rewards"
            )
        groups += [ranks[i : i + width] for i in range(0, len(ranks), width)]
    return sorted(groups)


def gpu_of_rank(topology: TopologyConfig, hosts: Sequence[str]) -> dict[int, int]:
    """GPU by rank: a host's ranks take its GPUs in turn, `ranks_per_gpu` times at most; reward ranks own none."""
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
            width = topology.ranks_per_gpu
            rule = (
                "a rank has a GPU of its own" if width == 1 else f"topology.ranks_per_gpu = {width} ranks share a GPU"
            )
            raise ConfigError(
                f"{rule}: host {host} has topology.gpus_per_host = {topology.gpus_per_host} for at least "
                f"{taken[host]} ranks; start fewer ranks there"
            )
    return gpu


def check_shared(topology: TopologyConfig, places: Sequence[RankPlan]) -> None:
    """Raises ConfigError where a GPU would have two ranks that NCCL, or a server, wants on one each."""
    learner_on: dict[tuple[str, int], ActorId] = {}
    for place in places:
        for seat in place.seats:
            if seat.role is Role.LEARNER and place.own_gpu is not None:
                other = learner_on.setdefault((place.host, place.own_gpu), seat)
                if other != seat:
                    raise ConfigError(
                        f"learners compute together, each on a GPU of its own: {other} and {seat} would share GPU "
                        f"{place.own_gpu} of {place.host}; set topology.learners to {topology.gpus_per_host} or fewer "
                        "a host"
                    )
            if seat.role is Role.GENERATOR and len(set(place.gpus)) < len(place.gpus):
                raise ConfigError(
                    f"a generator's topology.tensor_parallel = {topology.tensor_parallel} ranks have a GPU each: "
                    f"{seat} would get GPUs {', '.join(map(str, place.gpus))} of {place.host}; lower "
                    "topology.tensor_parallel, or change topology.learners or topology.generators"
                )


def check_route(config: Config, places: Sequence[RankPlan]) -> None:
    """Raises ConfigError where weights are to be copied out of learner 0's memory and somebody cannot open that."""
    if config.weights.route != "shared":
        return
    on_device = home(config, on_gpu=config.topology.gpus_per_host > 0) == "device"
    root = places[0]
    for place in places:
        for seat in place.seats:
            if seat.role is not Role.GENERATOR:
                continue
            if place.host != root.host:
                elsewhere = f"on {place.host}, learner-0 on {root.host}"
            elif on_device and place.own_gpu != root.own_gpu:
                elsewhere = f"on GPU {place.own_gpu}, learner-0 on GPU {root.own_gpu}"
            else:
                continue
            raise ConfigError(
                f'weights.route = "shared" needs all generators on the host and GPU of learner-0: {seat} is '
                f'{elsewhere}; set weights.route = "auto", or topology.gpus_per_host = 1 with ranks_per_gpu'
            )


def by_gpu(places: Sequence[RankPlan]) -> dict[tuple[str, int], list[RankPlan]]:
    """The ranks of each GPU, by host and number."""
    found: dict[tuple[str, int], list[RankPlan]] = defaultdict(list)
    for place in places:
        if place.own_gpu is not None:
            found[place.host, place.own_gpu].append(place)
    return dict(found)


def dry_hosts(topology: TopologyConfig, size: int) -> list[str]:
    """Host names for a run that is only planned: `ranks_per_host` on each, in order."""
    return [f"host-{rank // topology.ranks_per_host}" for rank in range(size)]


def least_ranks(topology: TopologyConfig) -> int:
    """The smallest number of ranks that this topology takes."""
    return topology.ranks or fixed_ranks(topology) + (topology.generators or 1) * topology.tensor_parallel
