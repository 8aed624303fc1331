"""ZeroMQ behind one small object with a thread of its own; knows messages only as what `wire` and `intake` let pass.

One thread owns every socket: at most one ROUTER that listens, and a DEALER for each peer it connected to. The actor's
loop talks to it through two queues, so heartbeats go out while the loop computes. What there is for a peer at a time
leaves as one ZeroMQ message (`bundle`), in order. Nothing is dropped in silence: what a socket does not take waits in
the outbox; what cannot be delivered or is refused is counted and named once.
"""

import os
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial

import zmq

from areal_bus.authorization import authorise as authorise_role
from areal_bus.authorization import role_of
from areal_bus.errors import ConfigError, WireError
from areal_bus.messages import Disconnected, Message, Scored, Trajectory
from areal_bus.transport.curve import Keyring
from areal_bus.transport.listener import LINGER_MS, Listener, Socket, knock, limit
from areal_bus.transport.receive_queue import ReceiveQueue
from areal_bus.transport.receiver import Authorise, Received, Receiver
from areal_bus.transport.rejections import Rejection, Rejections
from areal_bus.transport.send_queue import SendQueues
from areal_bus.wire import codec

RETRY_S = 0.05  # a ROUTER's full peer is tried again after this
TURN_S = 0.005  # longest time that one socket is read while what was read, heartbeats and sending wait
DENSE_S = 0.002  # turns that follow each other faster are dense; the first LONE of them are taken as they come
LONE = 3
GATHER_S = 0.001  # pause before each further one: what comes or goes meanwhile costs one turn, not one each
MAX_SOCKETS = 4096
SENT_AGAIN = (Trajectory, Scored)  # by the generator, until the head has acknowledged it


