"""An actor's session with the head: joins, announces readiness, and measures how long the head has been silent.

A restarted head has no members. It answers a message of an unknown actor with Rejoin; its incarnation, in HeadHeartbeat
and PeerList, reveals a restart. The actor then repeats its Join and Ready. No supervisor of the job ends a
guest, so a guest ends when it has not heard a head for the configured time.
"""

import os
import socket
import time
from dataclasses import replace

from actors.runtime.context import Context
from areal_bus.errors import ActorFailed
from areal_bus.messages import HeadHeartbeat, Join, LeaveRequest, Message, PeerList, Ready, Rejoin
from areal_bus.transport.bus import Bus

HEAD = "head"


class HeadSession:
    """What this actor has said of itself, and when it heard the head last."""

    def __init__(self, bus: Bus, *, silent_s: float) -> None:
        """`silent_s`: without a word for this long the head counts as silent."""
        self._bus = bus
        self._silent_s = silent_s
        self._said: list[Join | Ready | LeaveRequest] = []
        self._n_again = 0
        self._life: int | None = None  # of the head that was joined; None until it says so
        self._has_heard = False
        self._heard = self._looked = self._awake_from = time.monotonic()

    def join(self, context: Context, endpoint: str = "") -> None:
        """`endpoint` is where it listens, if it does."""
        host = socket.gethostname()
        self.say(
            Join(context.name, context.role, context.index, context.incarnation, endpoint, pid=os.getpid(), host=host)
        )

    def say(self, message: Join | Ready | LeaveRequest) -> None:
        self._said.append(message)
        self._bus.send(HEAD, message)

    def say_again(self) -> None:
        """To a head that does not know us: all of it, in order."""
        self._n_again += 1
        for message in self._said:
            self._bus.send(HEAD, replace(message, again=self._n_again) if isinstance(message, Join) else message)

    def heard(self, sender: str, message: Message) -> bool:
        """Any message of the head is a sign of life. Returns whether its sender is to be joined again."""
        if sender != HEAD:
            return False
        self._has_heard = True
        self._heard = time.monotonic()
        if isinstance(message, Rejoin):
            self._life = None  # it will say which one it is
            return True
        if isinstance(message, HeadHeartbeat | PeerList):
            before, self._life = self._life, message.life
            return before not in (None, message.life)
        return False

    @property
    def is_alone(self) -> bool:
        """The head has not said a word, or is silent now: nobody to take leave of."""
        return not self._has_heard or self._bus.silence_s(HEAD) > self._silent_s

    def give_up_after(self, patience_s: float, endpoint: str) -> None:
        """To be called at every turn. Raises ActorFailed when the head has been silent for so long.

        While this process itself stood still nobody was silent.
        """
        now = time.monotonic()
        if now - self._looked > patience_s / 2:
            self._awake_from = now
        self._looked = now
        silence_s = self._bus.silence_s(HEAD) if self._has_heard else now - self._heard
        if min(silence_s, now - self._awake_from) <= patience_s:
            return
        if self._has_heard:
            raise ActorFailed(
                f"a head may be silent for launch.timeout_s = {patience_s:g}: the one at {endpoint} is gone; if its "
                "job is resumed, join that"
            )
        raise ActorFailed(
            f"a guest is answered within launch.timeout_s = {patience_s:g}: at {endpoint} nobody did; either no job "
            "runs there, or another one than that of the invitation (its RUN/join.json is written anew at each start)"
        )

    def remark(self, note: str) -> str:
        """`note`, and for how long the head has been silent, if it has."""
        silence_s = time.monotonic() - self._heard
        return f"{note}; head silent for {silence_s:.0f} s" if silence_s > self._silent_s else note
