"""Runs one rank: rendezvous, plan, preparation on rank 0, start of this rank's actors, wait for their end."""

import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from actors.runtime.context import Context
from actors.runtime.process import leave
from areal_bus.config.sections import Config
from areal_bus.core.parts.split import Split
from areal_bus.errors import ArealBusError, ConfigError
from areal_bus.messages import Role
from areal_bus.process import parent_death
from areal_bus.process.commands import as_here
from areal_bus.process.isolation import CHILD
from areal_bus.transport.curve import KeyPair, new_pair
from launch.plan.environment import actor_environment
from launch.plan.network import (
    HeadEndpoint,
    HostFacts,
    choose_interfaces,
    describe,
    local_facts,
    named_apart,
    open_endpoint,
    peer_keys,
    transport,
    uses_curve,
)
from launch.plan.seats import all_places, first_split, most_generators, plan_ranks, seat_of
from launch.plan.topology import ActorId, RankPlan, check_gpus, check_route, count_gpus
from launch.run.bootstrap import Bootstrap, RanksMissing, open_bootstrap, rank_and_size
from launch.run.elastic import GUEST_IDENTITY, write_invitation
from launch.run.forked import KEEPS_PLACE
from launch.run.prepare import prepare_in_subprocess
from launch.run.process import block_drain_signal, is_under_mpirun, print_to_mpirun
from launch.run.resume import AUTO, AlreadyFinished, choose_run, exclusive_choice, new_run_line
from launch.run.runs import Lock, PidFile, largest_incarnation, run_name, why_failed, why_refused
from launch.run.supervise import Supervisor

MAX_SENTENCE = 10_000  # characters of a rank's error in the exchange
RANK_0_FIRST_S = 2.0  # the other ranks exit later than rank 0: mpirun ends the job at the first exit


def run_rank(config: Config, file: Path) -> int:
    """Exit code of this rank; 0 when its actors and, with MPI, all other ranks have ended well."""
    block_drain_signal()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    signal.signal(signal.SIGINT, lambda number, _: sys.exit(128 + number))
    try:
        bootstrap, code = start_rank(config, file)
    except SystemExit as ended:  # a signal before the actors started
        if rank_and_size()[0] == 0:
            print_to_mpirun("rank 0: ends at once because of a signal: no actor had started, so nothing is lost")
        leave(int(ended.code or 0))
    if code:
        leave(code)  # without MPI_Finalize, which would wait for the other ranks: mpirun ends the job
    bootstrap.close()
    return 0


def start_rank(config: Config, file: Path) -> tuple[Bootstrap, int]:
    """Meet the other ranks, then run this rank's actors. Exit code, with the bootstrap still open."""
    rank, _ = rank_and_size()
    bootstrap: Bootstrap | None = None
    try:
        bootstrap = open_bootstrap(config.launch)
        key_pair = new_pair()
        reports = [json.loads(part) for part in bootstrap.allgather(own_report(config, rank, key_pair))]
        if failed := next((part for part in reports if "error" in part), None):
            raise RankFailed(failed["error"], failed["code"])
        facts = named_apart([HostFacts(**part["facts"]) for part in reports])
        hosts = [fact.host for fact in facts]
        places = plan_ranks(config.topology, hosts)
        check_route(config, places)
        check_gpus(config.topology.gpus_per_host, hosts, [tuple(part["gpus"]) for part in reports])
        addresses = choose_interfaces(config.bus.interface, facts)
        transport(config.bus, facts)
        if rank == 0 and not config.bus.interface and len(set(hosts)) > 1:
            print(f"bus.interface: {describe(addresses[0], facts)}", flush=True)
    except Exception as error:  # noqa: BLE001  the other ranks end, too, whatever it is
        if bootstrap is not None:
            bootstrap.finish_exchanges()  # sends rank 0's answer first: the other ranks need it to find the same error
        leave(report_error(rank, error, Path(config.run.folder)))
    return bootstrap, run_actors(
        config, file, bootstrap, facts=facts, places=places, addresses=addresses, key_pair=key_pair
    )


class RankFailed(ArealBusError):
    """A rank cannot report its host to the others. All ranks end."""

    def __init__(self, sentence: str, code: int) -> None:
        super().__init__(sentence)
        self.code = code


