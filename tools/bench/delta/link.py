"""A link of limited rate between two network namespaces. Needs root and iproute2; touches no network of the machine."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from areal_bus.errors import ConfigError

INTERFACE = "eth0"
NETWORK = "10.78.0"


@dataclass(frozen=True, slots=True)
class End:
    """One end of the link: a host of its own, with loopback."""

    name: str  # of its namespace
    address: str

    @property
    def words(self) -> list[str]:
        """What comes before a command line that runs there."""
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
    subprocess.run(words, capture_output=True, text=True, check=True)
