"""Sends and receives messages over ZeroMQ. All sockets belong to one thread.

The thread owns at most one listening ROUTER and one DEALER for each peer that this process connects to. The actor's
loop uses two queues, so heartbeats go out while the loop computes. Messages to a peer keep their order; those that wait
together leave as one ZeroMQ message (`wire/bundle.py`). Messages that a socket does not accept yet wait in the send
queue. Undeliverable and rejected messages are counted and logged once for each peer.
"""

import os
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import zmq

from areal_bus.authorization import authorise as authorise_role
from areal_bus.authorization import role_of
from areal_bus.errors import ConfigError, EndpointTaken, WireError
from areal_bus.messages import Disconnected, Message, Scored, Trajectory
from areal_bus.transport.curve import Keyring
from areal_bus.transport.listener import (
    LINGER_MS,
    READABLE,
    Listener,
    Socket,
    connect_curve,
    has_message,
    set_limits,
)
from areal_bus.transport.receiver import Authorise, Received, ReceiveQueue, Receiver
from areal_bus.transport.rejections import Rejection, Rejections
from areal_bus.transport.send_queue import SendQueues
from areal_bus.wire import codec

RETRY_S = 0.05  # interval of retries for peers of the ROUTER whose queue is full
TURN_S = 0.005  # maximum time to read one socket before heartbeats and sending get their turn
DENSE_S = 0.002  # iterations of the loop closer together than this are dense
MAX_DENSE = 3  # dense iterations without a pause
PAUSE_S = 0.001  # pause before each further dense iteration, so that it handles several messages
MAX_SOCKETS = 4096
WRITABLE = int(zmq.POLLOUT)  # as READABLE a plain integer: arithmetic with enums takes as long as a system call
RESENT = (Trajectory, Scored)  # the generator sends these again until the head acknowledges them


@dataclass(frozen=True, slots=True)
class Heartbeats:
    """The bus thread calls `make` every `every_s` and sends its message to `to`; None: to all peers of the ROUTER."""

    make: Callable[[], Message]
    every_s: float
    to: str | None = None


@dataclass(frozen=True, slots=True)
class BusOptions:
    """`authorise` decides which peer may send which message; the default is `areal_bus.authorization`, by role."""

    inbox_bytes: int = 256 << 20  # of received messages; more wait at their senders
    reports_disconnects: bool = False  # `receive` returns Disconnected for a ROUTER's peer, after its last message
    authorise: Authorise | None = None


DEFAULT = BusOptions()


