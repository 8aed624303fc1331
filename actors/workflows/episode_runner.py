"""Runs one episode step by step: the workflow requests completions, the caller supplies and records them."""

from asyncio import CancelledError
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import CoroutineType
from typing import Any

import numpy as np
from loguru import logger
from numpy.typing import NDArray

from actors.engines.protocol import Completion, SamplingControls, stamp
from actors.runtime.user_code import definition, is_users, shown
from actors.workflows.protocol import Episode, Row, Turn, Workflow
from areal_bus.config.rollout import GenerationConfig
from areal_bus.errors import EngineError, WorkflowError
from areal_bus.foreign_text import described
from areal_bus.sample_fields import MAX_NUMBER, broken_rule
from areal_bus.trajectories import broken_roles
from areal_bus.trajectories import broken_rule as broken_rule_of_trajectories


@dataclass(frozen=True, slots=True)
class Asked:
    """The episode waits for a completion of `ids` with at most `max_new_tokens` tokens (None: as configured)."""

    ids: list[int]
    max_new_tokens: int | None
    anew: bool = False  # drop all tokens before this call
    trajectory: int | None = None  # that the call extends, or the next number; None: the one of the call before
    controls: SamplingControls | None = None  # None: as configured

    def __await__(self) -> Generator["Asked", Turn, Turn]:
        return (yield self)


@dataclass(frozen=True, slots=True)
class Awaited:
    """The episode waits for an event outside the engine: it resumes when `ready` returns True."""

    ready: Callable[[], bool]

    def __await__(self) -> Generator["Awaited", None, None]:
        yield self


State = tuple[list[int], list[float], list[list[int]], list[list[int]], list[int], list[list[int]], int, int]
Wish = Asked | Awaited | None  # None: the episode has ended


class Asker:
    """The `Ask` of one episode."""

    def __init__(self, tokenizer: Any, name: str, gconfig: GenerationConfig) -> None:
        self.tokenizer, self.name, self.gconfig, self.temperature = tokenizer, name, gconfig, gconfig.temperature

    async def __call__(
        self,
        ids: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        anew: bool = False,
        trajectory: int | None = None,
        controls: SamplingControls | None = None,
    ) -> Turn:
        return await Asked(list(ids), max_new_tokens, anew, trajectory, controls)


