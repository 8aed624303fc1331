"""One rank's life: meet the others, plan, let rank 0 prepare, start this rank's actors, wait for them."""

import json
import secrets
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from actors.runtime.context import Context
from actors.runtime.process import leave
from areal_bus.config.sections import Config
from areal_bus.errors import ArealBusError, ConfigError
from areal_bus.messages import Role
from areal_bus.transport.curve import KeyPair, new_pair
from launch import process as lastwords
from launch.bootstrap import Bootstrap, Missing, open_bootstrap, rank_and_size
from launch.elastic import GUEST_SEAT, invite
from launch.gpus import check_gpus, count_gpus
from launch.network import HeadEndpoint, HostFacts, choose, here, keys_for, open_endpoint, transport, wants_curve
from launch.prepare import prepare_apart
from launch.process import hold_back
from launch.resume import AUTO, NothingLeft, choose_run, nothing, one_by_one
from launch.runs import Lock, PidFile, largest_incarnation
from launch.supervise import Supervisor
from launch.topology import ActorId, RankPlan, check_route, counts, plan

SPEAK_FIRST_S = 2.0


def run(config: Config, file: Path) -> int:
    """Exit code of this rank; 0 when its actors and, with MPI, all other ranks have ended well."""
    hold_back()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    signal.signal(signal.SIGINT, lambda number, _: sys.exit(128 + number))
    try:
        bootstrap, code = join(config, file)
    except SystemExit as ended:  # a signal before there was anything to wait for
        if rank_and_size()[0] == 0:
            lastwords.say("rank 0: ends at once, as a signal asked: no actor had started, so nothing is lost")
        leave(int(ended.code or 0))
    if code:
        leave(code)  # without MPI_Finalize, which would wait for the others: so mpirun ends the job
    bootstrap.close()
    return 0


def join(config: Config, file: Path) -> tuple[Bootstrap, int]:
    """Meet the other ranks, then run this rank's actors. Exit code, with the bootstrap still open."""
    rank, _ = rank_and_size()
    bootstrap: Bootstrap | None = None
    try:
        bootstrap = open_bootstrap(config.launch)
        pair = new_pair()
        gpus = count_gpus() if config.topology.gpus_per_host else (0, "")
        mine = json.dumps({"facts": asdict(here(pair.public)), "gpus": gpus}).encode()
        told = [json.loads(part) for part in bootstrap.allgather(mine)]
        facts = [HostFacts(**part["facts"]) for part in told]
        hosts = [fact.host for fact in facts]
        places = plan(config.topology, hosts)
        check_route(config, places)
        check_gpus(config.topology.gpus_per_host, hosts, [tuple(part["gpus"]) for part in told])
        addresses = choose(config.bus.interface, facts)
        transport(config.bus, facts)
    except ArealBusError as error:
        if bootstrap is not None:
            bootstrap.rest()  # waits until the others have rank 0's answer: without it they cannot refuse, too
        leave(refuse(rank, error))
    return bootstrap, play(config, file, bootstrap, facts=facts, places=places, addresses=addresses, pair=pair)


def play(
    config: Config,
    file: Path,
    bootstrap: Bootstrap,
    *,
    facts: Sequence[HostFacts],
    places: Sequence[RankPlan],
    addresses: Sequence[tuple[str, str]],
    pair: KeyPair,
) -> int:
    """Start the actors of this rank and wait for them. Exit code."""
    rank = bootstrap.rank
    traces: list[HeadEndpoint | PidFile] = []  # that must not outlive the job
    supervisor = Supervisor(rank=rank, launch=config.launch, watchdog=config.watchdog, at_end=lambda: remove(traces))
    try:
        answer = prepared(config, file, traces, facts=facts, address=addresses[0][1]) if rank == 0 else {}
        guest = new_pair()  # rank 0's counts: of generators that join later
        answer |= {"guest": guest.public}
        answer["incarnations"] = largest_incarnation(journals(config, answer))
        answers = [json.loads(part) for part in bootstrap.allgather(json.dumps(answer).encode())]
        bootstrap.rest()
        start = answers[0]
        if "code" in start:
            time.sleep(SPEAK_FIRST_S if rank else 0)
            return int(start["code"])
        start["incarnation"] = 1 + max(part["incarnations"] for part in answers) if start["resumed"] else 0
        supervisor.run = Path(start["run_folder"])
        supervisor.stays = config.launch.bootstrap == "mpi"
        supervisor.n_ranks = len(places) if supervisor.stays and len(places) > 1 else 0
        is_encrypted = wants_curve(config.bus, facts, addresses)
        for plain in contexts(config, file, places[rank], len(places), addresses[rank], start):
            context = with_keys(plain, pair, places, facts, guests=start["guest"]) if is_encrypted else plain
            if context.role == Role.HEAD:
                device = "cuda" if config.topology.gpus_per_host else "cpu"
                of_a_guest = replace(plain, role=str(Role.GENERATOR), rank=len(places), device=device)
                invite(with_keys(of_a_guest, guest, places, facts) if is_encrypted else of_a_guest)
                traces.append(PidFile(supervisor.run))
            supervisor.start(context, places[rank].gpus if context.device == "cuda" else ())
        return supervisor.wait()
    except ArealBusError as error:  # a rank did not come: each rank names whom it misses
        print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
        supervisor.end()
        return 1
    finally:
        remove(traces)


