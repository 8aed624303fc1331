"""Where the head listens: a fresh ipc path on one host, a checked tcp port otherwise."""

import errno
import os
import shutil
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_bus.config import BusConfig
from areal_bus.errors import ConfigError
from launch.interfaces import Facts

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
