"""Who comes in at a listening socket: known keys only, and no more than there is room for; knows no messages.

ZeroMQ cuts off by itself what speaks no ZMTP, has no key or does not finish its handshake in time. The door answers for
the keys (ZAP, RFC 27), counts whoever left without having said anything, and turns away who comes when it is full.
"""

import resource
import socket
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import zmq
from zmq.utils import z85

from areal_bus.transport.curve import Keyring
from areal_bus.transport.rejections import Rejections
from areal_bus.wire.codec import MAX_FRAME_BYTES

BACKLOG = 1024  # connections that may ask at once
HANDSHAKE_MS = 10_000  # who has not finished its handshake by then is cut off
MAX_CONNECTIONS = 8192  # at once; each costs a file descriptor and some 20 KiB
SPARE = 4  # one descriptor in so many is left to the rest of the process, and to those that are being turned away
SEND_AHEAD = 256  # messages or bundles from a ROUTER to one peer in ZeroMQ's own queue; more wait in ours
CLIENT_AHEAD = 64  # the same of a DEALER: trajectories, which are long
READ_AHEAD = 128  # messages of one peer that ZeroMQ reads before we take them; more wait at the peer
KEEPALIVE_S = 30  # over tcp the system asks an idle peer's host for a sign of life, and hangs up when none comes
LINGER_MS = 200  # never 0 where a message may be half sent: should its connection break then, libzmq 4.3.5 aborts
LOCAL = "a local process"  # a peer over ipc has no address
GONE = "unknown address"  # it left before it was looked at
AT_ONCE = 1000  # comings and goings that are noted before messages are read
TOO_MANY = "too many at once"
DOMAIN = b"areal-bus"

Socket = zmq.Socket[bytes]


class Listener:
    """Of one ROUTER. All calls come from the thread that owns it."""

    def __init__(
        self, context: "zmq.Context[Socket]", router: Socket, keys: Keyring | None, refusals: Rejections
    ) -> None:
        """To be made before the ROUTER binds."""
        self._router, self._keys, self._refusals = router, keys, refusals
        self._new: dict[int, str] = {}  # connections that have said nothing yet: descriptor -> address
        self._left: deque[tuple[int, str]] = deque()  # those of them that are gone
        self._speaking: dict[int, bytes] = {}  # connections that have said something, by descriptor
        self._ended: set[bytes] = set()  # those of them that are gone
        self._n_open = 0
        self._limit = room(raise_file_limit())
        self._endpoint = ""
        router.setsockopt(zmq.BACKLOG, BACKLOG)
        router.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._zap: Socket | None = None
        if keys is not None:
            self._zap = context.socket(zmq.REP)
            self._zap.bind("inproc://zeromq.zap.01")
            lock(router, keys)
        watched = f"inproc://door-{id(self)}"
        router.monitor(watched, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._monitor: Socket = context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.RCVHWM, 0)  # ZeroMQ's own thread would wait for us
        self._monitor.connect(watched)

    def open(self, endpoint: str) -> str:
        """Bind; where it listens in truth. Raises ZMQError."""
        self._router.bind(endpoint[:-1] + "*" if endpoint.startswith("tcp:") and endpoint.endswith(":0") else endpoint)
        bound: bytes = self._router.getsockopt(zmq.LAST_ENDPOINT)  # type: ignore[assignment]
        self._endpoint = bound.rstrip(b"\0").decode()
        return self._endpoint

    @property
    def sockets(self) -> list[Socket]:
        """What to poll; when one is ready, or before the ROUTER is read: `look`."""
        return [self._monitor, *([self._zap] if self._zap is not None else [])]

    def look(self) -> None:
        """Answer for keys, and note who came and who went."""
        for request in _all(self._zap):
            self._answer(request)
        for event in _all(self._monitor):
            kind, fd = struct.unpack("=Hi", event[0])
            if kind == zmq.EVENT_ACCEPTED:
                self._n_open += 1
                self._new[fd] = address_of(fd)
                if self._n_open > self._limit:
                    self._turn_away(fd)
            elif kind == zmq.EVENT_DISCONNECTED:
                self._n_open -= 1
                if fd in self._speaking:
                    self._ended.add(self._speaking.pop(fd))
                if fd in self._new:
                    self._left.append((fd, self._new.pop(fd)))

    def said_something(self, message: zmq.Frame, connection: bytes) -> bool:
        """To be called with the first frame of what the ROUTER received, which names the connection.

        Returns whether it has connected again: what was under way in its connection before is lost.
        """
        fd = property_of(message, zmq.SRCFD)
        if fd is None or self._speaking.get(fd) == connection:
            return False
        self.look()  # it came before it spoke
        self._left = deque(item for item in self._left if item[0] != fd)
        if fd not in self._new:  # and has gone before it was read
            self._ended.add(connection)
            return False
        del self._new[fd]
        before = [other for other, known in self._speaking.items() if known == connection]
        for other in before:  # ZeroMQ says nothing of a connection whose place is taken
            del self._speaking[other]
        is_again = bool(before) or connection in self._ended
        self._ended.discard(connection)
        self._speaking[fd] = connection
        return is_again

    def nothing_is_left_to_read(self) -> set[bytes]:
        """Whoever is gone and was not heard by now never said anything. Returns the connections that ended."""
        while self._left:
            _, address = self._left.popleft()
            self._refusals.add(address, "handshake", "a connection begins with ZMTP, the right keys and a message")
        ended, self._ended = self._ended, set()
        return ended

    def close(self) -> None:
        self.look()
        self._router.disable_monitor()
        for own in self.sockets:
            own.close(linger=0)

    def _answer(self, request: list[bytes]) -> None:
        """RFC 27: version, request id, domain, address, identity, mechanism, credentials."""
        version, number, _, address, _, mechanism, *credentials = request
        public = z85.encode(credentials[0]).decode() if mechanism == b"CURVE" and credentials else ""
        is_known = self._keys is not None and self._keys.knows(public)
        if not is_known:
            self._refusals.add(address.decode(errors="replace") or LOCAL, "key", f"its key is on no list: {public!r}")
        status = [b"200", b"OK", public.encode()] if is_known else [b"400", b"unknown key", b""]
        if self._zap is not None:
            self._zap.send_multipart([version, number, *status, b""])

    def _turn_away(self, fd: int) -> None:
        """There is no room: hang up. By now the descriptor may be another's: it must be one who came in here."""
        self._refusals.add(TOO_MANY, "full", f"at most {self._limit} connections are held at once")
        with suppress(OSError), borrowed(fd) as connection:
            if is_at(connection, self._endpoint):
                connection.shutdown(socket.SHUT_RDWR)