class EpisodeRun:
    """One sample in progress: call `start`, then `answer` with each completion, until `episode` is set.

    These and `go_on` (after an Awaited) return the next request or None. They raise the workflow's exceptions, and
    WorkflowError when it breaks a rule.
    """

    def __init__(
        self, workflow: Workflow, row: Row, tokenizer: Any, *, name: str = "", gconfig: GenerationConfig | None = None
    ) -> None:
        """`gconfig`: of the sample; None: the defaults."""
        self.ids: list[int] = []  # given and sampled, in the order of the calls
        self.logps: list[float] = []  # of the sampled tokens
        self.spans: list[list[int]] = []  # [version, n_tokens] over the sampled tokens
        self.segments: list[list[int]] = []  # [n_given, n_sampled] of each turn
        self.trajectories: list[int] = []  # that each turn extends
        self._begun: list[list[int]] = []  # tokens of each trajectory
        self.name = name
        self.n_forgotten = 0  # sampled tokens dropped by calls with `anew`
        self.n_begun_anew = 0
        self._before = self._state  # before the last request
        self.finish = ""
        self.episode: Episode | None = None
        self.fields: dict[str, NDArray[np.float32]] = {}  # of the episode: (n_sampled,) each
        self._tokenizer = tokenizer
        self._call = partial(workflow.episode, row, Asker(tokenizer, name, gconfig or GenerationConfig()))
        self._coroutine: Coroutine[Any, Any, Episode] | None = None  # None before the start

    @property
    def n_turns(self) -> int:
        return len(self.segments)

    @property
    def branch(self) -> tuple[int, ...]:
        """A part of the seed: equal positions of two trajectories, or of two starts, draw different numbers."""
        number = self.trajectories[-1]
        return (self.n_begun_anew, number) if number else (self.n_begun_anew,) if self.n_begun_anew else ()

    @property
    def _state(self) -> State:
        made = self.ids, self.logps, self.spans, self.segments, self.trajectories, self._begun
        return *made, self.n_forgotten, self.n_begun_anew

    def start(self) -> Wish:
        """Call `episode` and run it to its first request."""
        made: Any = self._call()
        if not isinstance(made, Coroutine):
            raise WorkflowError(
                f"not a coroutine: `episode` must be `async def episode(self, row, ask)`, it returned a "
                f"{type(made).__name__}",
                place=definition(self._call.func),
            )
        self._coroutine = made
        return self._send(None)

    def go_on(self) -> Wish:
        """Resume after an Awaited."""
        return self._send(None)

    def reject(self, error: EngineError) -> Wish:
        """The engine cannot hold the last request: undo it and raise the error in the workflow."""
        self.ids, self.logps, self.spans, self.segments, self.trajectories, self._begun, *counts = self._before
        self.n_forgotten, self.n_begun_anew = counts
        coroutine = self._running()
        return self._settle(lambda: coroutine.throw(error))

    def answer(self, completion: Completion) -> Wish:
        """Record a completion and resume."""
        self.segments[-1][1] = len(completion.ids)
        self.ids.extend(completion.ids)
        self._begun[self.trajectories[-1]].extend(completion.ids)
        self.logps.extend(completion.logps)
        for version, n in completion.spans:
            stamp(self.spans, version, n)
        self.finish = completion.finish
        text = self._tokenizer.decode(completion.ids, skip_special_tokens=True)
        return self._send(Turn(completion.ids, text, completion.finish, completion.logps, completion.spans))

    @property
    def place(self) -> str:
        """ "FILE:LINE" where the user's workflow waits, or its `episode` once it has ended; "" for a built-in one."""
        coroutine = self._coroutine
        if not isinstance(coroutine, CoroutineType) or not is_users(coroutine.cr_code.co_filename):
            return ""
        code, frame = coroutine.cr_code, coroutine.cr_frame
        return f"{shown(code.co_filename)}:{code.co_firstlineno if frame is None else frame.f_lineno}"

    def prompt_text(self) -> str:
        """The episode's own prompt text, else the decoded first prompt."""
        text = self.episode.prompt_text if self.episode else ""
        return text or str(self._tokenizer.decode(self.ids[: self.segments[0][0]]))

    def turns(self) -> list[list[str]]:
        """[given, sampled] of each turn as text; the given text with special tokens."""
        texts, at = [], 0
        for n_given, n_sampled in self.segments:
            middle, end = at + n_given, at + n_given + n_sampled
            given = str(self._tokenizer.decode(self.ids[at:middle]))
            sampled = str(self._tokenizer.decode(self.ids[middle:end], skip_special_tokens=True))
            texts.append([given, sampled])
            at = end
        return texts

    def close(self) -> None:
        """Cancel the episode; the workflow's `finally` blocks run, and their errors are ignored."""
        if self._coroutine is not None:
            try:
                self._coroutine.close()
            except (Exception, SystemExit, CancelledError) as error:  # noqa: BLE001  user code raises any error
                logger.debug("{}: its workflow failed while it was cancelled: {}", self.name, described(error))

    def _running(self) -> Coroutine[Any, Any, Episode]:
        if self._coroutine is None:
            raise RuntimeError("an episode must be started before it continues")
        return self._coroutine

    def _send(self, turn: Turn | None) -> Wish:
        coroutine = self._running()
        return self._settle(lambda: coroutine.send(turn))

    def _settle(self, resume: Callable[[], Any]) -> Wish:
        try:
            wish = resume()
        except StopIteration as end:
            self._end(end.value)
            return None
        if isinstance(wish, Awaited):
            return wish
        if not isinstance(wish, Asked):
            raise WorkflowError(f"a workflow may await ask(...) only; it awaited {type(wish).__name__}")
        self._take(wish)
        return wish

    def _take(self, asked: Asked) -> None:
        """Add the given tokens of a request to the episode."""
        self._before = self._state
        if asked.anew:
            self.n_forgotten += len(self.logps)
            self.n_begun_anew += 1
            self.ids, self.logps, self.spans, self.segments, self.trajectories, self._begun = [], [], [], [], [], []
        number = self._extended(asked)
        before = self._begun[number] if number < len(self._begun) else []
        n_before = len(before)
        if asked.ids[:n_before] != before:
            raise WorkflowError(
                f"mismatch of tokens: a call must begin with all {n_before} tokens of its trajectory before it; they "
                f"differ at token {_first_difference(asked.ids, before)}"
            )
        self.segments = [*self.segments, [len(asked.ids) - n_before, 0]]
        self.trajectories = [*self.trajectories, number]
        self.ids = [*self.ids, *asked.ids[n_before:]]
        self._begun = [*self._begun[:number], list(asked.ids), *self._begun[number + 1 :]]

    def _extended(self, asked: Asked) -> int:
        """Number of the trajectory that a request extends or begins."""
        latest, n_begun = self.trajectories[-1] if self.trajectories else 0, len(self._begun)
        number = latest if asked.trajectory is None else asked.trajectory
        if not 0 <= number <= n_begun:
            raise WorkflowError(f"unknown trajectory {number} of a call: {n_begun} of the episode have begun")
        if number == n_begun and not asked.ids:
            raise WorkflowError("missing tokens: the first call of a trajectory needs one or more tokens")
        return number

    def _end(self, value: Any) -> None:
        if not isinstance(value, Episode):
            raise WorkflowError(f"an episode must return an Episode; it returned {type(value).__name__}")
        if not self.logps:
            raise WorkflowError("an episode must sample at least one token; it sampled none")
        rule = broken_rule_of_trajectories(self.segments, self.trajectories)
        if rule := rule or broken_roles(self.trajectories, roles_of(value)):
            raise WorkflowError(f"wrong episode: {rule}")
        self.fields = checked_fields(value.fields, len(self.logps))
        self.episode = value


