"""Reports of members that copy, by keys in the root's store: without a group, and so without gloo.

They share the root's process numbers (`Place`), so the kernel says when one of them has ended, however it did.
"""

import os
import select
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from areal_bus.errors import PushFailed
from areal_bus.messages import PushBegin
from areal_bus.push_words import key, title


def report(store: TCPStore, begin: PushBegin, name: str) -> None:
    """A member's, to the root: it has copied, and looked at every byte. Whether all were right it tells the head.

    Raises RuntimeError where the root's store is gone.
    """
    store.set(_key(begin, name), "done")
    store.check([_key(begin, name)])  # answered after the one before, which is not


class Reports:
    """What the root waits for. A context, which watches the members' processes."""

    def __init__(self, store: TCPStore, begin: PushBegin, pids: Mapping[str, int]) -> None:
        self._store = store
        self._begin = begin
        self._keys = {name: _key(begin, name) for name in sorted(pids)}
        self._pids = pids
        self._processes: dict[int, str] = {}  # descriptors, readable when the process has ended
        self._poll = select.poll()
        self._ended: set[str] = set()

    def __enter__(self) -> "Reports":
        for name, pid in self._pids.items():
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._ended.add(name)
            except (OSError, AttributeError):  # no such thing, or a policy forbids it: the head's word ends the push
                continue
            else:
                self._processes[descriptor] = name
                self._poll.register(descriptor, select.POLLIN)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for descriptor in self._processes:
            with suppress(OSError):
                os.close(descriptor)

    def are_there(self) -> bool:
        """All of them. Raises PushFailed when a member has ended without one."""
        self._ended.update(self._processes[descriptor] for descriptor, _ in self._poll.poll(0))
        if self._store.check(list(self._keys.values())):  # asked after the ends: what they have told is there by now
            return True
        silent = [name for name in sorted(self._ended) if not self._store.check([self._keys[name]])]
        if silent:
            raise PushFailed(f"{title(self._begin)} must be reported by each member: {', '.join(silent)} ended before")
        return False

    def waits_for(self) -> str:
        missing = [name for name, at in self._keys.items() if not self._store.check([at])]
        return "the members' reports: " + (", ".join(missing) or "they have just come")


def _key(begin: PushBegin, name: str) -> str:
    return key(begin, f"report/{name}")