class Bus:
    """Sends and receives messages by peer name. Thread-safe, except `receive`: one thread calls it."""

    def __init__(
        self,
        name: str,
        *,
        job: str,
        listen: str = "",
        heartbeats: Heartbeats | None = None,
        keys: Keyring | None = None,
        options: BusOptions = DEFAULT,
    ) -> None:
        """`name` begins with the role ("generator-0.1"). `listen` is an endpoint ("ipc://...", "tcp://ADDRESS:PORT",
        port 0 for a free one) or "" for none. With `keys` all connections use CURVE, and a key authenticates its own
        identities only. Raises EndpointTaken when the endpoint is taken, ConfigError when it can never be bound.
        """
        self.name = name
        self.job = job
        self._keys = keys
        self._identity = f"{name}/{secrets.token_hex(8)}".encode()  # unguessable, so no other connection can replace it
        self._heartbeats = heartbeats
        self.receive_queue = ReceiveQueue(options.inbox_bytes)
        self._reports_disconnects = options.reports_disconnects
        self._last_received: dict[str, float] = {}  # time of the last message, by peer of a DEALER
        self._read: dict[str, float] = {}  # by peer of a DEALER: everything received before this time has been read
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._orders: deque[Callable[[], None]] = deque()
        self._is_kicked = False  # woken, and not yet processing its orders
        self._dealers: dict[str, Socket] = {}
        self._dealer_at: dict[str, str] = {}
        self._closing: float | None = None
        self._error: BaseException | None = None
        self._rejections = Rejections(name)
        self._listener: Listener | None = None
        self._router = self._listen(listen) if listen else None
        self._receiver = Receiver(
            job,
            keys,
            self._listener,
            self._rejections,
            authorise=options.authorise or partial(authorise_role, role_of(name)),
            is_hog=self.receive_queue.is_hog,
        )
        self._round: tuple[float, frozenset[bytes]] = time.monotonic(), frozenset()  # its begin; connections ended then
        self.send_queues = SendQueues(
            name,
            self._router,
            self._dealers,
            self._receiver.clients,
            unreachable=self._receiver.lose,
        )
        self._thread = threading.Thread(target=self._run, name=f"bus {name}", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """The bound endpoint, with its port; "" when this bus does not listen."""
        return self._endpoint if self._router is not None else ""

    @property
    def refused(self) -> Counter[tuple[str, str]]:
        """Counts of rejected messages and connections, by peer and reason."""
        return self._rejections.counts

    def n_waiting(self, peer: str) -> int:
        """Bytes in the send queue of this peer. A sender that can wait stops at ROOM_BYTES."""
        return self.send_queues.n_bytes(peer)

    def rejections(self) -> list[Rejection]:
        """New rejections since the last call, for the journal."""
        return self._rejections.take()

    def allow(self, identity: str, public_key: str) -> None:
        """Let this key authenticate that identity ("generator-7"). Raises ConfigError when it is not a key."""
        if self._keys is None:
            raise ConfigError('key refused: bus.curve is "off", so connections use none')
        self._keys.allow(identity, public_key)

    def silence_s(self, peer: str) -> float:
        """Seconds since the last message of a peer of a DEALER; 0 before its first message and while the queue is full.

        Measured up to the last read of its socket: time in which this process was not scheduled does not count.
        """
        last = self._last_received.get(peer)
        return 0.0 if last is None or self.receive_queue.is_full else max(0.0, self._read.get(peer, last) - last)

    @property
    def until(self) -> float:
        """Since when each peer of the ROUTER is read up to date, or sent a message. For the receiving thread."""
        return self.receive_queue.until

    def connect(self, peer: str, endpoint: str) -> None:
        """Connect a DEALER to `peer`. Another endpoint replaces the connection."""
        self._order(lambda: self._connect(peer, endpoint))

    def disconnect(self, peer: str) -> None:
        """Close the DEALER. Messages that its socket does not accept are dropped."""
        self._order(lambda: self._disconnect(peer))

    def send(self, to: str, message: Message) -> None:
        """Send by the DEALER of that name, otherwise by the ROUTER. Never blocks.

        A message that cannot be encoded is dropped and counted as undelivered. Whoever can repair such a message checks
        it first (`codec.check`).
        """
        self._order(self._sending(to, message))

    def send_all(self, messages: Iterable[tuple[str, Message]]) -> None:
        """As `send`, with one wake-up of the receiver. Each peer receives its messages in order."""
        orders = [self._sending(to, message) for to, message in messages]
        if orders:
            self._orders.extend(orders)
            self._kick()

    def receive(
        self, timeout_s: float | None = None, *, skips: Callable[[str], bool] | None = None
    ) -> tuple[str, Message] | None:
        """Next sender and message, in turn; None after `timeout_s` (None: no limit). `skips`: senders that wait."""
        received = self.receive_queue.take(timeout_s, skips=skips)
        if self._error is not None:
            raise self._error
        if received is None:
            return None
        if self.receive_queue.consume(received):
            self._kick()
        return received[:2]

    def wake(self) -> None:
        """Make a waiting `receive` return None. Callable from any thread."""
        self.receive_queue.wake()

    def close(self, linger_s: float = 1.0) -> None:
        """Send queued messages for at most `linger_s`, then end the thread."""
        if self._thread.is_alive():
            deadline = time.monotonic() + linger_s
            self._order(lambda: setattr(self, "_closing", deadline))
            self._thread.join()
            os.close(self._wake_fd)

    # bus thread only from here on, except _sending, _order and _kick

    def _sending(self, to: str, message: Message) -> Callable[[], None]:
        """The call that queues this message, or counts it as undelivered."""
        try:
            frames = codec.encode(message, job=self.job)
        except WireError as error:
            why = f"{type(message).__name__} cannot be sent: {error}"
            return lambda: self.send_queues.refuse(to, why)
        return self.send_queues.enqueue(to, frames, is_resent=isinstance(message, RESENT))

    def _order(self, act: Callable[[], None]) -> None:
        self._orders.append(act)
        self._kick()

    def _kick(self) -> None:
        """Wake the bus thread, once until it runs: each write would cost an iteration."""
        if not self._is_kicked and self._thread.is_alive():
            self._is_kicked = True
            os.eventfd_write(self._wake_fd, 1)

    def _listen(self, endpoint: str) -> Socket:
        router = self._context.socket(zmq.ROUTER)
        set_limits(router)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer that reconnects replaces its old connection
        self._listener = Listener(self._context, router, self._keys, self._rejections)
        try:
            self._endpoint = self._listener.open(endpoint)
        except zmq.ZMQError as error:
            self._listener.close()
            router.close()
            self._context.term()
            os.close(self._wake_fd)
            what = f"{self.name} must listen on {endpoint}: {error.strerror}"
            if error.errno == zmq.EADDRINUSE:
                raise EndpointTaken(f"{what}; start the job again") from None
            raise ConfigError(what) from None
        return router

    def _connect(self, peer: str, endpoint: str) -> None:
        if self._dealer_at.get(peer) == endpoint:
            return
        self._disconnect(peer)
        dealer = self._context.socket(zmq.DEALER)
        set_limits(dealer)
        dealer.setsockopt(zmq.IDENTITY, self._identity)
        try:
            if self._keys is not None:
                connect_curve(dealer, self._keys, peer)
            dealer.connect(endpoint)
        except (WireError, zmq.ZMQError) as error:  # the endpoint came from another process
            dealer.close()
            self._rejections.add(peer, "endpoint", f"its endpoint {endpoint[:80]!r} cannot be reached: {error}")
            return
        self._dealers[peer] = dealer
        self._dealer_at[peer] = endpoint

    def _disconnect(self, peer: str) -> None:
        dealer = self._dealers.get(peer)
        if dealer is not None:
            self.send_queues.drop_peer(peer)
            del self._dealers[peer], self._dealer_at[peer]
            self._receiver.forget(dealer)
            dealer.close(LINGER_MS)

    def _run(self) -> None:
        """The thread. Its error is raised by the next `receive`."""
        try:
            self._serve()
        except BaseException as error:  # noqa: BLE001 - raised again in `receive`
            self._error = error
            self.wake()
        finally:
            if self._listener is not None:
                self._listener.close()
            for socket in [*self._dealers.values(), *([self._router] if self._router else [])]:
                socket.close(LINGER_MS)
            self._context.term()

    def _serve(self) -> None:
        next_heartbeat = ended = time.monotonic()
        n_dense = 0
        while not self._is_done():
            if self._heartbeats is not None and time.monotonic() >= next_heartbeat:
                self._send_heartbeats(self._heartbeats)
                next_heartbeat = time.monotonic() + self._heartbeats.every_s
            if n_dense > MAX_DENSE and self._closing is None:
                time.sleep(PAUSE_S)
            self._poll(max(0.0, next_heartbeat - time.monotonic()) if self._heartbeats is not None else 1.0)
            for _ in range(len(self._orders)):  # not the ones added meanwhile: posted messages must be flushed
                self._orders.popleft()()
            self.send_queues.flush()
            before, ended = ended, time.monotonic()
            n_dense = n_dense + 1 if ended - before < DENSE_S else 0

    def _is_done(self) -> bool:
        is_sent = not (self.send_queues.waiting or self._orders)
        return self._closing is not None and (is_sent or time.monotonic() >= self._closing)

    def _send_heartbeats(self, heartbeats: Heartbeats) -> None:
        if heartbeats.to is None:
            peers = sorted(self._receiver.clients)
        else:
            peers = [heartbeats.to] if heartbeats.to in self._dealers else []
        peers = [peer for peer in peers if peer not in self.send_queues.waiting]  # heartbeats do not accumulate
        if peers:
            message = heartbeats.make()
            for peer in peers:
                self._sending(peer, message)()
            self.send_queues.flush()

    def _poll(self, timeout_s: float) -> None:
        reading = READABLE if self._may_read else 0  # I9
        dealers = list(self._dealers.items())
        if self._receiver.has_unreachable or any(peer not in self._dealers for peer in self.send_queues.waiting):
            timeout_s = min(timeout_s, RETRY_S)
        watched = self._watched(reading)
        ready: dict[Socket | int, int] = dict(zmq.zmq_poll(watched, round(timeout_s * 1000 + 0.5)))
        moment = time.monotonic()
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
            self._is_kicked = False  # before the orders are read, so that none is missed
        if self._listener is not None:
            self._listener.poll_events()
        for peer, dealer in dealers:
            if reading and (not ready.get(dealer, 0) & READABLE or self._drain(dealer, peer)):
                self._read[peer] = moment
        if self._router is not None and self._listener is not None and reading:
            self._read_router(self._router, self._listener, moment)

    def _read_router(self, router: Socket, listener: Listener, moment: float) -> None:
        """Read the ROUTER. Once all that arrived before a moment is read, report that moment and connections that had
        ended by then. A peer that never pauses does not put this off.
        """
        if self._drain(router, None):
            ended = listener.take_ended()
        elif self._receiver.is_round_over:
            moment, ended_then = self._round
            ended = listener.take_ended(among=ended_then)
        else:
            return
        self._receiver.end_connections(ended)
        self.receive_queue.put(self._disconnected())
        self.receive_queue.mark_complete(moment)
        self._receiver.begin_round()
        self._round = time.monotonic(), listener.ended

    @property
    def _may_read(self) -> bool:
        """Whether the inbox has room, or has none because of one of several peers."""
        queue = self.receive_queue
        return not queue.is_full or (len(self._receiver.clients) > 1 and queue.has_hog)

    def _watched(self, reading: int) -> list[tuple[Socket | int, int]]:
        """What to poll, with the events to wait for. `reading`: READABLE or 0, for sockets that carry messages."""
        waiting = self.send_queues.waiting
        found: list[tuple[Socket | int, int]] = [(self._wake_fd, READABLE)]
        for peer, dealer in self._dealers.items():
            if events := reading | (WRITABLE if peer in waiting else 0):
                found.append((dealer, events))
        if self._router is not None and reading:
            found.append((self._router, reading))
        if self._listener is not None:
            found += [(own, READABLE) for own in self._listener.sockets]
        return found

    def _drain(self, socket: Socket, peer: str | None) -> bool:
        """Read a socket until it is empty, the queue is full or TURN_S is over. Returns whether it is empty."""
        batch: list[Received] = []
        is_all, until = False, time.monotonic() + TURN_S
        while not is_all and self._may_read and time.monotonic() < until:
            if not has_message(socket):
                is_all = True
                break
            try:
                received = (
                    self._receiver.from_client(socket) if peer is None else self._receiver.from_server(socket, peer)
                )
                batch += self._disconnected()
                self.receive_queue.count(received)
                batch += received
                if peer is not None:
                    self._last_received[peer] = time.monotonic()
            except zmq.Again:
                is_all = True
        self.receive_queue.put(batch)
        return is_all

    def _disconnected(self) -> list[Received]:
        """Disconnected for each ended connection, after its last message."""
        names, self._receiver.disconnected = self._receiver.disconnected, []
        return [(name, Disconnected(), 0) for name in names] if self._reports_disconnects else []
