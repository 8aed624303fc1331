"""Several versions of the weights at once: each trajectory is sampled by the version that it began with.

One `BuiltinEngine` a version, over a copy of the model with weights of its own. New episodes begin at the newest; an
older one is dropped when its last episode has ended (DORA, arXiv 2604.26256). `rollout.on_update = "finish_old"`.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from actors.engines.builtin import limits
from actors.engines.builtin.engine import BuiltinEngine, Key
from actors.engines.protocol import Completion, Done, Request, check_order
from areal_bus.errors import EngineError

Episode = tuple[str, int, int, int]  # evaluation, uid, attempt, sample


def twin(model: Any) -> Any:
    """The same model with weights of its own, which are not set."""
    memo = {id(p): torch.nn.Parameter(torch.empty_like(p), requires_grad=False) for p in model.parameters()}
    return copy.deepcopy(model, memo)


class VersionedEngine:
    """An `Engine` of at most `most` versions. The caller reports the end of each episode (`forget`).

    Episodes go on with newer weights in two cases: at the first weights of a newer term, and where an update comes
    although `hold` reports no room (those of the oldest version).
    """

    def __init__(self, model: Any, make: Callable[[Any], BuiltinEngine], *, n_slots: int, most: int) -> None:
        """`make(model)`: the engine of one version, without weights."""
        self._model, self._make, self._n_slots, self._most = model, make, n_slots, most
        first = make(model)
        self._lanes = [first]  # by version; the last one is the newest
        self._spare: BuiltinEngine | None = None  # its weights are written over by the next update
        self._lane_of: dict[Episode, BuiltinEngine] = {}
        self._term = 0
        self._paused = False
        self._ahead_s = first.ahead_s
        self.n_tokens = 0
        self.prefill_s = 0.0  # seconds in prefills so far; measured on a CPU only

    @property
    def version(self) -> int | None:
        return self._lanes[-1].version

    @property
    def versions(self) -> list[int | None]:
        """Those held, oldest first."""
        return [lane.version for lane in self._lanes]

    @property
    def n_live(self) -> int:
        return sum(lane.n_live for lane in self._lanes)

    def continues(self, spans: Sequence[Sequence[int]]) -> bool:
        """Whether tokens of these versions can be continued without another version."""
        return len(spans) == 1 and spans[0][0] in self.versions

    def submit(self, request: Request) -> None:
        """Queue a request at its episode's version, which is that of its tokens, else the newest. Raises EngineError if
        it does not fit the model or its key is not unique.
        """
        if any(request.key in lane.keys for lane in self._lanes):
            raise EngineError(f"a request must have a key that no live request has: {request.key}")
        lane = self._lane_of.get(request.key[:4], self._lanes[-1])
        if request.done is not None:
            lane = next((one for one in self._lanes if one.version == request.done.spans[-1][0]), lane)
        lane.submit(request)
        self._lane_of[request.key[:4]] = lane

    def step(self) -> list[Completion]:
        """Decode one or several steps of each version; returns the finished rows. Does nothing without weights."""
        if self._paused:
            return []
        busy = [lane for lane in self._lanes if lane.n_live]
        done: list[Completion] = []
        for lane in busy:
            lane.n_slots = self._n_slots - sum(other.n_rows for other in busy if other is not lane)
            lane.ahead_s = self._ahead_s / len(busy)
            n_tokens, prefill_s = lane.n_tokens, lane.prefill_s
            done += lane.step()
            self.n_tokens += lane.n_tokens - n_tokens
            self.prefill_s += lane.prefill_s - prefill_s
        return done

    def abort(self, key: Key) -> Completion | None:
        """Remove a request; returns its tokens so far, or None if it is not live."""
        return next((done for lane in self._lanes if (done := lane.abort(key)) is not None), None)

    def forget(self, episode: Episode) -> None:
        """The episode has ended: no request of it follows, and none is live."""
        self._lane_of.pop(episode, None)
        self._drop_idle()

    def newest(self, key: Key) -> int | None:
        """Version of the latest token of a request; None if it has none or is not live."""
        return next((found for lane in self._lanes if (found := lane.newest(key)) is not None), None)

    def so_far(self, key: Key) -> Done | None:
        """A copy of the tokens of a live request; None if it has none or is not live."""
        return next((found for lane in self._lanes if (found := lane.so_far(key)) is not None), None)

    def parameters(self) -> Mapping[str, Tensor]:
        """Name -> live weight of the newest version; a tied weight once."""
        return self._lanes[-1].parameters()

    def next_parameters(self) -> Mapping[str, Tensor]:
        """Name -> weight that the next update may write over: no episode uses it."""
        return self._next().parameters()

    def update(self, version: int, tensors: Mapping[str, Tensor], *, term: int = 0) -> Mapping[str, Tensor]:
        """Begin a version; returns reusable tensors. Raises EngineError, unchanged."""
        newest = self._lanes[-1]
        check_order(None if newest.version is None else (self._term, newest.version), term, version)
        limits.check_update(newest.parameters(), tensors)
        is_anew = term > self._term
        lane = self._next()
        carried = [request for old in self._lanes for request in old.displace(begun=is_anew or old is lane)]
        free = lane.update(version, tensors, term=term)
        self._lanes = [old for old in self._lanes if old is not lane] + [lane]
        self._spare = None if lane is self._spare else self._spare
        for episode, old in self._lane_of.items():  # between two turns of an episode nothing is displaced
            self._lane_of[episode] = lane if is_anew or old is lane else old
        for request in carried:
            lane.submit(request)
            self._lane_of[request.key[:4]] = lane
        self._term, self._paused = term, False
        self._drop_idle()
        return free

    def hold(self) -> bool:
        """Whether there is no room for another version before the episodes of the oldest have ended."""
        return self._spare is None and self._is_used(self._lanes[-1]) and len(self._lanes) >= self._most

    def pause(self) -> None:
        """Decode nothing before the next update."""
        self._paused = True

    def check(self) -> None:
        """Health check: no other process is involved."""

    def close(self) -> None:
        """Nothing to stop."""

    def _is_used(self, lane: BuiltinEngine) -> bool:
        """Whether an episode has begun at this version."""
        unbegun = {request.key[:4] for request in lane.unbegun}
        return any(own is lane and episode not in unbegun for episode, own in self._lane_of.items())

    def _next(self) -> BuiltinEngine:
        """The lane of the next version: the newest if nothing has begun there, else an idle, new or the oldest one."""
        if not self._is_used(self._lanes[-1]):
            return self._lanes[-1]
        if self._spare is None and len(self._lanes) < self._most:
            self._spare = self._make(twin(self._model))
        return self._spare or self._lanes[0]

    def _drop_idle(self) -> None:
        """Older versions without an episode: one is kept for the next weights, the others are freed."""
        for lane in [lane for lane in self._lanes[:-1] if lane not in self._lane_of.values()]:
            self._lanes.remove(lane)
            self._spare = self._spare or lane