def own_report(config: Config, rank: int, key_pair: KeyPair) -> bytes:
    """What the other ranks must know of this one: its host and GPUs, or why it cannot start."""
    try:
        gpus = count_gpus() if config.topology.gpus_per_host else (0, "")
        return json.dumps({"facts": asdict(local_facts(key_pair.public)), "gpus": gpus}).encode()
    except Exception as error:  # noqa: BLE001  the other ranks wait for the answer
        why = sentence_of(error, Path(config.run.folder))
        return json.dumps({"error": f"rank {rank}: {why[:MAX_SENTENCE]}", "code": code_of(error)}).encode()


def run_actors(
    config: Config,
    file: Path,
    bootstrap: Bootstrap,
    *,
    facts: Sequence[HostFacts],
    places: Sequence[RankPlan],
    addresses: Sequence[tuple[str, str]],
    key_pair: KeyPair,
) -> int:
    """Start the actors of this rank and wait for them. Exit code."""
    rank, followers = bootstrap.rank, Followers()
    cleanup: list[HeadEndpoint | PidFile] = []  # removed at the end of the job
    supervisor = Supervisor(
        rank=rank,
        launch=config.launch,
        watchdog=config.watchdog,
        at_end=lambda: remove_all(cleanup),
        at_poll=followers.check,
    )
    try:
        hosts = [place.host for place in places]
        answer = prepare_run(config, file, cleanup, facts=facts, address=addresses[0][1]) if rank == 0 else {}
        guest = new_pair()  # for generators that join later; rank 0's is used
        answer |= {"guest": guest.public} | own_answer(config, rank, answer)
        start = exchange(bootstrap, answer)
        if "code" in start:
            time.sleep(RANK_0_FIRST_S if rank else 0)
            return int(start["code"])
        supervisor.run, supervisor.job = Path(start["run_folder"]), start["job"]
        supervisor.waits_for_job = config.launch.bootstrap == "mpi"
        if supervisor.waits_for_job or is_under_mpirun():
            supervisor.n_ranks = len(places) if len(places) > 1 else 0
        is_encrypted = uses_curve(config.bus, facts, addresses)
        split = Split(**start["split"])
        places, peers = plan_ranks(config.topology, hosts, learners=split.learners), all_places(config.topology, hosts)
        supervisor.seat = seat = seat_of(rank, config.topology, hosts)
        parked = None if seat is None else seat.parked(split)
        for plain in actor_contexts(config, file, places[rank], split, addresses[rank], start, parked=parked):
            changes = seat is not None and plain.role in (Role.LEARNER, Role.GENERATOR)
            keyed = with_keys(plain, key_pair, peers, facts, guests=start["guest"], may_sample=changes)
            context = keyed if is_encrypted else plain
            if context.role == Role.HEAD:
                of_a_guest = guest_context(plain, config, len(places))
                write_files(with_keys(of_a_guest, guest, peers, facts) if is_encrypted else of_a_guest, cleanup)
                followers.start(supervisor.run, config.journal.tracker, alarms=config.watch.console)
            if parked is not None and (context.role, context.index) == (parked.role, parked.index):
                supervisor.park(context)
            else:
                supervisor.start(context, places[rank].gpus if context.device == "cuda" else ())
        return supervisor.wait() if supervisor.actors or not parent_death.has_attendant() else KEEPS_PLACE
    except ArealBusError as error:  # a rank is missing: each rank names those that it waits for
        print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
        supervisor.end()
        return 1
    finally:
        remove_all(cleanup)
        followers.end()


def write_files(guest: Context, cleanup: list[HeadEndpoint | PidFile]) -> None:
    """RUN/join.json and RUN/pid. A run goes on without them: the other ranks have started by now."""
    try:
        cleanup.append(PidFile(guest.folder))
        write_invitation(guest)
    except OSError as error:
        print(f"warning: no guest can join and {guest.folder}/pid is missing: {error}", file=sys.stderr, flush=True)


def exchange(bootstrap: Bootstrap, answer: dict[str, Any]) -> dict[str, Any]:
    """The last exchange of the ranks: what rank 0 has prepared, with the next incarnation of every actor."""
    answers = [json.loads(part) for part in bootstrap.allgather(json.dumps(answer).encode())]
    bootstrap.finish_exchanges()
    start: dict[str, Any] = answers[0]
    if codes := [part["code"] for part in answers if "code" in part]:
        start["code"] = codes[0]
    if "code" not in start:
        start["incarnation"] = 1 + max(part["incarnations"] for part in answers) if start["resumed"] else 0
    return start


