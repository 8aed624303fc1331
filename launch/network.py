"""Network interfaces of a host, and the addresses at which processes listen."""

import errno
import fcntl
import ipaddress
import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_bus.config.sections import BusConfig
from areal_bus.errors import ConfigError
from areal_bus.messages import Role
from launch.topology import ActorId, RankPlan

SIOCGIFADDR = 0x8915  # Linux: IPv4 address of a named interface
LOOPBACK = ("lo", "127.0.0.1")


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What a rank tells the others: where it runs, and how to know it."""

    host: str
    addresses: dict[str, str]  # interface name -> IPv4 address
    key: str = ""  # the rank's public key


def here(key: str = "") -> HostFacts:
    return HostFacts(host=socket.gethostname(), addresses=interfaces(), key=key)


def interfaces() -> dict[str, str]:
    """IPv4 address by interface name; interfaces without one are left out."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                reply = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
            except OSError:
                continue  # it has no IPv4 address
            found[name] = socket.inet_ntoa(reply[20:24])
    return found


def choose(interface: str, facts: Sequence[HostFacts]) -> list[tuple[str, str]]:
    """(name, address) of the interface that each rank uses. Raises ConfigError when they have none in common."""
    one_host = len({fact.host for fact in facts}) == 1
    if not interface:
        if one_host:
            return [LOOPBACK] * len(facts)
        shared = ", ".join(common(facts)) or "none"
        raise ConfigError(
            f"several hosts need a named network interface: set bus.interface to one that they share ({shared})"
        )
    chosen = [find(interface, fact) for fact in facts]
    loopback = [address for _, address in chosen if ipaddress.ip_address(address).is_loopback]
    if loopback and not one_host:
        raise ConfigError(
            f"several hosts do not meet on a loopback address: bus.interface is {interface!r}; they share "
            f"{', '.join(common(facts)) or 'no other'}"
        )
    return chosen


def find(interface: str, fact: HostFacts) -> tuple[str, str]:
    """By name, by address, or by the network that an address with a prefix length names ("10.1.0.0/16")."""
    if interface in fact.addresses:
        return interface, fact.addresses[interface]
    try:
        network = ipaddress.ip_network(interface, strict=False)
    except ValueError:
        network = None
    for name, address in fact.addresses.items():
        if network is not None and ipaddress.ip_address(address) in network:
            return name, address
    known = ", ".join(f"{name} ({address})" for name, address in fact.addresses.items())
    raise ConfigError(
        f"bus.interface must name a network interface of every host, by name, address or network: {interface!r} is "
        f"not on {fact.host}, which has {known}"
    )


def common(facts: Sequence[HostFacts]) -> list[str]:
    """Names that all hosts have, loopback apart."""
    names = set.intersection(*(set(fact.addresses) for fact in facts))
    return sorted(names - {"lo"})


LONGEST = 60  # characters of a folder for ipc sockets: a socket's path holds 107


@dataclass(frozen=True, slots=True)
class HeadEndpoint:
    """The head's endpoint, and the folder that goes away with the job ("" for tcp)."""

    url: str
    folder: str

    def remove(self) -> None:
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)


def transport(bus: BusConfig, facts: Sequence[HostFacts]) -> str:
    """ "ipc" or "tcp". Raises ConfigError for ipc between hosts."""
    hosts = sorted({fact.host for fact in facts})
    if bus.transport == "ipc" and len(hosts) > 1:
        raise ConfigError(f'bus.transport = "ipc" stays on one host: the ranks are on {", ".join(hosts)}; set "tcp"')
    if bus.transport != "auto":
        return bus.transport
    return "tcp" if len(hosts) > 1 or bus.interface else "ipc"


def wants_curve(bus: BusConfig, facts: Sequence[HostFacts], addresses: Sequence[tuple[str, str]]) -> bool:
    """Whether connections are encrypted: "auto" does so wherever somebody else could listen in or knock.

    Who reaches an ipc path is this user; who reaches a loopback port is on this host.
    """
    if bus.curve != "auto":
        return bus.curve == "on"
    return transport(bus, facts) == "tcp" and not all(ipaddress.ip_address(ip).is_loopback for _, ip in addresses)


def keys_for(seat: ActorId, places: Sequence[RankPlan], facts: Sequence[HostFacts]) -> dict[str, str]:
    """Public keys by seat of those that this one talks to."""
    partners = {
        Role.HEAD: {Role.LEARNER, Role.REWARD, Role.GENERATOR},
        Role.LEARNER: {Role.HEAD},
        Role.REWARD: {Role.HEAD, Role.GENERATOR},
        Role.GENERATOR: {Role.HEAD, Role.REWARD},
    }[seat.role]
    return {str(other): facts[place.rank].key for place in places for other in place.seats if other.role in partners}


def open_endpoint(bus: BusConfig, facts: Sequence[HostFacts], address: str) -> HeadEndpoint:
    """A place for the head's ROUTER. Raises ConfigError when the port is taken."""
    if transport(bus, facts) == "tcp":
        return HeadEndpoint(url=f"tcp://{address}:{free_port(address, bus.port)}", folder="")
    parent = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="areal-bus-", dir=parent if len(parent) <= LONGEST else "/tmp")  # mode 0700
    return HeadEndpoint(url=f"ipc://{Path(folder) / 'head.sock'}", folder=folder)


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