def journals(config: Config, start: dict[str, Any]) -> list[Path]:
    """Folders of the run's journal that this rank can see; one of its own node is seen from there alone."""
    run = [Path(start["run_folder"]) / "journal"] if "run_folder" in start else []
    return [*run, *([Path(config.journal.dir)] if config.journal.dir else [])]


def prepared(
    config: Config, file: Path, traces: list[HeadEndpoint | PidFile], *, facts: Sequence[HostFacts], address: str
) -> dict[str, Any]:
    """Rank 0's part, as what all ranks need to know: the run and the head's endpoint, or the exit code.

    The endpoint is put into `traces` as soon as it is there, so that it goes away whatever comes. The run is locked
    from here to the end of this process.
    """
    try:
        endpoint = open_endpoint(config.bus, facts, address)
        traces.append(endpoint)
        name = config.run.name or file.stem
        with one_by_one(config, name):
            chosen = choose_run(config, name)
            made = prepare_apart(config, file, chosen[0] if chosen else None)
            if chosen is None:
                Lock(Path(made.run_folder))
        for line in (nothing(config, name),) if config.run.resume == AUTO and chosen is None else made.notes:
            print(line, flush=True)
        return asdict(made) | {"job": uuid.uuid4().hex[:12], "head": endpoint.url}
    except NothingLeft as done:
        print(done, flush=True)
        return {"code": 0}
    except ArealBusError as error:
        return {"code": refuse(0, error)}


def contexts(
    config: Config, file: Path, place: RankPlan, size: int, address: tuple[str, str], start: dict[str, Any]
) -> list[Context]:
    """What each actor of this rank is told."""
    n = counts(config.topology, size)
    on_gpu = {Role.LEARNER, Role.GENERATOR} if place.gpus else set()
    return [
        Context(
            role=str(seat.role),
            index=seat.index,
            incarnation=start["incarnation"],
            rank=place.rank,
            job=start["job"],
            head=start["head"],
            address=address[1],
            interface=address[0],
            device="cuda" if seat.role in on_gpu else "cpu",
            n_generators=n.generators,
            n_rewards=n.rewards,
            n_learners=n.learners,
            run_folder=start["run_folder"],
            config_folder=str(file.resolve().parent),
            model_folder=start["model_folder"],
            lease_secret=secrets.token_hex(16) if seat.role == Role.HEAD else "",
        )
        for seat in place.seats
    ]


def with_keys(
    context: Context, pair: KeyPair, places: Sequence[RankPlan], facts: Sequence[HostFacts], *, guests: str = ""
) -> Context:
    """With its rank's keys, and the public ones of those it talks to; `guests`: that of generators that join later."""
    keys = keys_for(ActorId(Role(context.role), context.index), places, facts)
    if guests and context.role in (Role.HEAD, Role.REWARD):
        keys[GUEST_SEAT] = guests
    return replace(context, public_key=pair.public, secret_key=pair.secret, keys=keys)


def refuse(rank: int, error: ArealBusError) -> int:
    """One sentence, by rank 0 alone; 2 for the user's input, 1 for anything else."""
    if rank == 0:
        print(f"error: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(SPEAK_FIRST_S)  # mpirun ends all at the first exit: that must be the rank that spoke
        if isinstance(error, Missing):  # without mpirun; it may be rank 0 that did not come
            print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
    return 2 if isinstance(error, ConfigError) else 1


def remove(traces: Sequence[HeadEndpoint | PidFile]) -> None:
    for trace in traces:
        trace.remove()
