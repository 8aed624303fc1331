"""An actor's session with the head: joins, announces readiness, and measures how long the head has been silent.

A restarted head has no members. It answers a message of an unknown actor with Rejoin; its incarnation, in HeadHeartbeat
and PeerList, reveals a restart. The actor then repeats its Join and Ready. No supervisor of the job ends a
guest, so a guest ends when it has not heard a head for the configured time.
"""

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from actors.runtime.context import Context, HeartbeatState
from areal_bus.core.events import Event
from areal_bus.errors import ActorFailed, Restart
from areal_bus.foreign_text import described
from areal_bus.messages import Failure, HeadHeartbeat, Join, LeaveRequest, Message, PeerList, Ready, Rejoin
from areal_bus.storage.journal import Journal
from areal_bus.transport.bus import Bus

HEAD = "head"


def run_until_stop(journal: Journal, bus: Bus, work: Callable[[], str]) -> None:
    """Run an actor's work, which returns the reason of its Stop. Journal and head get an error, which is raised."""
    try:
        reason = work()
    except Restart as error:  # no failure
        journal.close(reason=str(error))
        raise
    except Exception as error:
        journal.write(Event.FAILED, error=described(error))
        bus.send(HEAD, Failure(error=described(error)))
        raise
    else:
        journal.close(reason=reason)
    finally:
        bus.close()


class HeadSession:
    """The messages that announce this actor, and the time of the head's last message."""

    def __init__(self, bus: Bus, *, silent_s: float) -> None:
        """`silent_s`: the head is silent after this time without a message."""
        self._bus = bus
        self._silent_s = silent_s
        self._sent: list[Join | Ready | LeaveRequest] = []
        self._n_rejoins = 0
        self._head_life: int | None = None  # incarnation of the head; None until it reports it
        self._has_received = False
        self._received_at = self._checked_at = self._running_since = time.monotonic()

    def join(self, context: Context, endpoint: str = "") -> None:
        """Join the head. `endpoint`: where this actor listens, if it does."""
        host = socket.gethostname()
        self.send(
            Join(context.name, context.role, context.index, context.incarnation, endpoint, pid=os.getpid(), host=host)
        )

    def send(self, message: Join | Ready | LeaveRequest) -> None:
        """Send an announcement, which is repeated to a restarted head."""
        self._sent.append(message)
        self._bus.send(HEAD, message)

    def resend(self) -> None:
        """Repeat all announcements, in order, to a restarted head."""
        self._n_rejoins += 1
        for message in self._sent:
            self._bus.send(HEAD, replace(message, again=self._n_rejoins) if isinstance(message, Join) else message)

    def observe(self, sender: str, message: Message) -> bool:
        """Note a received message. Returns whether the head has restarted, so that the actor must join again."""
        if sender != HEAD:
            return False
        self._has_received = True
        self._received_at = time.monotonic()
        if isinstance(message, Rejoin):
            self._head_life = None  # its next HeadHeartbeat or PeerList reports it
            return True
        if isinstance(message, HeadHeartbeat | PeerList):
            before, self._head_life = self._head_life, message.life
            return before not in (None, message.life)
        return False

    @property
    def is_alone(self) -> bool:
        """No message of the head has arrived, or the head is silent now."""
        return not self._has_received or self._bus.silence_s(HEAD) > self._silent_s

    def give_up_after(self, patience_s: float, endpoint: str) -> None:
        """Raise ActorFailed when the head is silent for `patience_s`, stops of this process excepted. Call it often."""
        now = time.monotonic()
        if now - self._checked_at > patience_s / 2:
            self._running_since = now
        self._checked_at = now
        silence_s = self._bus.silence_s(HEAD) if self._has_received else now - self._received_at
        if min(silence_s, now - self._running_since) <= patience_s:
            return
        if self._has_received:
            raise ActorFailed(
                f"timed out: the head at {endpoint} was silent for longer than launch.timeout_s = {patience_s:g}; if "
                "its job is resumed, join that job"
            )
        raise ActorFailed(
            f"timed out: no answer of the head at {endpoint} within launch.timeout_s = {patience_s:g}; either no job "
            "runs there, or the invitation is outdated (each start of a job writes a new RUN/join.json)"
        )

    def with_silence(self, note: str) -> str:
        """`note`, with the time for which the head has been silent, if it is."""
        silence_s = time.monotonic() - self._received_at
        return f"{note}; head silent for {silence_s:.0f} s" if silence_s > self._silent_s else note


@dataclass(frozen=True, slots=True)
class ActorRuntime:
    """Objects that the loop of every actor uses."""

    bus: Bus
    session: HeadSession
    journal: Journal
    heartbeat: HeartbeatState
