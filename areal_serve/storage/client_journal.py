"""The journal of a server: one line for each call of a client, with its tokens, lag and seconds (docs/journal.md)."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from areal_bus.config.sections import Config
from areal_bus.core.events import Event
from areal_bus.storage.journal import Journal
from areal_bus.storage.journal_segments import SEGMENT_BYTES, FileSizes, exists
from areal_serve.worker import Frame

ROLE, LABEL = "front", "serve"
OPS = {"step": "optim_step"}  # names of the API
OnDone = Callable[[Frame, float, Mapping[str, Any]], None]


def unnoted(frame: Frame, came: float, reply: Mapping[str, Any]) -> None:
    """Keep no journal."""


class ClientJournal:
    """Written by the event loop of one front; each front that starts again has the next incarnation."""

    def __init__(self, run: Path, config: Config) -> None:
        folder = Path(config.journal.dir) if config.journal.dir else run / "journal"
        incarnation = 0
        while exists(folder / f"{ROLE}-0.{incarnation}.jsonl", 0):
            incarnation += 1
        sizes = FileSizes(SEGMENT_BYTES)
        self._journal = Journal(folder, role=ROLE, index=0, incarnation=incarnation, sizes=sizes)

    def call(self, frame: Frame, came: float, reply: Mapping[str, Any]) -> None:
        """Write the line of a call or a sample that has its result. `came`: monotonic time of its arrival."""
        whose, _, number = frame["id"].rpartition(":")
        op = OPS.get(frame["op"], frame["op"])
        if op == "pass":
            op = "forward" if frame["forward_only"] else "forward_backward"
        fields = {"client": whose.partition(":")[0], "model": frame["model_id"], "call": int(number), "op": op}
        fields["seconds"] = round(time.monotonic() - came, 6)
        if error := reply.get("error"):
            fields["error"] = error
        self._journal.write(Event.CALL, **fields, **reply.get("facts", {}))

    def worker_ended(self, role: str, index: int, code: int) -> None:
        self._journal.write(Event.MEMBER, name=f"{role}-{index}", state="dead", why=f"it ended with code {code}")

    def mark(self) -> None:
        """Called about every 10 s, so that the journal shows how long the front was alive."""
        self._journal.mark(LABEL)

    def close(self) -> None:
        self._journal.close()
