"""Network interfaces of this host and which of them a job uses; knows nothing of ranks' roles."""

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from areal_bus.errors import ConfigError

SIOCGIFADDR = 0x8915  # Linux: IPv4 address of a named interface
LOOPBACK = ("lo", "127.0.0.1")


@dataclass(frozen=True, slots=True)
class Facts:
    """What a rank tells the others: where it runs, and how to know it."""

    host: str
    addresses: dict[str, str]  # interface name -> IPv4 address
    key: str = ""  # the rank's public key


def here(key: str = "") -> Facts:
    return Facts(host=socket.gethostname(), addresses=interfaces(), key=key)


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


def choose(interface: str, facts: Sequence[Facts]) -> list[tuple[str, str]]:
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


def find(interface: str, fact: Facts) -> tuple[str, str]:
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


def common(facts: Sequence[Facts]) -> list[str]:
    """Names that all hosts have, loopback apart."""
    names = set.intersection(*(set(fact.addresses) for fact in facts))
    return sorted(names - {"lo"})