def property_of(message: zmq.Frame, name: int | str) -> Any:
    """What ZeroMQ knows of a message's connection; None where it knows nothing (garbage may pass for ZMTP 1.0)."""
    try:
        return message.get(name)
    except zmq.ZMQError:
        return None


def limit(either: Socket) -> None:
    """What a socket holds and waits for, at most."""
    either.setsockopt(zmq.LINGER, LINGER_MS)
    either.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    either.setsockopt(zmq.SNDHWM, CLIENT_AHEAD if either.type == zmq.DEALER else SEND_AHEAD)
    either.setsockopt(zmq.RCVHWM, READ_AHEAD)
    either.setsockopt(zmq.TCP_KEEPALIVE, 1)
    either.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
    either.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_S // 3)
    either.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)


def lock(listening: Socket, keys: Keyring) -> None:
    """A CURVE server: whoever connects must know our public key and have one that the door lets in."""
    listening.setsockopt(zmq.CURVE_SERVER, 1)
    listening.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret.encode())
    listening.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
    listening.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def knock(connecting: Socket, keys: Keyring, peer: str) -> None:
    """A CURVE client of that peer. Raises WireError when its key is not known."""
    connecting.setsockopt(zmq.CURVE_SERVERKEY, keys.key_of(peer).encode())
    connecting.setsockopt(zmq.CURVE_PUBLICKEY, keys.own.public.encode())
    connecting.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret.encode())


def room(n_files: int) -> int:
    """Connections that a process with so many descriptors holds at once."""
    return min(MAX_CONNECTIONS, n_files - n_files // SPARE)


def raise_file_limit() -> int:
    """As many descriptors as this process may have, up to what connections can need; the limit now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 2 * MAX_CONNECTIONS
    if soft == resource.RLIM_INFINITY or soft >= most:
        return most
    wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def is_at(connection: socket.socket, endpoint: str) -> bool:
    """Whether somebody else's connection came in at that endpoint of ours."""
    ours: tuple[object, ...] | str | bytes = connection.getsockname()
    port_or_path = str(ours[1]) if isinstance(ours, tuple) else str(ours)
    return port_or_path in (endpoint.rpartition(":")[2], endpoint.removeprefix("ipc://"))


@contextmanager
def borrowed(fd: int) -> Iterator[socket.socket]:
    """A descriptor of ZeroMQ's as a socket, without a copy (there may be no descriptor left) and without closing it."""
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=fd)
    try:
        yield connection
    finally:
        connection.detach()


def address_of(fd: int) -> str:
    """Who is at the other end of a descriptor of ZeroMQ's, as far as it is still there."""
    with suppress(OSError), borrowed(fd) as connection:
        name = connection.getpeername()
        return str(name[0]) if isinstance(name, tuple) else LOCAL
    return GONE


def _all(source: Socket | None) -> Iterator[list[bytes]]:
    """What is there to be received, up to `AT_ONCE`."""
    with suppress(zmq.Again):
        for _ in range(AT_ONCE if source is not None else 0):
            yield source.recv_multipart(zmq.NOBLOCK)  # type: ignore[union-attr]
