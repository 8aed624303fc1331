"""Chooses each rank's network interface, the transport, encryption and the head's endpoint.

Unix sockets lie in folders with short paths: at most 107 bytes, whatever TMPDIR is.
"""

import contextlib
import fcntl
import ipaddress
import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from areal_bus.config.sections import BusConfig
from areal_bus.errors import ConfigError
from areal_bus.messages import Role
from areal_bus.storage.machine import machine
from launch.plan.topology import ActorId, RankPlan

SIOCGIFADDR = 0x8915  # Linux: IPv4 address of a named interface
SIOCGIFNETMASK = 0x891B
LOOPBACK = ("lo", "127.0.0.1")


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Host, addresses and public key of a rank, which it sends to all ranks."""

    host: str
    addresses: dict[str, str]  # interface name -> IPv4 address
    key: str = ""  # the rank's public key
    machine: str = ""  # boot and network: machines may have one host name (clones, pods)
    masks: dict[str, str] = field(default_factory=dict)  # interface name -> IPv4 netmask


def local_facts(key: str = "") -> HostFacts:
    return HostFacts(socket.gethostname(), interfaces(), key, machine(), interfaces(SIOCGIFNETMASK))


def named_apart(facts: Sequence[HostFacts]) -> list[HostFacts]:
    """The same facts, with a number behind the host name where several machines have it: "node", "node (2)"."""
    machines: dict[str, list[str]] = {}
    found = []
    for fact in facts:
        alike = machines.setdefault(fact.host, [])
        if fact.machine not in alike:
            alike.append(fact.machine)
        number = alike.index(fact.machine) + 1
        found.append(fact if number == 1 else replace(fact, host=f"{fact.host} ({number})"))
    return found


def interfaces(request_code: int = SIOCGIFADDR) -> dict[str, str]:
    """IPv4 address (or netmask) by interface name, without interfaces that have none."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                reply = fcntl.ioctl(probe.fileno(), request_code, request)
            except OSError:
                continue  # no IPv4 address
            found[name] = socket.inet_ntoa(reply[20:24])
    return found


def choose_interfaces(interface: str, facts: Sequence[HostFacts]) -> list[tuple[str, str]]:
    """(name, address) of each rank's interface: `interface`, or the only shared one. ConfigError: unconnected hosts."""
    one_host = len({fact.host for fact in facts}) == 1
    if not interface:
        return [LOOPBACK] * len(facts) if one_host else only_shared(facts)
    chosen = [find_interface(interface, fact) for fact in facts]
    loopback = [address for _, address in chosen if ipaddress.ip_address(address).is_loopback]
    if loopback and not one_host:
        raise ConfigError(
            f"ranks on several hosts cannot use a loopback address: bus.interface is {interface!r}; they share "
            f"{', '.join(shared_interfaces(facts)) or 'no other'}"
        )
    return chosen


def only_shared(facts: Sequence[HostFacts]) -> list[tuple[str, str]]:
    """The interface of each rank in the only network that all hosts share. Raises ConfigError for none or several."""
    shared = shared_networks(facts)
    if len(shared) == 1:
        return [find_interface(shared[0], fact) for fact in facts]
    listed = ", ".join(shared_interfaces(facts) or shared) or "none"
    raise ConfigError(
        f"ranks on several hosts need a network interface: set bus.interface to one that they share ({listed})"
    )


def shared_interfaces(facts: Sequence[HostFacts]) -> list[str]:
    """Interface names that all hosts have, without loopback."""
    names = set.intersection(*(set(fact.addresses) for fact in facts))
    return sorted(names - {"lo"})


def shared_networks(facts: Sequence[HostFacts]) -> list[str]:
    """Networks ("10.1.0.0/16") in which every host has one interface with an address of its own, without loopback."""
    hosts = list({fact.host: fact for fact in facts}.values())
    found = []
    for network in sorted(set.intersection(*(set(networks(fact)) for fact in hosts))):
        addresses = [find_interface(network, fact)[1] for fact in hosts]
        is_own = len(set(addresses)) == len(hosts)  # docker0 has the same address everywhere
        if is_own and all(networks(fact).count(network) == 1 for fact in hosts):
            found.append(network)
    return found


def describe(chosen: tuple[str, str], facts: Sequence[HostFacts]) -> str:
    """The interface that was taken because no setting names one, for the first lines of a job."""
    return f"{chosen[0]} ({shared_networks(facts)[0]}), the only network that all hosts share"


def toward(url: str, fact: HostFacts) -> tuple[str, str]:
    """The interface of this host from which the tcp endpoint of a head is reached. Raises ConfigError."""
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, int(port)))  # sends nothing
        except OSError as error:
            raise ConfigError(f"no network of this host leads to the head: {url}: {error.strerror}") from None
        return find_interface(probe.getsockname()[0], fact)


def networks(fact: HostFacts) -> list[str]:
    """The network of each interface of a host, without loopback and interfaces with one address."""
    addresses = [f"{address}/{fact.masks[name]}" for name, address in fact.addresses.items() if name in fact.masks]
    found = [ipaddress.ip_network(address, strict=False) for address in addresses]
    return [str(network) for network in found if not network.is_loopback and network.num_addresses > 1]