def roles_of(episode: Episode) -> str:
    """The names of its roles as one text. Raises WorkflowError for anything but texts."""
    roles: Any = episode.roles
    if isinstance(roles, str) or not (isinstance(roles, Sequence) and all(isinstance(role, str) for role in roles)):
        raise WorkflowError(f"Episode.roles must be a sequence of names, one of each trajectory; it is {roles!r:.80}")
    return " ".join(roles)


def checked_fields(fields: Any, n_sampled: int) -> dict[str, NDArray[np.float32]]:
    """(n_sampled,) each; a single number is for all tokens. Raises WorkflowError for invalid names or numbers."""
    if not isinstance(fields, Mapping):
        raise WorkflowError(f"Episode.fields must be a mapping of names to numbers; it is a {type(fields).__name__}")
    if broken := broken_rule([str(name) for name in fields]):
        raise WorkflowError(f"wrong Episode.fields: {broken}")
    found = {}
    for name, value in fields.items():
        try:
            numbers = np.asarray(value, dtype=np.float64)
        except (TypeError, ValueError):
            raise WorkflowError(f"Episode.fields[{name!r}] must be numbers; it is a {type(value).__name__}") from None
        if numbers.shape not in ((), (n_sampled,)) or not bool((np.abs(numbers) < MAX_NUMBER).all()):
            raise WorkflowError(
                f"mismatch in Episode.fields[{name!r}]: {n_sampled} finite numbers are needed, one of each sampled "
                f"token, or a single one; its shape is {numbers.shape}"
            )
        found[str(name)] = np.broadcast_to(numbers.astype("<f4"), (n_sampled,))
    return found


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
