"""A TCP proxy on loopback that injects network faults: delay, one-way blocking, cuts, partitions, healing.

As in a network, a live connection loses nothing: blocked bytes wait and arrive later, in order. A cut loses the bytes
in flight. Both ends see the cut (with `silently`, only the end that connected).
"""

import select
import socket
import struct
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

PIECE = 1 << 15  # bytes read at once
HELD = 1 << 16  # bytes of one connection and direction that are under way; more waits at the sender
TURN_S = 0.05
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: what is unsent is thrown away


@dataclass(slots=True)
class Way:
    """One direction of all connections. May be changed at any time."""

    delay_s: float = 0.0
    bytes_per_s: float = 0.0  # 0: as fast as it goes
    is_open: bool = True
    n_bytes: int = 0  # that came through


@dataclass(slots=True)
class _Stream:
    """One direction of one connection: pieces, each with its earliest delivery time."""

    source: socket.socket
    sink: socket.socket
    way: Way
    pieces: deque[tuple[float, bytes]] = field(default_factory=deque)
    n_held: int = 0
    next_s: float = 0.0  # no sooner by the rate

    def may_read(self) -> bool:
        return self.way.is_open and self.n_held < HELD

    def may_write(self, now: float) -> bool:
        return self.way.is_open and bool(self.pieces) and now >= max(self.pieces[0][0], self.next_s)

    def read(self, now: float) -> bool:
        """Whether the connection is open."""
        data = self.source.recv(PIECE)
        if data:
            self.pieces.append((now + self.way.delay_s, data))
            self.n_held += len(data)
        return bool(data)

    def write(self, now: float) -> None:
        due, data = self.pieces.popleft()
        rate = self.way.bytes_per_s
        piece = data[: max(1, int(rate * TURN_S))] if rate else data
        n = self.sink.send(piece)
        if n < len(data):
            self.pieces.appendleft((due, data[n:]))
        self.n_held -= n
        self.way.n_bytes += n
        self.next_s = now + n / rate if rate else 0.0


class Proxy:
    """A proxy in front of a port. `up` is the direction to that port, `down` the one back."""

    def __init__(self, endpoint: str) -> None:
        self._behind = int(endpoint.rpartition(":")[2])
        self.up, self.down = Way(), Way()
        self.lets_in = True  # else who connects is hung up on
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._streams: list[_Stream] = []
        self._kept: list[socket.socket] = []  # far ends that got no FIN
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def n_connections(self) -> int:
        return len(self._streams) // 2

    def part(self) -> None:
        """Block both directions and new connections."""
        self.up.is_open = self.down.is_open = self.lets_in = False

    def heal(self) -> None:
        """Remove all faults; held bytes are delivered."""
        for way in (self.up, self.down):
            way.is_open, way.delay_s, way.bytes_per_s = True, 0.0, 0.0
        self.lets_in = True

    def cut(self, *, silently: bool = False) -> int:
        """Cut all connections and drop their bytes in flight. `silently`: the end behind the proxy does not notice."""
        with self._lock:
            n = self.n_connections
            for stream in self._streams[::2]:
                _reset(stream.source)
                if silently:
                    self._kept.append(stream.sink)
                else:
                    _reset(stream.sink)
            self._streams.clear()
        return n

    def close(self) -> None:
        self._is_closed = True
        self._thread.join()
        self.cut()
        for each in (self._listener, *self._kept):
            each.close()

    def _serve(self) -> None:
        while not self._is_closed:
            with self._lock:
                streams = list(self._streams)
            now = time.monotonic()
            reading = {stream.source: stream for stream in streams if stream.may_read()}
            writing = {stream.sink: stream for stream in streams if stream.may_write(now)}
            waits = [max(s.pieces[0][0], s.next_s) - now for s in streams if s.pieces and s.way.is_open]
            timeout_s = min([TURN_S, *(max(0.0, wait) for wait in waits if wait > 0)])
            try:
                ready = _ready([self._listener, *reading], list(writing), timeout_s)
            except (OSError, ValueError):  # one was cut meanwhile
                continue
            with self._lock:
                self._turn(ready[0], ready[1], reading, writing)

    def _turn(
        self,
        readable: list[socket.socket],
        writable: list[socket.socket],
        reading: dict[socket.socket, _Stream],
        writing: dict[socket.socket, _Stream],
    ) -> None:
        if self._listener in readable:
            self._let_in()
        for sink in writable:
            if writing[sink] in self._streams:
                self._try(writing[sink], write=True)
        for source in readable:
            if source is not self._listener and reading[source] in self._streams:
                self._try(reading[source], write=False)

    def _try(self, stream: _Stream, *, write: bool) -> None:
        now = time.monotonic()
        try:
            if write:
                stream.write(now)
                return
            is_there = stream.read(now)
        except BlockingIOError:
            return
        except OSError:
            is_there = False
        if not is_there:
            for other in [s for s in self._streams if s.source in (stream.source, stream.sink)]:
                self._streams.remove(other)
            stream.source.close()
            stream.sink.close()

    def _let_in(self) -> None:
        near = self._listener.accept()[0]
        if not self.lets_in:
            _reset(near)
            return
        try:
            far = socket.create_connection(("127.0.0.1", self._behind))
        except OSError:
            _reset(near)
            return
        for end in (near, far):
            end.setblocking(False)
        self._streams += [_Stream(near, far, self.up), _Stream(far, near, self.down)]


def _reset(end: socket.socket) -> None:
    with suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    end.close()


def _ready(
    readers: list[socket.socket], writers: list[socket.socket], timeout_s: float
) -> tuple[list[socket.socket], list[socket.socket]]:
    """What can be read and what can be written. By poll: select takes no descriptor above 1,023. Raises ValueError."""
    wanted: dict[int, int] = {}
    for sockets, mask in ((readers, select.POLLIN), (writers, select.POLLOUT)):
        for each in sockets:
            wanted[each.fileno()] = wanted.get(each.fileno(), 0) | mask
    poll = select.poll()
    for descriptor, mask in wanted.items():
        poll.register(descriptor, mask)  # ValueError for one that is closed
    found = dict(poll.poll(1000 * timeout_s))
    ended = select.POLLHUP | select.POLLERR
    return (
        [each for each in readers if found.get(each.fileno(), 0) & (select.POLLIN | ended)],
        [each for each in writers if found.get(each.fileno(), 0) & (select.POLLOUT | ended)],
    )
