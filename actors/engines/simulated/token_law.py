"""The next-token distribution of the simulated engine: a function of the weights and the tokens so far, by a hash.

All tokens except stop tokens have a rank, with fixed probabilities by rank (Zipf's law). A hash of the tokens so far,
with the key of the weights that read each run of them, rotates the ranks. So other weights or another earlier token
give other log-probs, and tokens that old weights read keep their effect, as in a kept KV cache.
`actors.engines.simulated.workload` decides when a text ends: the stop token takes that probability, and the ranks
share the rest.
"""

import hashlib
import itertools
import math
import struct
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any


def key_of(tensors: Mapping[str, Any]) -> bytes:
    """32 bytes that stand for these weights: of all names, types, shapes and bytes."""
    import torch  # only where weights come in

    whole = hashlib.blake2b(digest_size=32)
    for name, tensor in sorted(tensors.items()):
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        whole.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return whole.digest()


class ReadTokens:
    """The tokens that were read, each run of them with the key of the weights that read it."""

    __slots__ = ("_key", "_state", "n")

    def __init__(self) -> None:
        self._state, self._key = hashlib.blake2b(digest_size=8), b""
        self.n = 0  # tokens read

    def read(self, key: bytes, ids: Sequence[int]) -> None:
        if key != self._key:
            self._state.update(key)
            self._key = key
        self._state.update(struct.pack(f"<{len(ids)}i", *ids))
        self.n += len(ids)

    def turn(self, n_ranks: int) -> int:
        """By how much the ranks are turned for the next token."""
        return int.from_bytes(self._state.digest(), "little") % n_ranks


class RankLaw:
    """The law of ranks at one temperature and nucleus: p(rank) ~ (rank + 1) ** (-1 / temperature)."""

    def __init__(self, n: int, *, temperature: float, top_p: float) -> None:
        """Temperature 0 takes the first, and gives its log-prob at temperature 1."""
        logits = [-math.log(rank) / (temperature or 1.0) for rank in range(1, n + 1)]
        total = math.log(math.fsum(map(math.exp, logits)))
        self.logps = [logit - total for logit in logits]
        below = list(itertools.accumulate(map(math.exp, self.logps)))
        n_kept = 1 if not temperature else next((i + 1 for i, p in enumerate(below) if p >= top_p), n)
        self._below = below[:n_kept]

    def at(self, uniform: float) -> int:
        """The rank at this quantile of the nucleus."""
        return min(bisect_right(self._below, uniform * self._below[-1]), len(self._below) - 1)