def guest_context(head: Context, config: Config, n_ranks: int) -> Context:
    """The Context of a generator that joins the running job, from that of the head."""
    return replace(
        head,
        role=str(Role.GENERATOR),
        rank=n_ranks,
        device="cuda" if config.topology.gpus_per_host else "cpu",
        n_generators=most_generators(config.topology, n_ranks),
        split=0,
    )


def journal_folders(config: Config, start: dict[str, Any]) -> list[Path]:
    """Journal folders that this rank can read. A node-local journal.dir is visible on its node only."""
    run_rank = [Path(start["run_folder"]) / "journal"] if "run_folder" in start else []
    return [*run_rank, *([Path(config.journal.dir)] if config.journal.dir else [])]


def prepare_run(
    config: Config, file: Path, cleanup: list[HeadEndpoint | PidFile], *, facts: Sequence[HostFacts], address: str
) -> dict[str, Any]:
    """Rank 0 prepares the run and sends all ranks run and endpoint, or the exit code. It holds the run's lock."""
    try:
        endpoint = open_endpoint(config.bus, facts, address)
        cleanup.append(endpoint)
        name = run_name(config, file)
        with exclusive_choice(config, name):
            chosen = choose_run(config, name)
            made = prepare_in_subprocess(config, file, chosen[0] if chosen else None)
            if chosen is None:
                Lock(Path(made.run_folder))
        for line in (new_run_line(config, name),) if config.run.resume == AUTO and chosen is None else made.notes:
            print(line, flush=True)
        split = first_split(config, Path(made.run_folder), len(facts))
        return asdict(made) | {"split": split, "job": uuid.uuid4().hex[:12], "head": endpoint.url}
    except AlreadyFinished as done:
        print(done, flush=True)
        return {"code": 0}
    except Exception as error:  # noqa: BLE001  the other ranks wait for the answer
        return {"code": report_error(0, error, Path(config.run.folder))}


def own_answer(config: Config, rank: int, answer: dict[str, Any]) -> dict[str, Any]:
    """What this rank adds to the last exchange; with "code" if it cannot, which ends all ranks."""
    try:
        return {"incarnations": largest_incarnation(journal_folders(config, answer))}
    except Exception as error:  # noqa: BLE001  the other ranks wait for the answer
        print(f"rank {rank}: error: {sentence_of(error, Path(config.run.folder))}", file=sys.stderr, flush=True)
        return {"incarnations": 0, "code": 1}


def actor_contexts(
    config: Config,
    file: Path,
    place: RankPlan,
    split: Split,
    address: tuple[str, str],
    start: dict[str, Any],
    *,
    parked: ActorId | None = None,
) -> list[Context]:
    """The Context of each actor of this rank, and of the one that it runs in other splits only."""
    on_gpu = (
        {Role.LEARNER, Role.GENERATOR} if place.gpus or (parked is not None and place.own_gpu is not None) else set()
    )
    return [
        Context(
            role=str(actor.role),
            index=actor.index,
            incarnation=start["incarnation"],
            rank=place.rank,
            job=start["job"],
            head=start["head"],
            address=address[1],
            interface=address[0],
            device="cuda" if actor.role in on_gpu else "cpu",
            n_generators=split.generators,
            n_rewards=config.topology.rewards,
            n_learners=split.learners,
            split=split.number,
            run_folder=start["run_folder"],
            config_folder=str(file.resolve().parent),
            model_folder=start["model_folder"],
            lease_secret=secrets.token_hex(16) if actor.role == Role.HEAD else "",
        )
        for actor in (*place.actors, *([parked] if parked is not None else []))
    ]


def with_keys(
    context: Context,
    key_pair: KeyPair,
    places: Sequence[RankPlan],
    facts: Sequence[HostFacts],
    *,
    guests: str = "",
    may_sample: bool = False,
) -> Context:
    """Add this rank's keys and its peers' public keys; `guests`: of late joiners; `may_sample`: may change."""
    role = Role.GENERATOR if may_sample else Role(context.role)
    keys = peer_keys(ActorId(role, context.index), places, facts)
    if guests and context.role in (Role.HEAD, Role.REWARD):
        keys[GUEST_IDENTITY] = guests
    return replace(context, public_key=key_pair.public, secret_key=key_pair.secret, keys=keys)


