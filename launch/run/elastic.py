"""Elastic join: a generator from outside mpirun joins a running job by the invitation in its folder, and leaves."""

import ipaddress
import json
import os
import re
import shlex
import socket
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_type_hints

from actors.runtime.context import Context
from areal_bus.config.sections import RunConfig
from areal_bus.errors import ConfigError
from areal_bus.messages import Role
from areal_bus.storage.atomic_file import write_atomic
from areal_bus.storage.machine import machine
from launch.plan.environment import VISIBLE_DEVICES
from launch.plan.network import choose_interfaces, local_facts, toward
from launch.run.job_end import summary_exists
from launch.run.resume import saved_config
from launch.run.runs import CONFIG, is_locked, why_no_run
from launch.run.supervise import Supervisor

INVITATION = "join.json"
GUESTS_FOLDER = "guests"  # RUN/guests/N exists when a guest has claimed the index of generator-N
ENDPOINT = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]*]+):(?P<port>[0-9]{1,5})|ipc://(?P<path>/\S+)")
FORMS = f'tcp://HOST:PORT or ipc:///PATH ("head" in RUN/{INVITATION})'
GUEST_IDENTITY = f"{Role.GENERATOR}-*"


def write_invitation(context: Context) -> None:
    """Write RUN/join.json, mode 0600: a guest's Context with the guests' keys, without the head's secret."""
    fields = asdict(replace(context, lease_secret="")) | {"host": socket.gethostname(), "machine": machine()}
    write_atomic(context.folder / INVITATION, json.dumps(fields) + "\n", mode=0o600)


def join_job(where: str, key: str | None) -> int:
    """Run one more generator until the job is over or a signal asks it to leave. Exit code. Raises ConfigError.

    `where`: the run's folder, or the head's endpoint. `key`: the invitation file, needed with an endpoint.
    """
    fields = load_invitation(where, key)
    check_endpoint(fields["head"])
    context = guest_context(fields)
    config = context.config()
    supervisor = Supervisor(rank=context.rank, launch=config.launch, is_guest=True)
    supervisor.run, supervisor.job = context.folder, context.job
    print(f"joins {context.folder} as {context.role}-{context.index}; SIGUSR1 or Ctrl-C makes it leave", flush=True)
    supervisor.start(context, first_visible_gpu())
    return supervisor.wait()


def load_invitation(where: str, key: str | None) -> dict[str, Any]:
    """The fields of the invitation; `head` is the given endpoint if there is one. Raises ConfigError."""
    is_url = "://" in where
    if not is_url and not Path(where).is_dir():
        what = f"the folder of a running job, or its head's endpoint, {FORMS}"
        raise ConfigError(f"--join takes {what}: {why_no_run(where, RunConfig().folder)}")
    if is_url:
        check_endpoint(where)
    if is_url and key is None:
        example = f"--key RUN/{INVITATION}, for example runs/latest/{INVITATION}"
        what = "the invitation in the run's folder"
        raise ConfigError(f"--join {where} needs --key, {what}: {example}; or give the folder alone: --join RUN")
    if key is None and not (Path(where) / CONFIG).is_file():
        raise ConfigError(f"--join takes the folder of a run: {why_no_run(where, RunConfig().folder)}")
    fields = parse_invitation(Path(key) if key is not None else Path(where) / INVITATION)
    return fields | {"head": where} if is_url else fields


def check_endpoint(url: str) -> None:
    """Raises ConfigError for an endpoint at which no head can listen."""
    found = ENDPOINT.fullmatch(url)
    if found is None or (found["port"] and not 1 <= int(found["port"]) <= 65535):
        raise ConfigError(f"the head's endpoint must be {FORMS}: got {url!r}")
    if found["host"] and is_unspecified(found["host"].strip("[]")):
        raise ConfigError(f"a guest needs the address of one host: {url} means all addresses of a host")
    if found["host"] and found["host"].startswith("["):
        raise ConfigError(f"IPv6 is not supported: {url}; give the IPv4 address or the name of the head's host")
    if found["path"] and not Path(found["path"]).is_socket():
        raise ConfigError(f"no head listens at {url}: only a running job can be joined")
    try:
        if found["host"]:
            socket.getaddrinfo(found["host"], int(found["port"]), socket.AF_INET)
    except OSError as error:
        raise ConfigError(f"--join needs a host name that resolves here: {url}: {error.strerror}") from None


