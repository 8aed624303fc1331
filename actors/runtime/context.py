"""The context of an actor process: its identity, endpoints, folders and keys; its bus, journal and heartbeat."""

import contextlib
import gc
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from areal_bus.config.removed import saved
from areal_bus.config.sections import Config
from areal_bus.core.events import Event
from areal_bus.messages import Heartbeat, PushDone
from areal_bus.storage.journal import Journal
from areal_bus.storage.journal_segments import SEGMENT_BYTES, FileSizes
from areal_bus.transport.bus import Bus, Heartbeats
from areal_bus.transport.curve import KeyPair, Keyring

DETAIL_BYTES = (
    64 << 20
)  # of a process's first full journal files, which keep the times of single spans for the timeline
GC_THRESHOLD = 20_000  # allocations before a young collection; Python's default is 700
PROGRESS_FD = "AREAL_BUS_PROGRESS_FD"  # environment: pipe on which an actor reports first progress to its supervisor
COPY_FD = "AREAL_BUS_COPY_FD"  # environment: memory of the supervisor, for copies of a learner's state
TURNS_FD = "AREAL_BUS_TURNS_FD"  # environment: eventfd on which the head reports each loop iteration to its supervisor


@dataclass(frozen=True, slots=True)
class Context:
    """Identity and environment of one actor. The launcher writes it as one JSON line to the actor's standard input."""

    role: str  # Role
    index: int  # 0, 1, 2, ... among its role
    incarnation: int
    rank: int  # of the supervisor that started it
    job: str  # id of the job: messages of another job are rejected
    head: str  # endpoint of the head's ROUTER; the head itself listens on it
    address: str  # IP address of the network interface, for tcp and collectives
    interface: str  # name of the network interface, for gloo and NCCL
    device: str  # "cpu" or "cuda"
    n_generators: int
    n_rewards: int
    n_learners: int
    run_folder: str  # holds config.json, the journal, samples, checkpoints
    config_folder: str  # base of user modules and relative data paths
    model_folder: str  # resolved model: a folder, or a Hugging Face id
    public_key: str = ""  # of its rank; "": connections are not encrypted
    secret_key: str = field(default="", repr=False)
    keys: dict[str, str] = field(default_factory=dict, repr=False)  # public keys of its peers
    lease_secret: str = field(default="", repr=False)  # head only: key from which it derives lease ids
    split: int = 0  # number of the split of ranks that its numbers of learners and generators are of
    is_guest: bool = False  # a generator that joined a running job; no supervisor of the job ends it

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}.{self.incarnation}"

    @property
    def folder(self) -> Path:
        return Path(self.run_folder)

    def run_date(self) -> str:
        """The day of the run's first start, YYYY-MM-DD; "" where its folder does not say."""
        try:
            return str(json.loads((self.folder / "origin.json").read_text(encoding="utf-8")).get("date", ""))
        except (OSError, ValueError, AttributeError):
            return ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Context":
        return Context(**json.loads(text))

    def config(self) -> Config:
        """The resolved config that was saved with the run."""
        return saved((self.folder / "config.json").read_text(encoding="utf-8"))

    def journal(self, config: Config) -> Journal:
        folder = Path(config.journal.dir) if config.journal.dir else self.folder / "journal"
        return Journal(
            folder,
            role=self.role,
            index=self.index,
            incarnation=self.incarnation,
            sizes=FileSizes(SEGMENT_BYTES, DETAIL_BYTES),
        )

    def keyring(self) -> Keyring | None:
        """The keys for the Bus; None when connections are not encrypted."""
        return Keyring(KeyPair(self.public_key, self.secret_key), self.keys) if self.public_key else None


current: Context | None = None  # of this process, if it is an actor: its start sets it


class HeartbeatState:
    """Content of the next heartbeat: set by the loop, read by the bus thread. `progress` counts work of any kind."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.note = "starting"
        self.progress = 0
        self._supervisor = take_descriptor(PROGRESS_FD)

    def report_progress(self) -> None:
        """Report to the supervisor that this incarnation did something that its death does not undo."""
        if self._supervisor is not None:
            pipe, self._supervisor = self._supervisor, None
            with contextlib.suppress(OSError):  # the supervisor is gone; this process ends next
                os.write(pipe, b"1")
            os.close(pipe)

    def heartbeat(self, *, hears: bool = True) -> Heartbeat:
        """The next heartbeat. `hears`: messages of the head arrive."""
        return Heartbeat(progress=self.progress, version=self.version, note=self.note, hears=hears)


class LoopTicker:
    """Reports to the supervisor that the main loop runs: heartbeats of the bus thread do not prove it."""

    def __init__(self) -> None:
        self._supervisor = take_descriptor(TURNS_FD)

    def tick(self) -> None:
        """Report one iteration of the loop."""
        if self._supervisor is not None:
            os.eventfd_write(self._supervisor, 1)


def collect_seldom() -> None:
    """Collect garbage rarely (messages have no cycles), and never the objects made before this call."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, *gc.get_threshold()[1:])


def take_descriptor(name: str) -> int | None:
    """Take a descriptor to the supervisor from the environment, so that no child inherits it; None without one."""
    number = os.environ.pop(name, "")
    if not number:
        return None
    os.set_inheritable(int(number), False)
    return int(number)


def open_bus(context: Context, config: Config, heartbeat: HeartbeatState, *, listen: str = "") -> Bus:
    """The bus of an actor other than the head, connected to the head, with heartbeats running."""
    bus = Bus(
        context.name,
        job=context.job,
        listen=listen,
        heartbeats=Heartbeats(
            lambda: heartbeat.heartbeat(hears=bus.silence_s("head") <= config.bus.silent_s),
            every_s=config.bus.heartbeat_s,
            to="head",
        ),
        keys=context.keyring(),
    )
    bus.connect("head", context.head)
    return bus


def journal_rejections(bus: Bus, journal: Journal) -> None:
    """Write rejected input and undelivered messages to the journal."""
    for refusal in bus.rejections():
        journal.write(
            Event.REFUSED,
            what="bytes",
            sender=refusal.peer,
            why=refusal.sentence,
            reason=refusal.reason,
            n=refusal.n,
        )
    journal_undelivered(bus, journal)


def journal_pushed(journal: Journal, done: PushDone) -> None:
    """Write that this process completed its part of a push."""
    delta = {} if done.delta_from is None else {"delta_from": done.delta_from}
    journal.write(
        Event.PUSHED,
        push=done.push,
        version=done.version,
        digest=done.digest,
        receive_s=round(done.receive_s, 6),
        stall_s=round(done.stall_s, 6),
        sent_bytes=done.sent_bytes,
        **delta,
    )


def journal_undelivered(bus: Bus, journal: Journal) -> None:
    for void in bus.send_queues.take_undelivered():
        text = f"messages to {void.peer} were dropped, {void.n} so far: {void.why}"
        journal.write(Event.NOTE, text=text, peer=void.peer, n=void.n)


def dump(value: Any) -> str:
    """Compact JSON, not restricted to ASCII."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
