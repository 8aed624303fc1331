"""ZeroMQ behind one small object with a thread of its own; knows messages only as what `wire` encodes and decodes.

One thread owns every socket: at most one ROUTER that listens, and a DEALER for each peer it connected to. The actor's
loop talks to it through two queues, so heartbeats go out while the loop computes. Nothing is dropped in silence: what a
socket does not take waits here, in order; what cannot be delivered is counted and named once.
"""

import os
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable

import zmq
from loguru import logger

from areal_bus import wire
from areal_bus.errors import ConfigError, WireError
from areal_bus.messages import Message

RETRY_S = 0.05  # a ROUTER's full peer is tried again after this
MAX_SOCKETS = 4096
HIGH_WATER = 1000  # messages in ZeroMQ's own queue to one peer; more wait in ours
BACKLOG = 1024  # connections that may ask at once

Frames = list[bytes]


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
    ) -> None:
        """`listen` is an endpoint ("ipc://...", "tcp://ADDRESS:PORT", port 0 for a free one) or "" for none.

        `heartbeat` is called on the bus thread every `heartbeat_s` and its message sent to `heartbeat_to`, or to every
        peer heard on the ROUTER when that is None. Raises ConfigError when the endpoint cannot be bound.
        """
        self.name = name
        self.job = job
        self.refused: Counter[str] = Counter()  # bytes that were no message, by peer
        self.undelivered: Counter[str] = Counter()  # messages to peers that are gone
        self._heartbeat = heartbeat
        self._heartbeat_to = heartbeat_to
        self._heartbeat_s = heartbeat_s
        self._cap = inbox_bytes
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._orders: deque[Callable[[], None]] = deque()
        self._inbox: queue.SimpleQueue[tuple[str, Message, int] | None] = queue.SimpleQueue()
        self._received = self._consumed = 0  # bytes; each written by one thread only
        self._dealers: dict[str, zmq.Socket[bytes]] = {}
        self._dealer_at: dict[str, str] = {}
        self._heard: set[str] = set()  # peers of the ROUTER
        self._waiting: dict[str, deque[Frames]] = {}  # what sockets did not take yet
        self._closing: float | None = None
        self._error: BaseException | None = None
        self._router = self._listen(listen) if listen else None
        self._thread = threading.Thread(target=self._run, name=f"bus {name}", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """Where it listens in truth (with the port chosen); "" when it does not."""
        return self._endpoint if self._router is not None else ""

    def connect(self, peer: str, endpoint: str) -> None:
        """A DEALER to `peer`; connecting again to another endpoint replaces it."""
        self._order(lambda: self._connect(peer, endpoint))

    def disconnect(self, peer: str) -> None:
        """Close the DEALER; what was unsent is dropped."""
        self._order(lambda: self._disconnect(peer))

    def send(self, to: str, message: Message) -> None:
        """Queue a message: by the DEALER of that name, else by the ROUTER to the peer heard under it. Never blocks.

        Raises WireError when the message is over a cap.
        """
        frames = wire.encode(message, job=self.job)
        self._order(lambda: self._post(to, frames))

    def receive(self, timeout_s: float | None = None) -> tuple[str, Message] | None:
        """Next message and its sender's name; None after `timeout_s` (0: only what is there; None: wait)."""
        try:
            item = self._inbox.get(block=timeout_s != 0, timeout=timeout_s or None)
        except queue.Empty:
            item = None
        if self._error is not None:
            raise self._error
        if item is None:
            return None
        sender, message, n_bytes = item
        was_full = self._is_full
        self._consumed += n_bytes
        if was_full and not self._is_full:
            self._kick()
        return sender, message

    def wake(self) -> None:
        """Let a `receive` that waits return None at once; callable from any thread."""
        self._inbox.put(None)

    def close(self, linger_s: float = 1.0) -> None:
        """Send what is queued for at most `linger_s`, then end the thread."""
        if self._thread.is_alive():
            deadline = time.monotonic() + linger_s
            self._order(lambda: setattr(self, "_closing", deadline))
            self._thread.join()
            os.close(self._wake_fd)

    # from here on: the bus thread only (but _order, _kick, _is_full)

    def _order(self, act: Callable[[], None]) -> None:
        self._orders.append(act)
        self._kick()

    def _kick(self) -> None:
        if self._thread.is_alive():
            os.eventfd_write(self._wake_fd, 1)

    @property
    def _is_full(self) -> bool:
        return self._received - self._consumed > self._cap

    def _listen(self, endpoint: str) -> "zmq.Socket[bytes]":
        router = self._context.socket(zmq.ROUTER)
        self._limit(router)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.BACKLOG, BACKLOG)
        try:
            router.bind(endpoint[:-1] + "*" if endpoint.startswith("tcp:") and endpoint.endswith(":0") else endpoint)
        except zmq.ZMQError as error:
            router.close()
            self._context.term()
            raise ConfigError(
                f"{self.name} must listen on {endpoint}: {error.strerror}; choose another bus.port (0: a free one)"
            ) from None
        self._endpoint = router.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()  # type: ignore[union-attr]
        return router

    @staticmethod
    def _limit(socket: "zmq.Socket[bytes]") -> None:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_ARRAY_BYTES)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER)

    def _connect(self, peer: str, endpoint: str) -> None:
        if self._dealer_at.get(peer) == endpoint:
            return
        self._disconnect(peer)
        dealer = self._context.socket(zmq.DEALER)
        self._limit(dealer)
        dealer.setsockopt(zmq.IDENTITY, self.name.encode())
        dealer.connect(endpoint)
        self._dealers[peer] = dealer
        self._dealer_at[peer] = endpoint

    def _disconnect(self, peer: str) -> None:
        dealer = self._dealers.pop(peer, None)
        if dealer is not None:
            del self._dealer_at[peer]
            self._waiting.pop(peer, None)
            dealer.close()

    def _run(self) -> None:
        """The thread: what ends it in error is raised in the next `receive`."""
        try:
            self._serve()
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is raised where it is heard
            self._error = error
            self.wake()
        finally:
            for socket in [*self._dealers.values(), *([self._router] if self._router else [])]:
                socket.close(linger=200)
            self._context.term()

    def _serve(self) -> None:
        next_beat = time.monotonic()
        while not self._is_done():
            if self._heartbeat is not None and time.monotonic() >= next_beat:
                self._beat(self._heartbeat)
                next_beat = time.monotonic() + self._heartbeat_s
            self._poll(max(0.0, next_beat - time.monotonic()) if self._heartbeat is not None else 1.0)
            while self._orders:
                self._orders.popleft()()
            for peer in list(self._waiting):
                self._flush(peer)

    def _is_done(self) -> bool:
        if self._closing is None:
            return False
        return time.monotonic() >= self._closing or not (self._waiting or self._orders)

    def _beat(self, heartbeat: Callable[[], Message]) -> None:
        if self._heartbeat_to is None:
            peers = sorted(self._heard)
        else:
            peers = [self._heartbeat_to] if self._heartbeat_to in self._dealers else []
        peers = [peer for peer in peers if peer not in self._waiting]  # who takes nothing gets no pile of heartbeats
        if peers:
            frames = wire.encode(heartbeat(), job=self.job)
            for peer in peers:
                self._post(peer, frames)

    def _poll(self, timeout_s: float) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_fd, zmq.POLLIN)
        reading = 0 if self._is_full else zmq.POLLIN  # I9
        sockets = {dealer: peer for peer, dealer in self._dealers.items()}
        for dealer, peer in sockets.items():
            events = reading | (zmq.POLLOUT if peer in self._waiting else 0)
            if events:
                poller.register(dealer, events)
        if self._router is not None and reading:
            poller.register(self._router, zmq.POLLIN)
        if any(peer not in self._dealers for peer in self._waiting):
            timeout_s = min(timeout_s, RETRY_S)
        for ready, events in poller.poll(round(timeout_s * 1000 + 0.5)):
            if ready == self._wake_fd:
                os.eventfd_read(self._wake_fd)
            elif events & zmq.POLLIN:
                self._drain(ready, sockets.get(ready))

    def _drain(self, socket: "zmq.Socket[bytes]", peer: str | None) -> None:
        """Take what is there, up to the inbox's cap."""
        for _ in range(HIGH_WATER):
            if self._is_full:
                return
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if peer is None:
                name = frames.pop(0).decode(errors="replace")
                self._heard.add(name)
                self._take(name, frames)
            else:
                self._take(peer, frames)

    def _take(self, sender: str, frames: Frames) -> None:
        try:
            message = wire.decode(frames, job=self.job)
        except WireError as error:
            self.refused[sender] += 1
            if self.refused[sender] == 1:
                logger.warning("{}: refused what {!r} sent: {}", self.name, sender[:40], error)
            return
        n_bytes = sum(map(len, frames))
        self._received += n_bytes
        self._inbox.put((sender, message, n_bytes))

    def _post(self, to: str, frames: Frames) -> None:
        self._waiting.setdefault(to, deque()).append(frames)
        self._flush(to)

    def _flush(self, peer: str) -> None:
        """Give the peer's socket what it takes, in order."""
        waiting = self._waiting.get(peer)
        dealer = self._dealers.get(peer)
        while waiting:
            try:
                if dealer is not None:
                    dealer.send_multipart(waiting[0], zmq.NOBLOCK)
                elif self._router is not None and peer in self._heard:
                    self._router.send_multipart([peer.encode(), *waiting[0]], zmq.NOBLOCK)
                else:
                    raise zmq.ZMQError(zmq.EHOSTUNREACH)
            except zmq.Again:
                return
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                self._gone(peer, len(waiting))
                break
            waiting.popleft()
        self._waiting.pop(peer, None)

    def _gone(self, peer: str, n_messages: int) -> None:
        self._heard.discard(peer)
        if not self.undelivered[peer]:
            logger.debug("{}: {} is not connected; {} messages to it are void", self.name, peer, n_messages)
        self.undelivered[peer] += n_messages
