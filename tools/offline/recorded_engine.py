"""An engine that samples nothing: it answers with the tokens that a run's engine sampled (journal.replay keeps them).

The plain loop uses it beside a ring whose server cannot be repeated: the tokens are given, all else is made anew.
"""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from actors.engines.protocol import Completion, Done, Request
from actors.learner.batching import Item, batch_shares, read_batch

Turn = tuple[list[int], list[int], list[float]]  # all tokens before it, its sampled tokens, their log-probs
MISSING: Turn = ([], [0], [0.0])  # of a request that the run has no tokens for: the comparison names the place


class RecordedEngine:
    """Implements Engine. The batch of version v answers the requests of version v (eta = 0)."""

    def __init__(self, run: Path) -> None:
        self.version: int | None = None
        self.n_tokens = 0
        self._run = run
        self._left: dict[tuple[int, int], list[Turn]] = {}  # turns to come, by uid and sample
        self._finish: dict[tuple[int, int], str] = {}  # of their last ones
        self._queue: list[Request] = []

    @property
    def n_live(self) -> int:
        return len(self._queue)

    def submit(self, request: Request) -> None:
        self._queue.append(request)

    def step(self) -> list[Completion]:
        ended, self._queue = [self._answer(request) for request in self._queue], []
        return ended

    def _answer(self, request: Request) -> Completion:
        _, uid, _, sample, _ = request.key
        left = self._left.get((uid, sample), [])
        turn = next((one for one in left if one[0] == list(request.ids)), left[0] if left else MISSING)
        if left:
            left.remove(turn)
        _, ids, logps = turn
        self.n_tokens += len(ids)
        finish = "length" if len(ids) >= request.max_new_tokens else "stop"
        finish = finish if left else self._finish.get((uid, sample), finish)
        return Completion(request.key, ids, logps, [[self.version or 0, len(ids)]], finish)

    def update(self, version: int, tensors: Mapping[str, Any], *, term: int = 0) -> Mapping[str, Any]:
        items = [item for share in batch_shares(self._run, version) for item in read_batch(share).items]
        self._left = {(item.uid, item.sample): turns(item) for item in items}
        self._finish = {(item.uid, item.sample): item.finish for item in items}
        self.version = version
        return tensors

    def abort(self, key: tuple[str, int, int, int, int]) -> Completion | None:
        self._queue = [request for request in self._queue if request.key != key]
        return None

    def newest(self, key: tuple[str, int, int, int, int]) -> int | None:
        return None

    def so_far(self, key: tuple[str, int, int, int, int]) -> Done | None:
        return None

    def parameters(self) -> Mapping[str, Any]:
        return {}

    def hold(self) -> bool:
        return bool(self._queue)

    def pause(self) -> None:
        """Its weights sample nothing."""

    def check(self) -> None:
        """It has no process that could end."""

    def close(self) -> None:
        """It has none to stop."""


def turns(item: Item) -> list[Turn]:
    """The turns of a sample, in order: runs of sampled tokens."""
    found: list[Turn] = []
    taken = 0
    firsts = (0, *item.cuts)
    for first, n in zip(firsts, item.counts(item.places_K), strict=True):
        places, logps = item.places_K[taken : taken + n], item.behav_K[taken : taken + n].tolist()
        breaks = ((places.diff() != 1).nonzero().flatten() + 1).tolist()
        for begin, end in pairwise([0, *breaks, n] if n else []):
            start = int(places[begin])
            ids = item.ids_T[start : start + end - begin].tolist()
            found.append((item.ids_T[first:start].tolist(), ids, logps[begin:end]))
        taken += n
    return found
