"""Where the head listens, and who may speak there: a fresh ipc path on one host, a checked tcp port otherwise."""

import errno
import ipaddress
import os
import shutil
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_bus.config import BusConfig
from areal_bus.errors import ConfigError
from areal_bus.messages import Role
from launch.interfaces import Facts
from launch.topology import Place, Seat

LONGEST = 60  # characters of a folder for ipc sockets: a socket's path holds 107


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The head's endpoint, and the folder that goes away with the job ("" for tcp)."""

    url: str
    folder: str

    def remove(self) -> None:
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)


def transport(bus: BusConfig, facts: Sequence[Facts]) -> str:
    """ "ipc" or "tcp". Raises ConfigError for ipc between hosts."""
    hosts = sorted({fact.host for fact in facts})
    if bus.transport == "ipc" and len(hosts) > 1:
        raise ConfigError(f'bus.transport = "ipc" stays on one host: the ranks are on {", ".join(hosts)}; set "tcp"')
    if bus.transport != "auto":
        return bus.transport
    return "tcp" if len(hosts) > 1 or bus.interface else "ipc"


def wants_curve(bus: BusConfig, facts: Sequence[Facts], addresses: Sequence[tuple[str, str]]) -> bool:
    """Whether connections are encrypted: "auto" does so wherever somebody else could listen in or knock.

    Who reaches an ipc path is this user; who reaches a loopback port is on this host.
    """
    if bus.curve != "auto":
        return bus.curve == "on"
    return transport(bus, facts) == "tcp" and not all(ipaddress.ip_address(ip).is_loopback for _, ip in addresses)


def keys_for(seat: Seat, places: Sequence[Place], facts: Sequence[Facts]) -> dict[str, str]:
    """Public keys by seat of those that this one talks to."""
    partners = {
        Role.HEAD: {Role.LEARNER, Role.REWARD, Role.GENERATOR},
        Role.LEARNER: {Role.HEAD},
        Role.REWARD: {Role.HEAD, Role.GENERATOR},
        Role.GENERATOR: {Role.HEAD, Role.REWARD},
    }[seat.role]
    return {str(other): facts[place.rank].key for place in places for other in place.seats if other.role in partners}


def open_endpoint(bus: BusConfig, facts: Sequence[Facts], address: str) -> Endpoint:
    """A place for the head's ROUTER. Raises ConfigError when the port is taken."""
    if transport(bus, facts) == "tcp":
        return Endpoint(url=f"tcp://{address}:{free_port(address, bus.port)}", folder="")
    parent = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="areal-bus-", dir=parent if len(parent) <= LONGEST else "/tmp")  # mode 0700
    return Endpoint(url=f"ipc://{Path(folder) / 'head.sock'}", folder=folder)


def free_port(address: str, port: int) -> int:
    """`port`, or one that is free when it is 0. The head binds it a moment later and says so should it be gone."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"bus.port must be free: {port} is taken on {address}; set another, or 0 for any free one"
                ) from None
            raise ConfigError(
                f"bus.port must be one that can be bound: {port} on {address}: {os.strerror(error.errno or 0)}"
            ) from None
        return int(probe.getsockname()[1])
