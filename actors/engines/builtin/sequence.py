"""A live request: its prompt, the tokens sampled so far, the version of each span, and its random numbers."""

import hashlib
import struct
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass, field, replace
from typing import Any

from actors.engines.protocol import PLAIN, Completion, Done, Request, SamplingControls, stamp
from actors.engines.stop_strings import StopStrings
from areal_bus.messages import Finish

PER_DIGEST = 8  # uniform numbers of one hash


class Uniforms:
    """Uniform numbers in [0, 1) by a counter-based generator: one for each seed and position."""

    __slots__ = ("_at", "_numbers", "_seeded")

    def __init__(self, seed: tuple[int, ...]) -> None:
        self._seeded = hashlib.blake2b(",".join(map(str, seed)).encode(), digest_size=8 * PER_DIGEST)
        self._at: int | None = None  # index of the cached digest: positions are read in order
        self._numbers: tuple[float, ...] = ()

    def at(self, position: int) -> float:
        which, place = divmod(position, PER_DIGEST)
        return self._of(which)[place]

    def run(self, first: int, n: int) -> list[float]:
        """The numbers of n positions."""
        found: list[float] = []
        while len(found) < n:
            which, place = divmod(first + len(found), PER_DIGEST)
            found += self._of(which)[place : place + n - len(found)]
        return found

    def _of(self, which: int) -> tuple[float, ...]:
        if which != self._at:
            hashed = self._seeded.copy()
            hashed.update(b"@%d" % which)
            numbers = struct.unpack("<8Q", hashed.digest())
            self._at, self._numbers = which, tuple([(number >> 11) * 2.0**-53 for number in numbers])
        return self._numbers


@dataclass(frozen=True, slots=True)
class FilteredRow:
    """A row whose tokens are not drawn from the model's distribution."""

    controls: SamplingControls
    temperature: float
    top_p: float
    prompt: TokenIds[int]
    sampled: TokenIds[int]  # the completion so far
    stops: frozenset[int]  # tokens that end it


@dataclass(slots=True)
class Sequence:
    """One live request."""

    request: Request
    prompt: tuple[int, ...]
    uniforms: Uniforms
    filled: int  # version that computed the KV cache of its prompt
    stops: frozenset[int]  # tokens that end it
    strings: StopStrings | None = None  # texts that end it
    is_plain: bool = True  # drawn from the model's distribution, and ended by its tokens
    cached: bool = False  # all but its last token are in the cache
    n_reused: int = 0  # tokens of its prompt that were not computed for it at first
    sampled: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    spans: list[list[int]] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.sampled)

    @property
    def last(self) -> int:
        return self.sampled[-1] if self.sampled else self.prompt[-1]

    @property
    def n_left(self) -> int:
        return self.request.max_new_tokens - len(self.sampled)

    @property
    def is_filtered(self) -> bool:
        """Whether its tokens are drawn from another distribution than the model's, beside top_p."""
        return not self.is_plain and self.request.controls.changes_sampling

    def continued(self) -> Request:
        """The request of the tokens that are left."""
        return replace(self.request, done=self.so_far()) if self.sampled else self.request

    def so_far(self) -> Done:
        """A copy of its tokens."""
        return Done(list(self.sampled), list(self.logps), [list(span) for span in self.spans])

    def add(self, tokens: list[int], logps: list[float], version: int) -> None:
        self.sampled += tokens
        self.logps += logps
        stamp(self.spans, version, len(tokens))

    def ended(self) -> Finish | None:
        """Why the last token is the last one; None: it is not. Call it after each token."""
        if self.last in self.stops:
            return Finish.STOP
        if self.strings is not None and self.strings.end(self.sampled) is not None:
            return Finish.STOP
        return Finish.LENGTH if self.n_left < 1 else None

    def completion(self, finish: Finish) -> Completion:
        return Completion(self.request.key, self.sampled, self.logps, self.spans, str(finish), self.n_reused)


def new_sequence(request: Request, *, version: int, stop_ids: frozenset[int], tokenizer: Any) -> Sequence:
    """The sequence of a request; partial tokens count as sampled. `stop_ids`: the model's. `tokenizer`: or None."""
    row = Sequence(request, tuple(request.ids), Uniforms(request.seed), filled=version, stops=stop_ids)
    if (done := request.done) is not None:
        row.sampled, row.logps, row.spans = list(done.ids), list(done.logps), [list(x) for x in done.spans]
    if (controls := request.controls) != PLAIN:
        row.is_plain, row.stops = False, stops_of(controls, stop_ids)
        row.strings = StopStrings(tokenizer, controls) if controls.stop else None
    return row


def filtered_row(row: Sequence) -> FilteredRow:
    """What the distribution of its next token depends on."""
    request = row.request
    return FilteredRow(request.controls, request.temperature, request.top_p, row.prompt, row.sampled, row.stops)


def stops_of(controls: SamplingControls, stop_ids: frozenset[int]) -> frozenset[int]:
    """TokenIds that end a completion, of the model's own and those asked for."""
    return (frozenset() if controls.ignore_eos else stop_ids) | frozenset(controls.stop_token_ids)
