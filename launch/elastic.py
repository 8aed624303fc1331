"""A generator joins a running job from outside, and leaves it again: by the invitation that lies in the run's folder.

Knows nothing of MPI: the guest is a supervisor of its own, started by hand or by a scheduler with machines to spare.
"""

import ipaddress
import json
import os
import re
import socket
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_type_hints

from actors.runtime.context import Context
from areal_bus.config.sections import RunConfig
from areal_bus.errors import ConfigError
from areal_bus.messages import Role
from launch.network import choose, here
from launch.process import VISIBLE
from launch.resume import saved
from launch.runs import CONFIG, SUMMARY, is_held, no_run
from launch.supervise import Supervisor

INVITATION = "join.json"
GUESTS = "guests"  # RUN/guests/N: the guest that is generator-N
ENDPOINT = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]*]+):(?P<port>[0-9]{1,5})|ipc://(?P<path>/\S+)")
GUEST_SEAT = f"{Role.GENERATOR}-*"


def invite(context: Context) -> None:
    """Write RUN/join.json, mode 0600: what a guest needs to be a generator of this job, its key pair included.

    `context` is that of any generator of the job, with a guest's keys; a secret of the head's is left out.
    """
    about = asdict(replace(context, lease_secret="")) | {"host": socket.gethostname()}
    path = context.folder / INVITATION
    fresh = path.with_name(f".{path.name}.tmp")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(json.dumps(about) + "\n")
    fresh.replace(path)


def join(where: str, key: str | None) -> int:
    """Be one more generator until the job is over or a signal says to leave. Exit code. Raises ConfigError.

    `where` is the run's folder, or the head's endpoint; `key` the invitation, which lies in that folder.
    """
    about = invitation(where, key)
    check_endpoint(about["head"])
    context = guest(about)
    config = context.config()
    supervisor = Supervisor(rank=context.rank, launch=config.launch, is_guest=True)
    supervisor.run = context.folder
    print(f"joins {context.folder} as {context.role}-{context.index}; SIGUSR1 or Ctrl-C: it leaves", flush=True)
    supervisor.start(context, gpus())
    return supervisor.wait()


def invitation(where: str, key: str | None) -> dict[str, Any]:
    """What the invitation says, with the endpoint that was given. Raises ConfigError."""
    is_url = "://" in where
    if not is_url and not Path(where).is_dir():
        raise ConfigError(
            f"--join takes the folder of a running job, or its head's endpoint, tcp://HOST:PORT or ipc:///PATH (as "
            f'"head" in RUN/{INVITATION} has it): {no_run(where, RunConfig().folder)}'
        )
    if is_url:
        check_endpoint(where)
    if is_url and key is None:
        raise ConfigError(
            f"--join {where} needs --key, the invitation that the job wrote into its run's folder: --key "
            f"RUN/{INVITATION}, for example runs/latest/{INVITATION}; or give the folder alone: --join RUN"
        )
    if key is None and not (Path(where) / CONFIG).is_file():
        raise ConfigError(f"--join takes the folder of a run: {no_run(where, RunConfig().folder)}")
    about = read(Path(key) if key is not None else Path(where) / INVITATION)
    return about | {"head": where} if is_url else about


def check_endpoint(url: str) -> None:
    """Raises ConfigError for one that no head can listen at."""
    found = ENDPOINT.fullmatch(url)
    if found is None or (found["port"] and not 1 <= int(found["port"]) <= 65535):
        raise ConfigError(
            f'the head\'s endpoint looks like tcp://HOST:PORT or ipc:///PATH, as "head" in RUN/{INVITATION} has it: '
            f"got {url!r}"
        )
    if found["host"] and is_unspecified(found["host"].strip("[]")):
        raise ConfigError(f"a guest needs the address of one host: {url} stands for all of a host's own")
    if found["path"] and not Path(found["path"]).is_socket():
        raise ConfigError(f"only a running job can be joined: no head listens at {url}")
    try:
        if found["host"]:
            socket.getaddrinfo(found["host"].strip("[]"), int(found["port"]))
    except OSError as error:
        raise ConfigError(f"--join needs a host that is known here: {url}: {error.strerror}") from None


def is_unspecified(host: str) -> bool:
    """0.0.0.0, also as 0, and ::, where one can listen but nobody can be."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a name
        return host.isdecimal() and int(host) == 0


def read(path: Path) -> dict[str, Any]:
    """Raises ConfigError for what is no invitation: each field is there, is of its type, and stands alone."""
    try:
        about = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no invitation"
        raise ConfigError(f"--join takes the {INVITATION} of a running job: {path}: {why}") from None
    wrong = "it holds no JSON object" if not isinstance(about, dict) else what_is_wrong(about)
    if wrong:
        raise ConfigError(f"--join takes the {INVITATION} of a running job, as that wrote it: {path}: {wrong}")
    return dict(about)


def what_is_wrong(about: dict[str, Any]) -> str:
    """The first field of an invitation that is not as it should be; "" when all are."""
    wanted = {"host": str} | get_type_hints(Context)
    for name, kind in wanted.items():
        if name not in about:
            return f"{name} is missing"
        value = about[name]
        if kind == dict[str, str]:
            if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
                return f"{name} must be an object of texts: got {type(value).__name__}"
        elif type(value) is not kind:
            return f"{name} must be of type {kind.__name__}: got {type(value).__name__}"
        elif kind is int and value < 0:
            return f"{name} must not be negative: got {value}"
    over = sorted(about.keys() - wanted.keys())
    return f"{over[0]} is no field of it" if over else ""


def guest(about: dict[str, Any]) -> Context:
    """This guest's own Context. Raises ConfigError when it cannot join."""
    host = about.pop("host")
    run = Path(about["run_folder"])
    if not run.is_dir():
        raise ConfigError(f"a guest sees the run's folder as the job does: {run} is not there")
    if (run / SUMMARY).exists():
        raise ConfigError(f"only a running job can be joined: {run} has ended")
    if host == socket.gethostname() and is_held(run) is False:
        raise ConfigError(
            f"only a running job can be joined: that of {run} does not run (--resume {run} goes on with it)"
        )
    if about["head"].startswith("ipc://") and host != socket.gethostname():
        raise ConfigError(f'the job is on {host} alone: to be joined from elsewhere it needs bus.transport = "tcp"')
    config = saved(run)
    if config.rollout.max_head_offpolicyness == 0:
        raise ConfigError("at rollout.max_head_offpolicyness = 0 the generators' shares are fixed: nobody can join")
    name, address = choose(config.bus.interface, [here()])[0]
    index = seat(run, about["n_generators"])
    own = {"index": index, "incarnation": 0, "rank": about["rank"] + index, "interface": name, "address": address}
    return Context(**(about | own | {"is_guest": True}))


def seat(run: Path, n_generators: int) -> int:
    """A generator's number that nobody has or had: those of the job's own come first."""
    folder = run / GUESTS
    folder.mkdir(exist_ok=True)
    taken = [int(path.name) for path in folder.iterdir() if path.name.isdecimal()]
    index = max([n_generators - 1, *taken]) + 1
    while True:
        try:
            os.close(os.open(folder / str(index), os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            index += 1
            continue
        return index


def gpus() -> list[int]:
    """The first of the GPUs that the starter lets us see; none where it names none, which is on CPU."""
    first = os.environ.get(VISIBLE, "").split(",")[0].strip()
    return [0] if first and first != "-1" else []
