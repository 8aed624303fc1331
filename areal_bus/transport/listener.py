"""Accepts connections: authenticates them by CURVE key (ZAP, RFC 27) and enforces the connection limit.

ZeroMQ closes those without ZMTP or key; this counts those that end before their first message.
"""

import socket
import struct
from collections import deque
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress
from typing import Any

import zmq
from zmq.utils import z85

from areal_bus.process.isolation import raise_file_limit
from areal_bus.transport.curve import Keyring
from areal_bus.transport.rejections import Rejections
from areal_bus.wire.codec import MAX_FRAME_BYTES

BACKLOG = 1024  # pending connections
HANDSHAKE_MS = 10_000  # time limit of a handshake
MAX_CONNECTIONS = 8192  # each costs a file descriptor and about 20 KiB
SPARE = 4  # one descriptor in SPARE stays free for other files and for connections that are being closed
SEND_AHEAD = 256  # messages in ZeroMQ's queue from a ROUTER to one peer; further ones wait in our send queue
CLIENT_AHEAD = 64  # the same for a DEALER, whose trajectories are long
READ_AHEAD = 128  # messages that ZeroMQ reads ahead from one peer; further ones wait at the peer
KEEPALIVE_S = 30  # TCP keepalive of idle connections
LINGER_MS = 200  # never 0 while a message may be half sent: if its connection breaks then, libzmq 4.3.5 aborts
LOCAL = "a local process"  # a peer over ipc has no address
UNLOGGED = 10  # handshakes that local processes broke off: one that ends while it connects is no fault
GONE = "unknown address"  # the connection ended before its address was read
MAX_EVENTS = 1000  # maximum events that are handled before messages are read
TOO_MANY = "too many at once"
DOMAIN = b"areal-bus"

READABLE = int(zmq.POLLIN)

Socket = zmq.Socket[bytes]


class Listener:
    """Admission to one ROUTER. All calls come from the thread that owns it."""

    def __init__(
        self, context: "zmq.Context[Socket]", router: Socket, keys: Keyring | None, rejections: Rejections
    ) -> None:
        """Create it before the ROUTER binds."""
        self._router, self._keys, self._rejections = router, keys, rejections
        self._new: dict[int, str] = {}  # connections before their first message: descriptor -> address
        self._left: deque[tuple[int, str]] = deque()  # connections that ended before their first message
        self._active: dict[int, bytes] = {}  # connections after their first message, by descriptor
        self._ended: set[bytes] = set()  # those of them that have ended
        self._n_open = 0
        self._limit = max_connections(raise_file_limit(2 * MAX_CONNECTIONS))
        self._endpoint = ""
        router.setsockopt(zmq.BACKLOG, BACKLOG)
        router.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._zap: Socket | None = None
        if keys is not None:
            self._zap = context.socket(zmq.REP)
            self._zap.bind("inproc://zeromq.zap.01")
            serve_curve(router, keys)
        monitored = f"inproc://listener-{id(self)}"
        router.monitor(monitored, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._monitor: Socket = context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.RCVHWM, 0)  # unlimited: otherwise ZeroMQ's own thread would wait for us
        self._monitor.connect(monitored)

    def open(self, endpoint: str) -> str:
        """Bind and return the bound endpoint. Raises ZMQError."""
        self._router.bind(endpoint[:-1] + "*" if endpoint.startswith("tcp:") and endpoint.endswith(":0") else endpoint)
        bound: bytes = self._router.getsockopt(zmq.LAST_ENDPOINT)  # type: ignore[assignment]
        self._endpoint = bound.rstrip(b"\0").decode()
        return self._endpoint

    @property
    def sockets(self) -> list[Socket]:
        """Sockets to poll. Call `poll_events` when one is ready, and before the ROUTER is read."""
        return [self._monitor, *([self._zap] if self._zap is not None else [])]

    def poll_events(self) -> None:
        """Answer key requests and record opened and closed connections."""
        for request in _all(self._zap):
            self._answer(request)
        for event in _all(self._monitor):
            kind, fd = struct.unpack("=Hi", event[0])
            if kind == zmq.EVENT_ACCEPTED:
                self._n_open += 1
                self._new[fd] = address_of(fd)
                if self._n_open > self._limit:
                    self._close_excess(fd)
            elif kind == zmq.EVENT_DISCONNECTED:
                self._n_open -= 1
                if fd in self._active:
                    self._ended.add(self._active.pop(fd))
                if fd in self._new:
                    self._left.append((fd, self._new.pop(fd)))

    def note_message(self, message: zmq.Frame, connection: bytes) -> bool:
        """Record a message by its first frame. Returns whether its peer reconnected: messages in flight are lost."""
        fd = property_of(message, zmq.SRCFD)
        if fd is None or self._active.get(fd) == connection:
            return False
        self.poll_events()  # its connection event comes before its message
        self._left = deque(item for item in self._left if item[0] != fd)
        if fd not in self._new:  # closed before its message was read
            self._ended.add(connection)
            return False
        del self._new[fd]
        before = [other for other, known in self._active.items() if known == connection]
        for other in before:  # ZeroMQ sends no event for a replaced connection
            del self._active[other]
        has_reconnected = bool(before) or connection in self._ended
        self._ended.discard(connection)
        self._active[fd] = connection
        return has_reconnected

    @property
    def ended(self) -> frozenset[bytes]:
        """Connections that have ended and were not taken."""
        return frozenset(self._ended)

    def take_ended(self, among: Set[bytes] | None = None) -> Set[bytes]:
        """Connections that ended since the last call, or those of `among`. Call it after all their messages are read.

        Without `among`, connections that ended without a message are recorded as rejections.
        """
        while self._left and among is None:
            _, address = self._left.popleft()
            rule = "a connection needs ZMTP, an accepted key and a first message"
            n_unlogged = UNLOGGED if address in (LOCAL, GONE) else 0
            self._rejections.add(address, "handshake", rule, n_unlogged=n_unlogged)
        taken = self._ended if among is None else self._ended & among
        self._ended = self._ended - taken
        return taken

    def close(self) -> None:
        self.poll_events()
        self._router.disable_monitor()
        for own in self.sockets:
            own.close(linger=0)

    def _answer(self, request: list[bytes]) -> None:
        """RFC 27: version, request id, domain, address, identity, mechanism, credentials."""
        version, number, _, address, _, mechanism, *credentials = request
        public = z85.encode(credentials[0]).decode() if mechanism == b"CURVE" and credentials else ""
        is_known = self._keys is not None and self._keys.knows(public)
        if not is_known:
            peer = address.decode(errors="replace") or LOCAL
            self._rejections.add(peer, "key", f"a key must be on the allow-list; {public!r} is not")
        status = [b"200", b"OK", public.encode()] if is_known else [b"400", b"unknown key", b""]
        if self._zap is not None:
            self._zap.send_multipart([version, number, *status, b""])

    def _close_excess(self, fd: int) -> None:
        """Close a connection above the limit. Checks that the descriptor is still a connection of this endpoint."""
        self._rejections.add(TOO_MANY, "full", f"at most {self._limit} connections may be open")
        with suppress(OSError), borrowed(fd) as connection:
            if is_at(connection, self._endpoint):
                connection.shutdown(socket.SHUT_RDWR)


