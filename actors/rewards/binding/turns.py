"""Scores that wait for a worker, by sender: the sender whose scores have used the least time is served next. Pure.

So a sender whose scores hang, or that sends without end, delays the others by its share of the workers only.
"""

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

MOST_SENDERS = 4096  # whose time is remembered, unless more wait

Task = TypeVar("Task")


class Turns(Generic[Task]):
    """Tasks of each sender in order. Start-time fair queueing: a sender that comes back begins at the present time."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Task]] = {}  # no empty queues
        self._used_s: dict[str, float] = {}  # by sender; that of one without tasks counts from `_now_s`
        self._now_s = 0.0  # used by the sender that was served last
        self._n = 0

    def __len__(self) -> int:
        return self._n

    def add(self, sender: str, task: Task, *, first: bool = False) -> None:
        """`first`: before all other tasks of this sender."""
        if sender not in self._waiting:
            self._waiting[sender] = deque()
            self._used_s[sender] = max(self._used_s.get(sender, 0.0), self._now_s)
        (self._waiting[sender].appendleft if first else self._waiting[sender].append)(task)
        self._n += 1

    def next(self) -> Task:
        """Remove and return the next task. Raises ValueError when none waits."""
        sender = min(self._waiting, key=self._used_s.__getitem__)
        self._now_s = max(self._now_s, self._used_s[sender])
        task = self._waiting[sender].popleft()
        self._n -= 1
        if not self._waiting[sender]:
            del self._waiting[sender]
        return task

    def charge(self, sender: str, seconds: float) -> None:
        """A task of this sender has used a worker for so long."""
        self._used_s[sender] = max(self._used_s.get(sender, 0.0), self._now_s) + seconds
        if len(self._used_s) > MOST_SENDERS:
            self._used_s = {x: s for x, s in self._used_s.items() if x in self._waiting}

    def drop(self, is_unwanted: Callable[[Task], bool]) -> list[Task]:
        """Remove these tasks and return them."""
        dropped = [task for tasks in self._waiting.values() for task in tasks if is_unwanted(task)]
        kept = {x: deque(task for task in tasks if not is_unwanted(task)) for x, tasks in self._waiting.items()}
        self._waiting = {x: tasks for x, tasks in kept.items() if tasks}
        self._n -= len(dropped)
        return dropped

    def clear(self) -> None:
        """Remove all tasks."""
        self._waiting.clear()
        self._n = 0
