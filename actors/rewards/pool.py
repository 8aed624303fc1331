"""A pool of worker processes that run a reward function, each score with a deadline.

A thread cannot be stopped and a signal does not interrupt C code, so at its deadline a worker is killed with all
processes it started, and a new worker replaces it. A score is repeated once only when its worker was killed from
outside, for example by the OOM killer, or where a program in a weak sandbox may have killed it. Only `poll` waits. Use
a pool on the thread that created it: its workers die with that thread.

Scores that wait are ordered by sender: the sender whose scores have used the least time is served next. So a sender
whose scores hang, or that sends without end, delays the others by its share of the workers only.
"""

import itertools
import math
import selectors
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

from actors.processes.ipc import REQUEST_BYTES, pack
from actors.processes.worker_process import WorkerLost, WorkerProcess
from actors.rewards.binding.values import encode_ids
from areal_bus.core.parts.reward_parts import checked
from areal_bus.errors import ConfigError
from areal_bus.foreign_text import text_of
from areal_bus.messages import VerdictStatus

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
        dropped = [task for tasks in self._waiting.values() for task in tasks if is_unwanted(task)]
        kept = {x: deque(task for task in tasks if not is_unwanted(task)) for x, tasks in self._waiting.items()}
        self._waiting = {x: tasks for x, tasks in kept.items() if tasks}
        self._n -= len(dropped)
        return dropped

    def clear(self) -> None:
        self._waiting.clear()
        self._n = 0