def report_error(rank: int, error: Exception, folder: Path = Path(), *, wait_s: float = RANK_0_FIRST_S) -> int:
    """Print the error on rank 0; others wait. Exit code: 2 for invalid input, else 1. `folder`: for its traceback."""
    if rank == 0:
        print(f"error: {sentence_of(error, folder)}", file=sys.stderr, flush=True)
    elif isinstance(error, RanksMissing):  # without mpirun; the missing rank may be rank 0
        time.sleep(wait_s)
        print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
    elif isinstance(error, ArealBusError):  # rank 0 has it, too
        time.sleep(wait_s)
    else:
        print(f"rank {rank}: error: {sentence_of(error, folder)}", file=sys.stderr, flush=True)
    return code_of(error)


def sentence_of(error: Exception, folder: Path) -> str:
    """An error of the start in one sentence. An unexpected one has its traceback in run.folder."""
    if isinstance(error, ArealBusError):
        return str(error)
    return why_refused(error) if isinstance(error, OSError) else why_failed(error, folder)


def code_of(error: Exception) -> int:
    """Exit code of a start that ends with this error."""
    if isinstance(error, RankFailed):
        return error.code
    return 2 if isinstance(error, ConfigError) else 1


def remove_all(cleanup: Sequence[HeadEndpoint | PidFile]) -> None:
    for item in cleanup:
        item.remove()


ENDS_S = 10.0  # at the end of the job, for a tracker's last rows and an upload; a slower one continues after it
ALARMS = "alarms"


@dataclass(slots=True)
class Followers:
    """Processes beside a job that read its journal (trackers, alarms). Their end or death changes nothing else."""

    run: Path = Path("/nowhere")
    command: Sequence[str] = (*CHILD, "tools.export")  # of a tracker
    _processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def start(self, run: Path, trackers: Sequence[str], *, alarms: bool = False) -> None:
        """Start a process for each tracker, and one that prints alarms. One that cannot start is reported."""
        self.run = run
        for name in trackers:
            self._start(name, [*self.command, str(run), "--to", name, "--until-eof"])
        if alarms:
            self._start(ALARMS, [*CHILD, "tools.alarms", str(run), "--until-eof"])

    def _start(self, name: str, command: Sequence[str]) -> None:
        """In its own session. Alarms are printed where this rank prints; the rest is logged."""
        try:
            self.log(name).parent.mkdir(exist_ok=True)
            with self.log(name).open("ab") as log:
                self._processes[name] = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=None if name == ALARMS else log,
                    stderr=log,
                    env=actor_environment(os.environ, gpus=(), cpu=True),
                    start_new_session=True,
                )
        except OSError as error:
            self._report(name, f"did not start: {error}")

    def check(self) -> None:
        """Report those that have died since the last call."""
        for name, process in list(self._processes.items()):
            if process.poll() is not None:
                self._forget(name)
                self._report(name, f"ended with exit code {process.returncode} ({self.log(name)})")

    def end(self) -> None:
        """Let them write the last lines of the journal. Call this after the last actor has ended."""
        self.check()
        ending = dict(self._processes)
        for name in ending:
            self._forget(name)
        deadline = time.monotonic() + ENDS_S
        for name, process in ending.items():
            try:
                code = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                title = self._title(name)
                print(f"{title}: still writes after {ENDS_S:g} s and goes on alone", file=sys.stderr, flush=True)
                continue
            if code:
                self._report(name, f"ended with exit code {code} ({self.log(name)})")

    def _forget(self, name: str) -> None:
        """Close its standard input, which ends it."""
        stdin = self._processes.pop(name).stdin
        if stdin is not None:
            stdin.close()

    def log(self, name: str) -> Path:
        """The file that gets its output."""
        return self.run / "logs" / ("alarms.txt" if name == ALARMS else f"tracker-{name.replace(':', '-')}.txt")

    @staticmethod
    def _title(name: str) -> str:
        return name if name == ALARMS else f"tracker {name}"

    def _report(self, name: str, what: str) -> None:
        again = f"python -m tools.alarms {shlex.quote(str(self.run))} prints them"
        if name != ALARMS:
            again = f"python -m tools.export {shlex.quote(str(self.run))} --to {name} writes it later"
        print(f"{self._title(name)}: {what}; the job goes on, and {as_here(again)}", file=sys.stderr, flush=True)
