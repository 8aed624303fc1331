"""Several hosts on one machine: a network, process and name namespace each, joined by a bridge in one of its own.

Needs root and iproute2 (`ip`, `tc`). Nothing of it touches the machine's own network.
"""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator

import pytest

INTERFACE = "eth0"  # of each host
NETWORK = "10.77.0"  # each host has .1, .2, ...: the networks of two tests do not meet


class Hosts:
    """Hosts 0 to n - 1, which reach each other by `INTERFACE`."""

    def __init__(self, n: int) -> None:
        self._bridge = f"areal-{os.getpid()}-bridge"
        self._names = [f"areal-{os.getpid()}-{i}" for i in range(n)]

    def address(self, i: int) -> str:
        return f"{NETWORK}.{i + 1}"

    def words(self, i: int) -> list[str]:
        """What comes before a command line that runs on this host. Process ids of another host mean nothing there."""
        enter = ["ip", "netns", "exec", self._names[i], "unshare", "--uts", "--pid", "--fork", "--kill-child"]
        return [*enter, "--mount-proc", "sh", "-c", 'hostname "$0" && exec "$@"', self._names[i]]

    def cut(self, i: int) -> None:
        """Pull the cable of a host. Connections do not hear of it."""
        _run("ip", "-n", self._bridge, "link", "set", f"port{i}", "down")

    def heal(self, i: int) -> None:
        _run("ip", "-n", self._bridge, "link", "set", f"port{i}", "up")

    def throttle(self, i: int, rate: str) -> None:
        """What a host sends and receives is limited to this rate ("10mbit")."""
        limit = ["root", "tbf", "rate", rate, "burst", "32k", "latency", "400ms"]
        _run("tc", "-n", self._names[i], "qdisc", "replace", "dev", INTERFACE, *limit)
        _run("tc", "-n", self._bridge, "qdisc", "replace", "dev", f"port{i}", *limit)

    def kill(self, i: int) -> None:
        """SIGKILL to every process of a host at once."""
        for pid in _run("ip", "netns", "pids", self._names[i]).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def build(self) -> None:
        _run("ip", "netns", "add", self._bridge)
        _run("ip", "-n", self._bridge, "link", "add", "bridge0", "type", "bridge")
        _run("ip", "-n", self._bridge, "link", "set", "bridge0", "up")
        for i, name in enumerate(self._names):
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            peer = ["peer", "name", f"port{i}", "netns", self._bridge]
            _run("ip", "-n", name, "link", "add", INTERFACE, "type", "veth", *peer)
            _run("ip", "-n", name, "address", "add", f"{self.address(i)}/24", "dev", INTERFACE)
            _run("ip", "-n", name, "link", "set", INTERFACE, "up")
            _run("ip", "-n", self._bridge, "link", "set", f"port{i}", "master", "bridge0", "up")

    def remove(self) -> None:
        for name in (*self._names, self._bridge):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@contextlib.contextmanager
def hosts(n: int) -> Iterator[Hosts]:
    """Skips the test where namespaces cannot be made."""
    if os.getuid() or not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("several hosts need root and iproute2, for network namespaces")
    made = Hosts(n)
    try:
        try:
            made.build()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        yield made
    finally:
        made.remove()


def _run(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout
