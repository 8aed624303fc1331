"""Bench `delta`: bytes and seconds of a delta of SmolLM2-135M against those of all bytes.

A learner makes updates by AdamW in float32 and pushes each version in bfloat16 twice, as a delta and in full: to a
member on its own host (loopback) and to one behind a link of 100 Mbit/s. The loopback member comes first, so the time
to make the delta is in its seconds. The slow link lies between two network namespaces: it needs root and
iproute2, and touches no network of the machine.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from areal_bus.errors import ConfigError
from areal_bus.messages import PushBegin
from benchmarks.harness import pace, worker_process
from benchmarks.harness.protocol import Figures
from benchmarks.harness.worker_process import ROOT
from benchmarks.push.bench import Half

CONFIG, MODEL = ROOT / "configs" / "demo.toml", ROOT / "models" / "SmolLM2-135M-Instruct"
RATE = "100mbit"
RATES = (1e-5, 1e-6)  # learning rates
UPDATES = 5
SLOW_UPDATES = 2  # of these, versions whose bytes all go over the link
BEHIND = 4  # versions that the late member has missed
WAIT_S = 300.0
FORMS = ("delta", "full")


@dataclass(slots=True)
class Series:
    """Measurements of one learning rate, one for each update."""

    snapshots: list[dict[str, float]] = field(default_factory=list)
    changes: list[dict[str, float]] = field(default_factory=list)
    late: dict[str, float] = field(default_factory=dict)  # a delta from BEHIND versions ago
    pushes: dict[tuple[str, str], list[dict[str, float]]] = field(default_factory=dict)  # (member, form) -> each


class DeltaBench:
    about = "a delta of SmolLM2-135M after real updates, over a push of all bytes: loopback and 100 Mbit/s"

    def measure(self, *, quiet: bool) -> Figures:
        """Needs no peer. Without network namespaces it measures loopback only. Raises ConfigError without the model."""
        if not (MODEL / "config.json").is_file():
            raise ConfigError(f"this bench pushes SmolLM2-135M, which is not at {MODEL}: run `make model`")
        found: Figures = {"bench": "delta", "model": MODEL.name, "updates": pace.of(UPDATES, 2), "link": RATE}
        with processes() as (learner, members, address):
            for lr in pace.of(RATES, RATES[:1]):
                print(f"learning rate {lr:g}", file=sys.stderr)
                series = compare(learner, members, CONFIG, MODEL, address, lr=lr, updates=pace.of(UPDATES, 2))
                found |= figures(series, f"lr{lr:g}".replace("e-0", "e-"))
        return found


@contextmanager
def processes() -> Iterator[tuple[Half, dict[str, Half], str]]:
    """The learner, the members by name, and the address of the learner."""
    with ExitStack() as stack:
        try:
            ends: tuple[End, End] | None = stack.enter_context(link(RATE))
        except ConfigError as error:
            print(f"loopback only: {error}", file=sys.stderr)
            ends = None

        def start(name: str, end: End | None) -> Half:
            before = [] if end is None else end.words
            return stack.enter_context(worker_process.ours(f"delta.{name}", before=before))

        here = None if ends is None else ends[0]
        places = {"loopback": here} if ends is None else {"loopback": here, "link": ends[1]}
        members = {name: start("member", end) for name, end in places.items()}
        address = "127.0.0.1" if here is None else here.address
        for name, end in places.items():
            members[name].ask("open", name=name, address=address if end is None else end.address)
        yield start("learner", here), members, address


def compare(
    learner: Half, members: dict[str, Half], config: Path, model: Path, address: str, *, lr: float, updates: int
) -> Series:
    """Push each of some versions to each member, as a delta and in full."""
    endpoint = learner.ask("open", config=str(config), model=str(model), address=address, lr=lr)["endpoint"]
    found, numbers = Series(), count()

    def push(member: str, form: str, version: int) -> dict[str, float]:
        view = list(members).index(member) * len(FORMS) + FORMS.index(form)
        begin = asdict(PushBegin(next(numbers), version, view, [member], endpoint, WAIT_S))
        members[member].begin("receive", begin=begin)
        sent = learner.ask("push", form=form, begin=begin)
        received = members[member].answer()
        if received["digest"] != sent["digest"] or (received["delta_from"] is not None) != (form == "delta"):
            raise RuntimeError(f"a member holds the root's weights by the form that was asked for: {received}, {sent}")
        return {"seconds": sent["seconds"], "bytes": sent["bytes"], "member_cpu_s": received["cpu_s"]}

    learner.ask("snapshot")
    for member in members:
        push(member, "full", 0)
        push(member, "delta", 0)  # builds its group
    began = time.monotonic()
    for version in range(1, updates + 1):
        pace.say(version, updates, "update", time.monotonic() - began)
        learner.ask("update")
        found.snapshots.append(learner.ask("snapshot"))
        for member in members:
            for form in FORMS:
                if (member, form) != ("link", "full") or version <= SLOW_UPDATES:
                    found.pushes.setdefault((member, form), []).append(push(member, form, version))
        found.changes.append(learner.ask("changes", behind=1))
    found.late = learner.ask("changes", behind=min(BEHIND, updates))
    return found


def figures(series: Series, suffix: str) -> Figures:
    """Medians over the updates."""

    def of(rows: list[dict[str, float]], name: str) -> float:
        return median(row[name] for row in rows)

    full = of(series.snapshots, "full_bytes")
    found: dict[str, Any] = {
        "full_mb": round(full / 1e6, 1),
        "delta_mb": round(of(series.changes, "bytes") / 1e6, 2),
        "delta_share": round(of(series.changes, "bytes") / full, 4),
        "changed_share": round(2 * of(series.changes, "changed") / full, 4),
        "changed_share_each": {str(i + 1): round(2 * row["changed"] / full, 4) for i, row in enumerate(series.changes)},
        "late_mb": round(series.late["bytes"] / 1e6, 2),
        "compare_cpu_ms": round(1e3 * of(series.snapshots, "compare_cpu_s"), 1),
        "snapshot_ms": round(1e3 * of(series.snapshots, "snapshot_s"), 1),
    }
    for (member, form), rows in series.pushes.items():
        found[f"{member}_{form}_s"] = round(of(rows, "seconds"), 3)
        found[f"{member}_{form}_member_cpu_s"] = round(of(rows, "member_cpu_s"), 3)
    for member in sorted({member for member, _ in series.pushes}):
        full_s = of(series.pushes[member, "full"], "seconds")
        ratios = [full_s / delta["seconds"] for delta in series.pushes[member, "delta"]]
        found[f"{member}_speedup"] = round(median(ratios), 2)
        found[f"{member}_speedup_low"], found[f"{member}_speedup_high"] = round(min(ratios), 2), round(max(ratios), 2)
    return {f"{name}_{suffix}": value for name, value in found.items()}


INTERFACE = "eth0"
NETWORK = "10.78.0"


@dataclass(frozen=True, slots=True)
class End:
    """One end of the link: a host of its own, with loopback."""

    name: str  # of its namespace
    address: str

    @property
    def words(self) -> list[str]:
        """Prefix of a command line that runs there."""
        return ["ip", "netns", "exec", self.name]


@contextlib.contextmanager
def link(rate: str) -> Iterator[tuple[End, End]]:
    """Two hosts whose traffic to each other is limited to this rate ("100mbit") in each direction.

    Raises ConfigError where namespaces cannot be made.
    """
    if os.getuid() or not shutil.which("ip") or not shutil.which("tc"):
        raise ConfigError("a link of limited rate needs root and iproute2, for network namespaces")
    ends = [End(f"areal-bench-{os.getpid()}-{i}", f"{NETWORK}.{i + 1}") for i in range(2)]
    try:
        try:
            _build(ends[0], ends[1], rate)
        except subprocess.CalledProcessError as error:
            raise ConfigError(f"network namespaces cannot be made here: {error.stderr.strip()}") from error
        yield ends[0], ends[1]
    finally:
        for end in ends:
            subprocess.run(["ip", "netns", "delete", end.name], capture_output=True, check=False)


def _build(one: End, other: End, rate: str) -> None:
    for end in (one, other):
        _run("ip", "netns", "add", end.name)
        _run("ip", "-n", end.name, "link", "set", "lo", "up")
    peer = ["type", "veth", "peer", "name", INTERFACE, "netns", other.name]
    _run("ip", "-n", one.name, "link", "add", INTERFACE, *peer)
    for end in (one, other):
        _run("ip", "-n", end.name, "address", "add", f"{end.address}/24", "dev", INTERFACE)
        _run("ip", "-n", end.name, "link", "set", INTERFACE, "up")
        limit = ["root", "tbf", "rate", rate, "burst", "32k", "latency", "400ms"]
        _run("tc", "-n", end.name, "qdisc", "replace", "dev", INTERFACE, *limit)


def _run(*words: str) -> None:
    subprocess.run(words, capture_output=True, text=True, check=True, encoding="utf-8")