def find_interface(interface: str, fact: HostFacts) -> tuple[str, str]:
    """Find an interface by name, by address, or by a network with a prefix length ("10.1.0.0/16")."""
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
    rule = "bus.interface must match a network interface of every host, by name, address or network"
    raise ConfigError(f"{rule}: {interface!r} is not on {fact.host}, which has {known}")


@dataclass(frozen=True, slots=True)
class HeadEndpoint:
    """The head's endpoint, and the socket folder to remove at the end of the job ("" for tcp)."""

    url: str
    folder: str

    def remove(self) -> None:
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)


def transport(bus: BusConfig, facts: Sequence[HostFacts]) -> str:
    """ "ipc" or "tcp". Raises ConfigError for ipc between hosts."""
    hosts = sorted({fact.host for fact in facts})
    if bus.transport == "ipc" and len(hosts) > 1:
        raise ConfigError(f'bus.transport = "ipc" works on one host: the ranks are on {", ".join(hosts)}; set "tcp"')
    if bus.transport != "auto":
        return bus.transport
    return "tcp" if len(hosts) > 1 or bus.interface else "ipc"


def uses_curve(bus: BusConfig, facts: Sequence[HostFacts], addresses: Sequence[tuple[str, str]]) -> bool:
    """Whether connections use CURVE; "auto": for tcp on an address that other hosts can reach."""
    if bus.curve != "auto":
        return bus.curve == "on"
    return transport(bus, facts) == "tcp" and not all(ipaddress.ip_address(ip).is_loopback for _, ip in addresses)


def peer_keys(actor: ActorId, places: Sequence[RankPlan], facts: Sequence[HostFacts]) -> dict[str, str]:
    """Public keys, by identity, of the actors that this one exchanges messages with."""
    partners = {
        Role.HEAD: {Role.LEARNER, Role.REWARD, Role.GENERATOR},
        Role.LEARNER: {Role.HEAD},
        Role.REWARD: {Role.HEAD, Role.GENERATOR},
        Role.GENERATOR: {Role.HEAD, Role.REWARD},
    }[actor.role]
    return {str(other): facts[place.rank].key for place in places for other in place.actors if other.role in partners}


def open_endpoint(bus: BusConfig, facts: Sequence[HostFacts], address: str) -> HeadEndpoint:
    if transport(bus, facts) == "tcp":
        return HeadEndpoint(url=f"tcp://{address}:{free_port(address)}", folder="")
    folder = made_folder(FOLDERS)
    return HeadEndpoint(url=f"ipc://{folder / 'head.sock'}", folder=str(folder))


def free_port(address: str) -> int:
    """A free port. The head binds it later, and fails if it has been taken meanwhile."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


MAX_PATH_BYTES = 107  # Linux: sun_path without its final zero
NAME_BYTES = 40  # of a socket in such a folder: generator-4095.1000000
FALL_BACK = "/tmp"
FOLDERS = "areal-bus-"  # their names begin so


def temporary_parent(name_bytes: int) -> Path:
    """TMPDIR, or /tmp where a folder with a name of `name_bytes` would have too long a path for its sockets."""
    parent = tempfile.gettempdir()
    longest = len(os.fsencode(parent)) + 1 + name_bytes + 1 + NAME_BYTES
    return Path(parent if longest <= MAX_PATH_BYTES else FALL_BACK)


def lock_name() -> str:
    """The file in each such folder whose lock its maker holds. One name a kernel: on some shared disks the processes of
    other hosts do not see the lock.
    """
    return f"sockets-{machine().partition(' ')[0]}.lock"


def made_folder(prefix: str) -> Path:
    """A new folder for sockets, mode 0700; those whose makers were killed are removed. Raises OSError."""
    parent = temporary_parent(len(prefix) + 8)  # mkdtemp appends 8 characters
    remove_abandoned(parent)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    building = folder / f".{lock_name()}"
    lock = os.open(building, os.O_CREAT | os.O_RDWR, 0o600)  # stays open until this process ends
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:  # a file system without locks: the folder is never taken as abandoned
        os.close(lock)
    else:
        building.rename(folder / lock_name())  # seen by others only when it is locked
    return folder


def remove_abandoned(parent: Path) -> None:
    """Remove this user's folders for sockets whose makers were killed: no process holds their lock."""
    for path in parent.glob(f"{FOLDERS}*/{lock_name()}"):
        with contextlib.suppress(OSError):  # it is held, or has just been removed
            lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # no wait for the writer of a FIFO
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.geteuid():
                    shutil.rmtree(path.parent)
            finally:
                os.close(lock)


def too_long(url: str) -> str:
    """Why no socket can have this address; "" if one can."""
    n_bytes = len(os.fsencode(url.removeprefix("ipc://")))
    if not url.startswith("ipc://") or n_bytes <= MAX_PATH_BYTES:
        return ""
    return f"the path of a socket may have at most {MAX_PATH_BYTES} bytes: {url} has {n_bytes}"
