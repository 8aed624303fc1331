"""`areal-bus serve CONFIG.toml -np N`: serves the Tinker API with one trainer and N - 1 samplers, until Ctrl-C.

This process starts the front and starts it again when it ends; the front starts the others.
"""

import argparse
import contextlib
import ipaddress
import json
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from actors.models.scratch import write_scratch_folder
from areal_bus.config.sections import Config, TopologyConfig
from areal_bus.errors import ConfigError
from areal_bus.process import standard_streams
from areal_bus.process.commands import SCRIPT
from areal_bus.process.isolation import CHILD, child_path
from areal_bus.storage.atomic_file import write_atomic
from areal_bus.transport.web_server import HOST
from areal_serve.process import GAVE_UP, KEY, QUIET
from launch.checks.model_checks import check_model
from launch.commands.local_job import attend
from launch.commands.main import load_settings
from launch.plan.network import find_interface, local_facts
from launch.run.runs import CONFIG, ORIGIN, Lock, create_numbered_folder, run_name, why_no_run

SHORT_S = 10.0  # a front that ends so soon has not served
MOST_SHORT = 3
PAGE = "docs/tinker.md"
EPILOG = f"""\
It prints two lines when it is ready. Set them in the environment of your program (pip install tinker):

  TINKER_BASE_URL=http://127.0.0.1:PORT
  TINKER_API_KEY=tml-...

examples:
  {SCRIPT} serve configs/demo.toml
  {SCRIPT} serve configs/tiny.toml -np 3 --port 8123
  {SCRIPT} serve --resume runs/serve/demo        after the end of a server: its sessions and models go on

docs/tinker.md has the endpoints and what differs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code. Raises ConfigError."""
    options = parsed(arguments)
    if options.np < 2:
        raise ConfigError(f"-np must be at least 2, one trainer and one sampler: it is {options.np}")
    config, file = load_settings(options.config, options.resume, options.set)
    front = prepare(config, file, resume=options.resume, port=options.port)
    return supervise(front.command(options.np - 1), {KEY: front.key})


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a front is started with. This process has the lock of its run until it ends."""

    run: Path
    host: str
    port: int
    model: str  # folder
    name: str  # of the model, for clients
    key: str

    def command(self, n_samplers: int, *, door: str = "") -> list[str]:
        """`door`: the folder at which samplers of other ranks arrive; without one they are children of the front."""
        words = [str(self.run), self.host, str(self.port), str(n_samplers), self.model, self.name, door]
        return [*CHILD, "areal_serve.process", *words, str(os.getpid())]


def prepare(config: Config, file: Path, *, resume: str | None, port: int) -> Prepared:
    """Check the settings and make the run's folder. `port`: 0 finds a free one. Raises ConfigError."""
    check_unsplit(config.topology)
    host = listening_address(config.bus.interface)
    key = find_key(os.environ, host)
    model = check_model(config, file.resolve().parent)
    if resume and not (Path(resume) / CONFIG).is_file():
        raise ConfigError(f"--resume takes the folder of a server: {why_no_run(resume, config.run.folder / 'serve')}")
    run = Path(resume).resolve() if resume else new_run(config, file)
    Lock(run)
    folder = model or str(run / "scratch-model")
    name = config.model.path or folder
    print(f"serving {name} from {run}", file=sys.stderr, flush=True)
    return Prepared(run, host, port or free_port(host), folder, name, key)


def check_unsplit(topology: TopologyConfig) -> None:
    """Raises ConfigError for learners that would train together."""
    if topology.learners > 1:
        raise ConfigError(
            f"unsupported topology.learners = {topology.learners}: one process of a server trains ({PAGE}); set it to "
            "1, or train with the ring"
        )


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"{SCRIPT} serve",
        description="Serve the Tinker API: a training loop of yours as the client, models and samples here.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", nargs="*", help="config file: its [model], [learner], [rollout] and [serve] count")
    parser.add_argument("-np", type=int, default=2, metavar="N", help="processes: one trainer, N - 1 samplers (2)")
    parser.add_argument(
        "--port", type=int, default=0, help="port on 127.0.0.1, or on bus.interface; a free one without it"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting")
    parser.add_argument("--resume", metavar="RUN", help="go on with the sessions and models of an earlier server")
    return parser.parse_args(arguments)


def listening_address(interface: str) -> str:
    """The address of bus.interface: loopback without one. Raises ConfigError for one that this host does not have."""
    with contextlib.suppress(ValueError):
        if ipaddress.IPv4Address(interface).is_loopback:
            return interface  # Linux answers on all of 127.0.0.0/8, and lists one address
    return find_interface(interface, local_facts())[1] if interface else HOST


def find_key(environ: Mapping[str, str], host: str) -> str:
    """That of the environment, or a new one. Raises ConfigError, also for an empty one where other hosts connect."""
    given = environ.get(KEY)
    if ipaddress.IPv4Address(host).is_loopback:
        given = given or None
    else:
        print(f"warning: {host} is served without TLS: who reads its network has the key ({PAGE})", file=sys.stderr)
    return f"tml-{secrets.token_urlsafe(24)}" if given is None else checked_key(given)


def checked_key(key: str) -> str:
    """Raises ConfigError for a key that the SDK does not take."""
    if not key.startswith("tml-") or len(key) < 12 or not key.isascii():
        raise ConfigError(f"invalid {KEY} in the environment: it must begin with tml- and have 12 characters at least")
    return key


def new_run(config: Config, file: Path) -> Path:
    """A folder FOLDER/serve/NAME. Raises ConfigError."""
    parent = config.run.folder.resolve() / "serve"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        run = create_numbered_folder(parent, run_name(config, file))
    except OSError as error:
        raise ConfigError(f"run.folder must be a writable folder: {parent}: {error.strerror}") from None
    if config.model.scratch is not None:
        write_scratch_folder(run / "scratch-model", config.model.scratch)
    write_atomic(run / ORIGIN, json.dumps({"config": str(file.resolve())}) + "\n")
    write_atomic(run / CONFIG, config.model_dump_json(indent=2) + "\n")
    return run


def free_port(host: str) -> int:
    with socket.create_server((host, 0)) as found:
        return int(found.getsockname()[1])


def supervise(command: Sequence[str], variables: dict[str, str]) -> int:
    """Run the front, again after each crash. Exit code: 0 after a signal to end, 1 when it or a worker stays down."""
    n_short = 0
    environment = {**os.environ, "PYTHONPATH": child_path(), "PYTHONUTF8": "1", **variables}
    while n_short < MOST_SHORT:
        began = time.monotonic()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        code = attend(command, environment)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # `attend` leaves its signals blocked: a next front would, too
        if code in (0, 130, 143):
            return 0
        if code == GAVE_UP:
            return 1
        n_short = n_short + 1 if time.monotonic() - began < SHORT_S else 0
        print(f"the front ended with code {code}: it is started again", file=sys.stderr, flush=True)
        environment[QUIET] = "1"
    return 1


if __name__ == "__main__":
    standard_streams.secure()
    try:
        sys.exit(main())
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
