"""Which version of the weights has sampled the tokens that a client trains on: it sends tokens back, no version.

A version of a model is the number of its optimizer steps. A sequence (prompt and sampled tokens) is known by a hash of
its tokens. A datum holds a sequence when it begins with it; a conversation holds one for each of its turns.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from areal_serve.wire import Datum, Numbers, PassRequest

KEPT = 1 << 17  # sequences that are remembered, the newest
BASE = ""  # in place of a model: the base model, version 0 of each
MIX, SPREAD, STEP = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0xD6E8FEB86659FD93))


class Known(NamedTuple):
    """What is known of a sequence."""

    version: int
    n_sampled: int  # its last tokens


class Versions:
    """The newest version that has sampled each of the latest sequences."""

    def __init__(self) -> None:
        self._held: OrderedDict[tuple[str, int], Known] = OrderedDict()  # by model and hash

    def add(self, model_id: str, version: int, marks: Iterable[Sequence[int]]) -> None:
        """`marks`: those of `mark`."""
        for key, n_sampled in marks:
            known = self._held.pop((model_id, key), None) or Known(version, n_sampled)
            self._held[model_id, key] = known if known.version > version else Known(version, n_sampled)
        while len(self._held) > KEPT:
            self._held.popitem(last=False)

    def oldest(self, request: PassRequest) -> tuple[int, int] | None:
        """(index of a datum, version) of the oldest tokens that the pass trains on, as far as they are known."""
        found = None
        for index, datum in enumerate(request.data):
            is_trained = trained_on(datum, request.loss_fn)
            if is_trained is None:
                continue
            ids = np.append(datum.ids_T, datum.inputs["target_tokens"][-1])
            for end, key in enumerate(prefix_hashes(ids).tolist(), 1):
                one = self._held.get((request.model_id, key)) or self._held.get((BASE, key))
                is_older = one is not None and (found is None or one.version < found[1])
                if one is not None and is_older and is_trained[end - one.n_sampled : end].any():
                    found = (index, one.version)
        return found


def trained_on(datum: Datum, loss_fn: str) -> Numbers | None:
    """Whether each token of a datum, its last target included, has a gradient. None for a datum of another form."""
    targets = datum.inputs.get("target_tokens")
    if targets is None or not targets.size or targets.shape != datum.ids_T.shape:
        return None
    weights = datum.inputs.get("weights" if loss_fn == "cross_entropy" else "advantages")
    if weights is None or loss_fn == "dro":  # its quadratic term is at every position
        weights = np.ones(targets.shape)
    return np.append(False, weights != 0) if weights.shape == targets.shape else None


def n_trained(datum: Datum, loss_fn: str) -> int:
    """Tokens of a datum that have a gradient; all of its targets where the form does not say."""
    is_trained = trained_on(datum, loss_fn)
    return int(datum.inputs["target_tokens"].size if is_trained is None else is_trained.sum())


def mark(prompt: Sequence[int], sampled: Sequence[int]) -> tuple[int, int]:
    """What is kept of a sequence: its hash, and how many tokens were sampled."""
    return int(prefix_hashes(np.array([*prompt, *sampled], np.int64))[-1]), len(sampled)


def prefix_hashes(ids_T: Any) -> Any:
    """(T,) 64-bit hashes of the first 1, 2, ... T tokens."""
    mixed = (ids_T.astype(np.uint64) + np.uint64(1)) * MIX
    mixed = (mixed ^ (mixed >> np.uint64(29))) * SPREAD
    return np.cumsum(mixed * np.cumprod(np.full(len(ids_T), STEP)))