class Bus:
    """Send and receive messages by the peers' names. All methods may be called from any thread but `receive`: one."""

    def __init__(
        self,
        name: str,
        *,
        job: str,
        listen: str = "",
        heartbeat: Callable[[], Message] | None = None,
        heartbeat_to: str | None = None,
        heartbeat_s: float = 1.0,
        inbox_bytes: int = 256 << 20,
        keys: Keyring | None = None,
        tells_gone: bool = False,
        authorise: Authorise | None = None,
    ) -> None:
        """`listen` is an endpoint ("ipc://...", "tcp://ADDRESS:PORT", port 0 for a free one) or "" for none.

        `heartbeat` is called on the bus thread every `heartbeat_s` and its message sent to `heartbeat_to`, or to every
        peer heard on the ROUTER when that is None. With `keys` all connections are CURVE's, and a key speaks as its own
        seats only. `tells_gone`: `receive` says Gone for a peer of the ROUTER whose connection has ended, in its turn.
        `authorise` decides which peer may send what; by default `areal_bus.authorization`, by the role in `name`.
        Raises ConfigError when the endpoint cannot be bound.
        """
        self.name = name
        self.job = job
        self._keys = keys
        self._identity = f"{name}/{secrets.token_hex(8)}".encode()  # nobody can guess it, and so take its place
        self._heartbeat = heartbeat
        self._heartbeat_to = heartbeat_to
        self._heartbeat_s = heartbeat_s
        self.inbox = ReceiveQueue(inbox_bytes)
        self._tells_gone = tells_gone
        self._last_heard: dict[str, float] = {}  # of those it connected to: monotonic seconds
        self._read: dict[str, float] = {}  # of these: all that came before this moment is read
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._orders: deque[Callable[[], None]] = deque()
        self._is_kicked = False  # and has not begun to look at its orders since
        self._dealers: dict[str, Socket] = {}
        self._dealer_at: dict[str, str] = {}
        self._closing: float | None = None
        self._error: BaseException | None = None
        self._refusals = Rejections(name)
        self._door: Listener | None = None
        self._router = self._listen(listen) if listen else None
        self._intake = Receiver(
            job, keys, self._door, self._refusals, authorise=authorise or partial(authorise_role, role_of(name))
        )
        self.outbox = SendQueues(name, self._router, self._dealers, self._intake.heard)
        self._thread = threading.Thread(target=self._run, name=f"bus {name}", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """Where it listens in truth (with the port chosen); "" when it does not."""
        return self._endpoint if self._router is not None else ""

    @property
    def refused(self) -> Counter[tuple[str, str]]:
        """How often something was refused, by peer and reason."""
        return self._refusals.counts

    def n_waiting(self, peer: str) -> int:
        """Bytes that were sent to it and that ZeroMQ has not taken. From ROOM_BYTES on, who can wait sends no more."""
        return self.outbox.n_bytes(peer)

    def refusals(self) -> list[Rejection]:
        """What there is to report of that since the last call, for a journal."""
        return self._refusals.take()

    def allow(self, seat: str, public_key: str) -> None:
        """From now on that key speaks as that seat ("generator-7"). Raises ConfigError when it is no key."""
        if self._keys is None:
            raise ConfigError('a key is allowed where keys are asked for: here bus.curve is "off"')
        self._keys.allow(seat, public_key)

    def silence_s(self, peer: str) -> float:
        """How long nothing has come from one that it connected to; 0 before its first word, and with a full inbox.

        Up to the last look at its socket: what waited there while this process was not scheduled is no silence.
        """
        heard = self._last_heard.get(peer)
        return 0.0 if heard is None or self.inbox.is_full else max(0.0, self._read.get(peer, heard) - heard)

    @property
    def until(self) -> float:
        """All that came in before this moment has been received. For the thread that receives."""
        return self.inbox.until

    def connect(self, peer: str, endpoint: str) -> None:
        """A DEALER to `peer`; connecting again to another endpoint replaces it."""
        self._order(lambda: self._connect(peer, endpoint))

    def disconnect(self, peer: str) -> None:
        """Close the DEALER; what its socket does not take any more is dropped."""
        self._order(lambda: self._disconnect(peer))

    def send(self, to: str, message: Message) -> None:
        """By the DEALER of that name, else by the ROUTER to who is heard under it. Never blocks. Raises WireError."""
        frames = codec.encode(message, job=self.job)
        self._order(self.outbox.letter(to, frames, is_kept=isinstance(message, SENT_AGAIN)))

    def send_all(self, letters: Iterable[tuple[str, Message]]) -> None:
        """As `send` of each in turn; but they leave together, so that who gets them is woken once, not for each. Each
        peer's come in their order.

        Raises WireError when those before the wrong one are sent.
        """
        orders: list[Callable[[], None]] = []
        try:
            for to, message in letters:
                frames = codec.encode(message, job=self.job)
                orders.append(self.outbox.letter(to, frames, is_kept=isinstance(message, SENT_AGAIN)))
        finally:
            self._orders.extend(orders)
            if orders:
                self._kick()

    def receive(self, timeout_s: float | None = None) -> tuple[str, Message] | None:
        """Next message and its sender's name; None after `timeout_s` (0: only what is there; None: wait)."""
        received = self.inbox.take(timeout_s)
        if self._error is not None:
            raise self._error
        if received is None:
            return None
        if self.inbox.consume(received[2]):
            self._kick()
        return received[:2]

    def wake(self) -> None:
        """Let a `receive` that waits return None at once; callable from any thread."""
        self.inbox.wake()

    def close(self, linger_s: float = 1.0) -> None:
        """Send what is queued for at most `linger_s`, then end the thread."""
        if self._thread.is_alive():
            deadline = time.monotonic() + linger_s
            self._order(lambda: setattr(self, "_closing", deadline))
            self._thread.join()
            os.close(self._wake_fd)

    # from here on: the bus thread only (but _order, _kick)

    def _order(self, act: Callable[[], None]) -> None:
        self._orders.append(act)
        self._kick()

    def _kick(self) -> None:
        """Once until it looks: a write for each order is a turn for each."""
        if not self._is_kicked and self._thread.is_alive():
            self._is_kicked = True
            os.eventfd_write(self._wake_fd, 1)

    def _listen(self, endpoint: str) -> Socket:
        router = self._context.socket(zmq.ROUTER)
        limit(router)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # who connects again is not shut out by its old connection
        self._door = Listener(self._context, router, self._keys, self._refusals)
        try:
            self._endpoint = self._door.open(endpoint)
        except zmq.ZMQError as error:
            self._door.close()
            router.close()
            self._context.term()
            os.close(self._wake_fd)
            what = f"{self.name} must listen on {endpoint}: {error.strerror}"
            raise ConfigError(f"{what}; choose another bus.port (0: a free one)") from None
        return router

    def _connect(self, peer: str, endpoint: str) -> None:
        if self._dealer_at.get(peer) == endpoint:
            return
        self._disconnect(peer)
        dealer = self._context.socket(zmq.DEALER)
        limit(dealer)
        dealer.setsockopt(zmq.IDENTITY, self._identity)
        try:
            if self._keys is not None:
                knock(dealer, self._keys, peer)
            dealer.connect(endpoint)
        except (WireError, zmq.ZMQError) as error:  # somebody else has told us of it
            dealer.close()
            self._refusals.add(peer, "endpoint", f"it cannot be reached at {endpoint[:80]!r}: {error}")
            return
        self._dealers[peer] = dealer
        self._dealer_at[peer] = endpoint

    def _disconnect(self, peer: str) -> None:
        dealer = self._dealers.get(peer)
        if dealer is not None:
            self.outbox.let_go(peer)
            del self._dealers[peer], self._dealer_at[peer]
            self._intake.forget(dealer)
            dealer.close(LINGER_MS)

    def _run(self) -> None:
        """The thread: what ends it in error is raised in the next `receive`."""
        try:
            self._serve()
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is raised where it is heard
            self._error = error
            self.wake()
        finally:
            if self._door is not None:
                self._door.close()
            for socket in [*self._dealers.values(), *([self._router] if self._router else [])]:
                socket.close(LINGER_MS)
            self._context.term()

    def _serve(self) -> None:
        next_beat = ended = time.monotonic()
        n_dense = 0
        while not self._is_done():
            if self._heartbeat is not None and time.monotonic() >= next_beat:
                self._beat(self._heartbeat)
                next_beat = time.monotonic() + self._heartbeat_s
            if n_dense > LONE and self._closing is None:
                time.sleep(GATHER_S)
            self._poll(max(0.0, next_beat - time.monotonic()) if self._heartbeat is not None else 1.0)
            for _ in range(len(self._orders)):  # not those that come meanwhile: what is posted is to leave
                self._orders.popleft()()
            self.outbox.flush()
            before, ended = ended, time.monotonic()
            n_dense = n_dense + 1 if ended - before < DENSE_S else 0

    def _is_done(self) -> bool:
        is_sent = not (self.outbox.waiting or self._orders)
        return self._closing is not None and (is_sent or time.monotonic() >= self._closing)

    def _beat(self, heartbeat: Callable[[], Message]) -> None:
        if self._heartbeat_to is None:
            peers = sorted(self._intake.heard)
        else:
            peers = [self._heartbeat_to] if self._heartbeat_to in self._dealers else []
        peers = [peer for peer in peers if peer not in self.outbox.waiting]  # no pile of heartbeats
        if peers:
            frames = codec.encode(heartbeat(), job=self.job)
            for peer in peers:
                self.outbox.letter(peer, frames)()
            self.outbox.flush()

    def _poll(self, timeout_s: float) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_fd, zmq.POLLIN)
        reading = 0 if self.inbox.is_full else zmq.POLLIN  # I9
        dealers = {dealer: peer for peer, dealer in self._dealers.items()}
        for dealer, peer in dealers.items():
            events = reading | (zmq.POLLOUT if peer in self.outbox.waiting else 0)
            if events:
                poller.register(dealer, events)
        if self._router is not None and reading:
            poller.register(self._router, zmq.POLLIN)
        for socket in self._door.sockets if self._door is not None else ():
            poller.register(socket, zmq.POLLIN)
        if any(peer not in self._dealers for peer in self.outbox.waiting):
            timeout_s = min(timeout_s, RETRY_S)
        ready = dict(poller.poll(round(timeout_s * 1000 + 0.5)))
        moment = time.monotonic()
        if ready.get(self._wake_fd):
            os.eventfd_read(self._wake_fd)
            self._is_kicked = False  # before orders are looked at: none comes in between unseen
        if self._door is not None:
            self._door.look()
        for dealer, peer in dealers.items():
            if reading and (not ready.get(dealer, 0) & zmq.POLLIN or self._drain(dealer, peer)):
                self._read[peer] = moment
        if self._router is not None and reading and self._drain(self._router, None) and self._door is not None:
            self._intake.end(self._door.nothing_is_left_to_read())
            self.inbox.put(self._gone())
            self.inbox.is_whole(moment)

    def _drain(self, socket: Socket, peer: str | None) -> bool:
        """Take what is there, up to the inbox's cap and for one turn's time; whether that was all."""
        some: list[Received] = []
        is_all, until = False, time.monotonic() + TURN_S
        while not (is_all or self.inbox.is_full) and time.monotonic() < until:
            try:
                received = self._intake.from_client(socket) if peer is None else self._intake.from_server(socket, peer)
                some += self._gone()
                self.inbox.count(sum(n_bytes for _, _, n_bytes in received))
                some += received
                if peer is not None:
                    self._last_heard[peer] = time.monotonic()
            except zmq.Again:
                is_all = True
        self.inbox.put(some)
        return is_all

    def _gone(self) -> list[Received]:
        """Whoever has gone, after all that they had said."""
        names, self._intake.gone = self._intake.gone, []
        return [(name, Disconnected(), 0) for name in names] if self._tells_gone else []