def property_of(message: zmq.Frame, name: int | str) -> Any:
    """Property of the connection of a message; None if ZeroMQ has none (garbage can pass as ZMTP 1.0)."""
    try:
        return message.get(name)
    except zmq.ZMQError:
        return None


def set_limits(sock: Socket) -> None:
    """Set queue, size and time limits of a socket."""
    sock.setsockopt(zmq.LINGER, LINGER_MS)
    sock.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    sock.setsockopt(zmq.SNDHWM, CLIENT_AHEAD if sock.type == zmq.DEALER else SEND_AHEAD)
    sock.setsockopt(zmq.RCVHWM, READ_AHEAD)
    sock.setsockopt(zmq.TCP_KEEPALIVE, 1)
    sock.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
    sock.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_S // 3)
    sock.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)


def serve_curve(listening: Socket, keys: Keyring) -> None:
    """Make this socket a CURVE server: a client needs our public key and a key on the allow-list."""
    listening.setsockopt(zmq.CURVE_SERVER, 1)
    listening.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret.encode())
    listening.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
    listening.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def connect_curve(connecting: Socket, keys: Keyring, peer: str) -> None:
    """Make this socket a CURVE client of that peer. Raises WireError when the key of the peer is unknown."""
    connecting.setsockopt(zmq.CURVE_SERVERKEY, keys.key_of(peer).encode())
    connecting.setsockopt(zmq.CURVE_PUBLICKEY, keys.own.public.encode())
    connecting.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret.encode())


def max_connections(n_files: int) -> int:
    """Maximum connections of a process with `n_files` descriptors."""
    return min(MAX_CONNECTIONS, n_files - n_files // SPARE)


def is_at(connection: socket.socket, endpoint: str) -> bool:
    """Whether this accepted connection belongs to our endpoint."""
    ours: tuple[object, ...] | str | bytes = connection.getsockname()
    port_or_path = str(ours[1]) if isinstance(ours, tuple) else str(ours)
    return port_or_path in (endpoint.rpartition(":")[2], endpoint.removeprefix("ipc://"))


@contextmanager
def borrowed(fd: int) -> Iterator[socket.socket]:
    """A descriptor of ZeroMQ as a socket. Not duplicated (no descriptor may be free) and not closed."""
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=fd)
    try:
        yield connection
    finally:
        connection.detach()


def address_of(fd: int) -> str:
    """Address of the peer of a ZeroMQ descriptor; GONE when the connection has ended."""
    with suppress(OSError), borrowed(fd) as connection:
        name = connection.getpeername()
        return str(name[0]) if isinstance(name, tuple) else LOCAL
    return GONE


def _all(source: Socket | None) -> Iterator[list[bytes]]:
    """Pending messages, up to MAX_EVENTS."""
    for _ in range(MAX_EVENTS if source is not None else 0):
        if not has_message(source):  # type: ignore[arg-type]
            return
        yield source.recv_multipart(zmq.NOBLOCK)  # type: ignore[union-attr]


def has_message(sock: Socket) -> bool:
    """Whether a message can be received now. An attempt would raise zmq.Again, which takes three times as long."""
    return bool(int(sock.getsockopt(zmq.EVENTS)) & READABLE)