START_S = 60.0  # for a worker to load the function, imports of the user's module included


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one score. `reward` and `correct` are valid only when status is "value" (I10)."""

    key: Any  # as submitted
    status: VerdictStatus
    reward: float
    correct: bool | None
    error: str  # text of a timeout or error, else ""
    score_s: float  # from the request to a worker until its verdict
    place: str = ""  # FILE:LINE of an error in user code
    trace: str = ""  # its traceback
    parts: Mapping[str, float] = field(default_factory=dict)  # rewards by name, of a value that reports them
    rewards: tuple[float, ...] = ()  # of a group: one for each sample


@dataclass(frozen=True, slots=True)
class ScoreTask:
    """One score to compute."""

    key: Hashable
    id: int  # of its frame; the reply repeats it
    request: dict[str, Any]
    ids: bytes = b""  # tokens of the trajectory (int32)
    n_prompt: int = 0  # of them before the completion
    sender: str = ""  # workers serve senders in turn
    n_lost: int = 0  # workers that were killed from outside while they computed it

    def frame(self, *, with_ids: bool) -> bytes:
        """Raises ValueError for a request over the limit."""
        ids = encode_ids(self.ids, self.n_prompt) if with_ids else {}
        shut = {"shut": True} if self.n_lost > 1 else {}
        return pack({"id": self.id, **self.request, **ids, **shut}, cap_bytes=REQUEST_BYTES)


class Worker:
    """A worker process and its state: starting, ready, or busy with a task."""

    def __init__(self, selector: selectors.BaseSelector, order: bytes) -> None:
        self.process = WorkerProcess(selector, self)
        self.ready = False
        self.needs_ids = False  # the function takes token ids
        self.exposed = False  # a program in its sandbox could kill it
        self.task: ScoreTask | None = None
        self.since = time.monotonic()  # start of the process or of the task
        self.process.send(order)

    def begin(self, task: ScoreTask) -> None:
        """Raises ValueError for a request over the limit."""
        frame = task.frame(with_ids=self.needs_ids)
        self.task = task
        self.since = time.monotonic()
        self.process.send(frame)

    @property
    def is_busy(self) -> bool:
        return not self.ready or self.task is not None


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """The work of a worker process. `function`, `folder`, `fields` and `options` as in load_reward."""

    function: str
    folder: str | Path
    fields: Collection[str] | None = None
    prints: Path | None = None  # the file that receives the output of the function
    options: Mapping[str, Any] | None = None
    fresh_process: bool = False  # each score runs in a fork of its own
    group: str = ""  # the group reward, "module:function"
    check: str = ""  # the second grader, named as `function`

    def packed(self) -> bytes:
        """The first frame that a worker reads."""
        fields = None if self.fields is None else sorted(self.fields)
        prints = None if self.prints is None else str(self.prints.resolve())
        order = asdict(self) | {"folder": str(self.folder), "fields": fields, "prints": prints}
        return pack(order, cap_bytes=REQUEST_BYTES)


class WorkerPool:
    """Scores completions on worker processes; verdicts arrive as scores end. A context manager: its end kills them."""

    def __init__(self, order: WorkerOrder, *, n_workers: int, timeout_s: float, max_failed_starts: int = 3) -> None:
        """The workers start at once; see `ready`."""
        self._ids = itertools.count()
        self._order = order.packed()
        self._function = order.function
        self._timeout_s = timeout_s
        self._max_failed_starts = max_failed_starts
        self._failed_starts = 0  # in a row
        self._has_loaded = False  # the function did, once
        self._selector = selectors.DefaultSelector()
        self._waiting: Turns[ScoreTask] = Turns()
        self._verdicts: list[Verdict] = []
        self._killed: list[WorkerProcess] = []  # not reaped yet
        self._workers = [Worker(self._selector, self._order) for _ in range(n_workers)]

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def ready(self) -> bool:
        """Every worker has loaded the function."""
        return all(worker.ready for worker in self._workers)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers, which are those of their process groups, too."""
        return [worker.process.pid for worker in self._workers]

    @property
    def n_unfinished(self) -> int:
        """Scores submitted whose verdicts `poll` has not returned."""
        return len(self._waiting) + len(self._verdicts) + sum(worker.task is not None for worker in self._workers)

    def submit(
        self,
        key: Hashable,
        *,
        prompt: str,
        completion: str,
        row: str,
        ids: bytes = b"",
        n_prompt: int = 0,
        sender: str = "",
        is_check: bool = False,
    ) -> None:
        """Queue a score; `row` is a JSON object, `ids` the tokens (int32), the first `n_prompt` of them before the
        completion. A request over the limit gets an error for a verdict. Senders are served in turn. `is_check`: by
        the second grader.
        """
        request = {"prompt": prompt, "completion": completion, "row": row} | ({"check": True} if is_check else {})
        self._add(ScoreTask(key, next(self._ids), request, ids, n_prompt, sender))

    def submit_group(self, key: Hashable, *, prompt: str, samples: str, row: str, sender: str = "") -> None:
        """Queue the score of a group; `samples` as in `messages.Group`."""
        self._add(ScoreTask(key, next(self._ids), {"prompt": prompt, "samples": samples, "row": row}, sender=sender))

    def _add(self, task: ScoreTask) -> None:
        self._waiting.add(task.sender, task)
        self._assign()

    def forget(self, keys: Collection[Hashable]) -> list[Hashable]:
        """Drop waiting scores with these keys. Returns the dropped keys; they get no verdict."""
        return [task.key for task in self._waiting.drop(lambda task: task.key in keys)]

    def clear(self) -> None:
        """Drop all scores and kill the workers of those in progress. They get no verdict."""
        self._waiting.clear()
        self._verdicts.clear()
        for worker in [worker for worker in self._workers if worker.task is not None]:
            self._replace(worker)

    def poll(self, timeout_s: float) -> list[Verdict]:
        """New verdicts after at most `timeout_s`. Raises ConfigError or RuntimeError when workers fail to start."""
        for selected, events in self._selector.select(self._wait_s(timeout_s)):
            worker: Worker = selected.data
            if worker not in self._workers:  # replaced in this call
                continue
            if events & selectors.EVENT_WRITE:
                worker.process.flush()
            if events & selectors.EVENT_READ:
                self._receive(worker)
        self._keep_deadlines()
        self._assign()
        self._killed = [process for process in self._killed if not process.ended]
        verdicts, self._verdicts = self._verdicts, []
        return verdicts

    def close(self) -> None:
        """Kill all workers and all processes they started; drop all scores."""
        for worker in self._workers:
            self._kill(worker)
        for process in self._killed:
            process.reap()
        self._workers, self._killed = [], []
        self._waiting.clear()
        self._selector.close()

    def _assign(self) -> None:
        """Give waiting tasks to idle workers."""
        for worker in list(self._workers):
            if self._waiting and not worker.is_busy:
                if worker.process.ended:  # a process it started still holds the pipes open
                    self._replace(worker)
                else:
                    self._begin(worker, self._waiting.next())

    def _begin(self, worker: Worker, task: ScoreTask) -> None:
        try:
            worker.begin(task)
        except ValueError as error:
            self._verdicts.append(Verdict(task.key, VerdictStatus.ERROR, 0.0, None, str(error), 0.0))

    def _receive(self, worker: Worker) -> None:
        try:
            for record in worker.process.receive():
                if worker.ready:
                    self._take_verdict(worker, record)
                else:
                    self._take_start(worker, record)
                    return  # a worker sends nothing more before its first task
        except WorkerLost as lost:
            self._lose(worker, str(lost), was_killed=lost.was_killed)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            self._lose(worker, f"it wrote an invalid verdict: {text_of(error)}")

    def _take_start(self, worker: Worker, record: dict[str, Any]) -> None:
        if "broken" in record:
            self._fail_start(worker, str(record["broken"]))
        elif record.keys() == {"ready", "needs_ids", "exposed"}:
            worker.needs_ids, worker.exposed = bool(record["needs_ids"]), bool(record["exposed"])
            worker.ready, self._failed_starts, self._has_loaded = True, 0, True
        else:
            raise ValueError('a worker\'s first frame must hold "ready" or "broken"')

    def _take_verdict(self, worker: Worker, record: dict[str, Any]) -> None:
        if worker.task is None or record["id"] != worker.task.id:
            raise ValueError("its id must be that of the current task")
        status, reward = VerdictStatus(record["status"]), float(record.get("reward", 0.0))
        if not math.isfinite(reward):
            raise ValueError(f"its reward is {reward}")
        correct = record.get("correct")
        if not isinstance(correct, bool | None):
            raise TypeError(f"its field correct is a {type(correct).__name__}")
        where = str(record.get("place", "")), str(record.get("trace", ""))
        parts = checked(record.get("parts", {}))
        rewards = tuple(map(float, record.get("rewards", ())))
        if not all(map(math.isfinite, rewards)):
            raise ValueError("a reward of its group is not finite")
        self._conclude(worker, status, reward, correct, str(record.get("error", "")), where, parts, rewards)

    def _conclude(
        self,
        worker: Worker,
        status: VerdictStatus,
        reward: float,
        correct: bool | None,
        error: str,
        where: tuple[str, str] = ("", ""),
        parts: Mapping[str, float] | None = None,
        rewards: tuple[float, ...] = (),
    ) -> None:
        """Add the verdict of the worker's task. `where`: place and traceback of an error."""
        if worker.task is not None:
            score_s = time.monotonic() - worker.since
            self._waiting.charge(worker.task.sender, score_s)
            key, place, trace = worker.task.key, *where
            verdict = Verdict(key, status, reward, correct, error, score_s, place, trace, parts or {}, rewards)
            self._verdicts.append(verdict)
            worker.task = None

    def _wait_s(self, timeout_s: float) -> float:
        """How long `poll` may wait: at most until the next deadline."""
        if self._verdicts:
            return 0.0
        deadlines = [worker.since + self._allowed_s(worker) for worker in self._workers if worker.is_busy]
        return max(0.0, min([timeout_s, *(deadline - time.monotonic() for deadline in deadlines)]))

    def _allowed_s(self, worker: Worker) -> float:
        return self._timeout_s if worker.ready else START_S

    def _keep_deadlines(self) -> None:
        now = time.monotonic()
        late = [worker for worker in self._workers if worker.is_busy and now - worker.since >= self._allowed_s(worker)]
        for worker in late:
            if worker.ready:
                self._conclude(worker, VerdictStatus.TIMEOUT, 0.0, None, f"no score within {self._timeout_s:g} s")
                self._replace(worker)
            else:
                self._fail_start(
                    worker, f"timed out: reward.function {self._function!r} did not load within {START_S:g} s"
                )

    def _lose(self, worker: Worker, reason: str, *, was_killed: bool = False) -> None:
        """Replace a worker that ended. Its score is retried once, then once more without running a program."""
        if worker.ready:
            if worker.task is not None and self._is_repeated(worker, worker.task, was_killed=was_killed):
                again = replace(worker.task, n_lost=worker.task.n_lost + 1)
                self._waiting.add(worker.task.sender, again, first=True)
                worker.task = None
            self._conclude(worker, VerdictStatus.ERROR, 0.0, None, f"the worker process is lost: {reason}")
            self._replace(worker)
        else:
            self._fail_start(
                worker, f"reward.function {self._function!r} must load: its worker process did not: {reason}"
            )

    @staticmethod
    def _is_repeated(worker: Worker, task: ScoreTask, *, was_killed: bool) -> bool:
        return task.n_lost < 2 if worker.exposed else was_killed and not task.n_lost

    def _fail_start(self, worker: Worker, sentence: str) -> None:
        self._failed_starts += 1
        if self._failed_starts >= self._max_failed_starts:
            raise RuntimeError(sentence) if self._has_loaded else ConfigError(sentence)
        self._replace(worker)

    def _replace(self, worker: Worker) -> None:
        self._kill(worker)
        self._workers[self._workers.index(worker)] = Worker(self._selector, self._order)

    def _kill(self, worker: Worker) -> None:
        worker.process.kill()
        self._killed.append(worker.process)
