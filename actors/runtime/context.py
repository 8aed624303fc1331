"""What a process needs to know to be one actor of one job; made by the launcher, read by everything in actors/."""

import contextlib
import gc
import json
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from areal_bus.config.sections import Config
from areal_bus.core.events import Event
from areal_bus.journal import Journal
from areal_bus.messages import Heartbeat
from areal_bus.transport.bus import Bus
from areal_bus.transport.curve import KeyPair, Keyring

YOUNG = 20_000  # objects made and not freed before the collector looks at them; Python's own number is 700
PROGRESS_FD = "AREAL_BUS_PROGRESS_FD"  # environment: the pipe on which an actor tells its supervisor of progress
TURNS_FD = "AREAL_BUS_TURNS_FD"  # environment: the eventfd on which the head tells its supervisor that its loop turns


@dataclass(frozen=True, slots=True)
class Context:
    """Identity and surroundings of one actor. Serialised as one JSON line on the actor's standard input."""

    role: str  # Role
    index: int  # 0, 1, 2, ... among its role
    incarnation: int
    rank: int  # of the supervisor that started it, for people
    job: str  # id of the job: messages of another are refused
    head: str  # endpoint of the head's ROUTER; for the head itself: where to listen
    address: str  # IP address of the named interface, for tcp and for collectives
    interface: str  # its name, for gloo and NCCL
    device: str  # "cpu" or "cuda"
    n_generators: int
    n_rewards: int
    n_learners: int
    run_folder: str  # holds config.json, the journal, samples, checkpoints
    config_folder: str  # where the user's own modules and relative data paths are found
    model_folder: str  # resolved model: a folder, or a Hugging Face id
    public_key: str = ""  # of its rank; "": connections are not encrypted
    secret_key: str = field(default="", repr=False)
    keys: dict[str, str] = field(default_factory=dict, repr=False)  # of those it talks to: public key by seat
    lease_secret: str = field(default="", repr=False)  # the head's alone: what it makes ids of leases of
    is_guest: bool = False  # a generator that joined a running job, and whom nobody ends with it

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}.{self.incarnation}"

    @property
    def folder(self) -> Path:
        return Path(self.run_folder)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Context":
        return Context(**json.loads(text))

    def config(self) -> Config:
        """The resolved config that was saved with the run."""
        return Config.model_validate_json((self.folder / "config.json").read_text())

    def journal(self, config: Config) -> Journal:
        folder = Path(config.journal.dir) if config.journal.dir else self.folder / "journal"
        return Journal(folder, role=self.role, index=self.index, incarnation=self.incarnation)

    def keyring(self) -> Keyring | None:
        """Its keys, for a Bus; None where connections are not encrypted."""
        return Keyring(KeyPair(self.public_key, self.secret_key), self.keys) if self.public_key else None

    def find_user_modules(self) -> None:
        """The user's modules are found from the config's folder first."""
        if self.config_folder not in sys.path:
            sys.path.insert(0, self.config_folder)


class HeartbeatState:
    """What the next heartbeat says; the actor's loop sets it, the bus thread reads it.

    The first progress of a life is told to the supervisor, too: deaths before and after it are not in a row.
    """

    def __init__(self, *, tells: bool = True) -> None:
        """`tells`: any progress is told; else only `tell` does it, for an actor whose progress can be lost with it."""
        self._tells = tells
        self.version: int | None = None
        self.note = "starting"
        self._progress = 0
        self._supervisor = take_descriptor(PROGRESS_FD)

    @property
    def progress(self) -> int:
        return self._progress

    @progress.setter
    def progress(self, value: int) -> None:
        self._progress = value
        if value > 0 and self._tells:
            self.tell()

    def tell(self) -> None:
        """Tell the supervisor, once a life, that it got somewhere."""
        if self._supervisor is not None:
            pipe, self._supervisor = self._supervisor, None
            with contextlib.suppress(OSError):  # the supervisor is gone, and so are we in a moment
                os.write(pipe, b"1")
            os.close(pipe)

    def beat(self, *, hears: bool = True) -> Heartbeat:
        """`hears`: the head was heard of late."""
        return Heartbeat(progress=self.progress, version=self.version, note=self.note, hears=hears)


class LoopTicker:
    """Tells the supervisor that the main loop turns: the bus thread's heartbeats go on without it."""

    def __init__(self) -> None:
        self._supervisor = take_descriptor(TURNS_FD)

    def tell(self) -> None:
        """Once a turn."""
        if self._supervisor is not None:
            os.eventfd_write(self._supervisor, 1)


def collect_seldom() -> None:
    """For a process that handles messages: they are no cycles, so they are freed without the collector.

    To be called once it is up: what is there by then is looked at no more.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])


def take_descriptor(name: str) -> int | None:
    """What leads to the supervisor, once a process and for it alone; None where there is none."""
    number = os.environ.pop(name, "")
    if not number:
        return None
    os.set_inheritable(int(number), False)
    return int(number)


def open_bus(context: Context, config: Config, pulse: HeartbeatState, *, listen: str = "") -> Bus:
    """The bus of an actor other than the head: connected to the head, heartbeats running."""
    bus = Bus(
        context.name,
        job=context.job,
        listen=listen,
        heartbeat=lambda: pulse.beat(hears=bus.silence_s("head") <= config.bus.silent_s),
        heartbeat_to="head",
        heartbeat_s=config.bus.heartbeat_s,
        inbox_bytes=config.bus.inbox_mib << 20,
        keys=context.keyring(),
    )
    bus.connect("head", context.head)
    return bus


def note_refusals(bus: Bus, journal: Journal) -> None:
    """What came in and was no message of this job, or not of the one who said so, as lines of the journal.

    Then what was to go out and did not.
    """
    for refusal in bus.refusals():
        journal.write(
            Event.REFUSED,
            what="bytes",
            sender=refusal.peer,
            why=refusal.sentence,
            reason=refusal.reason,
            n=refusal.n,
        )
    note_voids(bus, journal)


def note_voids(bus: Bus, journal: Journal) -> None:
    """What was to go out and did not, as lines of the journal."""
    for void in bus.outbox.voids():
        text = f"messages to {void.peer} are void, {void.n} so far: {void.why}"
        journal.write(Event.NOTE, text=text, peer=void.peer, n=void.n)


def dump(value: Any) -> str:
    """Compact JSON with characters as they are."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