def is_unspecified(host: str) -> bool:
    """Whether it is 0.0.0.0 (also written 0) or ::. A server listens on these; a client cannot connect to them."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a host name
        return host.isdecimal() and int(host) == 0


def parse_invitation(path: Path) -> dict[str, Any]:
    """The fields of an invitation. Raises ConfigError when one is missing, unknown or of another type."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise ConfigError(f"--join takes the {INVITATION} of a running job: {path}: {why}") from None
    fault = "it holds no JSON object" if not isinstance(fields, dict) else first_fault(fields)
    if fault:
        raise ConfigError(f"--join takes the unchanged {INVITATION} of a running job: {path}: {fault}")
    return dict(fields)


def first_fault(fields: dict[str, Any]) -> str:
    """The first missing, unknown or wrong field of an invitation, in words; "" for none."""
    wanted = {"host": str, "machine": str} | get_type_hints(Context)
    for name, kind in wanted.items():
        if name not in fields:
            return f"{name} is missing"
        value = fields[name]
        if kind == dict[str, str]:
            if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
                return f"{name} must be an object of strings: got {type(value).__name__}"
        elif type(value) is not kind:
            return f"{name} must be of type {kind.__name__}: got {type(value).__name__}"
        elif kind is int and value < 0:
            return f"{name} must not be negative: got {value}"
    unknown = sorted(fields.keys() - wanted.keys())
    return f"{unknown[0]} is an unknown field" if unknown else ""


def guest_context(fields: dict[str, Any]) -> Context:
    """The Context of this guest. Raises ConfigError when it cannot join."""
    host, is_same = fields.pop("host"), fields.pop("machine") == machine()
    run = Path(fields["run_folder"])
    if not run.is_dir():
        raise ConfigError(f"missing run folder {run} on this host: a guest must see it under the job's path")
    if summary_exists(run, fields["job"]):
        raise ConfigError(f"the job of {run} has ended: only a running job can be joined")
    if is_same and is_locked(run) is False:
        other = f"--resume {shlex.quote(str(run))} continues it"
        raise ConfigError(f"the job of {run} is not running: only a running job can be joined ({other})")
    if fields["head"].startswith("ipc://") and not is_same:
        raise ConfigError(f'a guest on another host needs bus.transport = "tcp": the job uses ipc on {host}')
    config = saved_config(run)
    if config.rollout.max_head_offpolicyness == 0:
        rule = "a guest needs rollout.max_head_offpolicyness of 1 or more"
        raise ConfigError(f"{rule}: at 0 each generator's share is fixed")
    is_chosen = config.bus.interface or fields["head"].startswith("ipc://")
    facts = local_facts()
    name, address = choose_interfaces(config.bus.interface, [facts])[0] if is_chosen else toward(fields["head"], facts)
    index = claim_index(run, fields["n_generators"])
    own = {"index": index, "incarnation": 0, "rank": fields["rank"] + index, "interface": name, "address": address}
    return Context(**(fields | own | {"is_guest": True}))


def claim_index(run: Path, n_generators: int) -> int:
    """Claim a generator index that was never used in this run. The job's own generators have the first ones."""
    folder = run / GUESTS_FOLDER
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


def first_visible_gpu() -> list[int]:
    """[0], the first GPU of CUDA_VISIBLE_DEVICES; [] when that names none, for a guest on CPU."""
    first = os.environ.get(VISIBLE_DEVICES, "").split(",")[0].strip()
    return [0] if first and first != "-1" else []
