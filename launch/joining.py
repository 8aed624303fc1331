"""A generator joins a running job from outside, and leaves it again: by the invitation that lies in the run's folder.

Knows nothing of MPI: the guest is a supervisor of its own, started by hand or by a scheduler with machines to spare.
"""

import json
import os
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

from actors.context import Context
from areal_bus.errors import ConfigError
from areal_bus.messages import Role
from launch.interfaces import choose, here
from launch.runs import SUMMARY
from launch.supervise import Supervisor

INVITATION = "join.json"
GUESTS = "guests"  # RUN/guests/N: the guest that is generator-N
GUEST_SEAT = f"{Role.GENERATOR}-*"


def invite(context: Context) -> None:
    """Write RUN/join.json, mode 0600: what a guest needs to be a generator of this job, its key pair included.

    `context` is that of any generator of the job, with a guest's keys.
    """
    about = asdict(context) | {"host": socket.gethostname()}
    path = context.folder / INVITATION
    fresh = path.with_name(f".{path.name}.tmp")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(json.dumps(about) + "\n")
    fresh.replace(path)


def join(endpoint: str, key: str | None) -> int:
    """Be one more generator until the job is over or a signal says to leave. Exit code. Raises ConfigError.

    `endpoint` is the head's, or the run's folder; `key` the invitation, which lies there.
    """
    invitation = Path(key) if key else Path(endpoint) / INVITATION
    about = read(invitation)
    if not Path(endpoint).is_dir():
        if "://" not in endpoint:
            raise ConfigError(f"--join takes the head's endpoint or the folder of a run: {endpoint!r} is neither")
        about["head"] = endpoint
    context = guest(about)
    config = context.config()
    supervisor = Supervisor(rank=context.rank, launch=config.launch, is_guest=True)
    supervisor.run = context.folder
    print(f"joins {context.folder} as {context.role}-{context.index}; SIGUSR1 or Ctrl-C: it leaves", flush=True)
    supervisor.start(context, gpus())
    return supervisor.wait()


def read(invitation: Path) -> dict[str, Any]:
    """Raises ConfigError for what is no invitation."""
    try:
        about = json.loads(invitation.read_text())
        Context(**{name: value for name, value in about.items() if name != "host"})
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"--join takes the {INVITATION} of a running job: {invitation}: {error}") from None
    return dict(about)


def guest(about: dict[str, Any]) -> Context:
    """This guest's own Context. Raises ConfigError when it cannot join."""
    host = about.pop("host")
    run = Path(about["run_folder"])
    if not run.is_dir():
        raise ConfigError(f"a guest sees the run's folder as the job does: {run} is not there")
    if (run / SUMMARY).exists():
        raise ConfigError(f"only a running job can be joined: {run} has ended")
    if about["head"].startswith("ipc://") and host != socket.gethostname():
        raise ConfigError(f'the job is on {host} alone: to be joined from elsewhere it needs bus.transport = "tcp"')
    config = Context(**about).config()
    if config.rollout.max_head_offpolicyness == 0:
        raise ConfigError("at rollout.max_head_offpolicyness = 0 the generators' shares are fixed: nobody can join")
    name, address = choose(config.bus.interface, [here()])[0]
    index = seat(run, about["n_generators"])
    own = {"index": index, "incarnation": 0, "rank": about["rank"] + index, "interface": name, "address": address}
    return Context(**(about | own))


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
    """The first GPU that is visible here; none on CPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return [int(number) for number in visible.split(",")[:1] if number.strip().isdecimal()]
