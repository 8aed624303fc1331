"""An actor's tie to the head: who it says it is, and how long the head has been silent; knows no work.

A head that was started anew knows nobody: what was said to the one before is said again. It asks for that (Rejoin) when
it hears somebody it does not know; its life, in HeadBeat and Directory, tells those whom it half knows.
"""

import os
import socket
import time
from dataclasses import replace

from actors.context import Context
from areal_bus.bus import Bus
from areal_bus.messages import Directory, HeadBeat, Join, Leaving, Message, Ready, Rejoin

HEAD = "head"


class Presence:
    """What this actor has said of itself, and when it heard the head last."""

    def __init__(self, bus: Bus, *, silent_s: float) -> None:
        """`silent_s`: without a word for this long the head counts as silent."""
        self._bus = bus
        self._silent_s = silent_s
        self._said: list[Join | Ready | Leaving] = []
        self._n_again = 0
        self._life: int | None = None  # of the head that was joined; None until it says so
        self._heard = time.monotonic()

    def join(self, context: Context, endpoint: str = "") -> None:
        """`endpoint` is where it listens, if it does."""
        host = socket.gethostname()
        self.say(
            Join(context.name, context.role, context.index, context.incarnation, endpoint, pid=os.getpid(), host=host)
        )

    def say(self, message: Join | Ready | Leaving) -> None:
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
        self._heard = time.monotonic()
        if isinstance(message, Rejoin):
            self._life = None  # it will say which one it is
            return True
        if isinstance(message, HeadBeat | Directory):
            before, self._life = self._life, message.life
            return before not in (None, message.life)
        return False

    def remark(self, note: str) -> str:
        """`note`, and for how long the head has been silent, if it has."""
        silence_s = time.monotonic() - self._heard
        return f"{note}; head silent for {silence_s:.0f} s" if silence_s > self._silent_s else note
