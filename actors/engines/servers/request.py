"""One request at a server: its tokens with known versions, and the piece in progress.

Versions of a piece are known at its end; before, only those of tokens before the first update (I5).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from actors.engines.builtin.sequence import stops_of
from actors.engines.protocol import PLAIN, Completion, Done, Request, stamp
from actors.engines.servers.protocol import PieceUpdate, RequestPiece
from actors.engines.stop_strings import StopStrings
from areal_bus.errors import EngineLost


@dataclass(slots=True)
class ServerRequest:
    """One live request."""

    request: Request
    ids: list[int] = field(default_factory=list)  # of pieces that have ended, and from before the request
    logps: list[float] = field(default_factory=list)
    spans: list[list[int]] = field(default_factory=list)
    rid: str | None = None  # of the piece in progress; None: the request waits
    since: int = 0  # version under which the piece was sent
    new_ids: list[int] = field(default_factory=list)  # of the piece in progress
    new_logps: list[float] = field(default_factory=list)
    n_sure: int | None = None  # of these with known versions, after an update; None: all are of `since`
    stops: tuple[int, ...] = ()  # tokens that end it
    strings: StopStrings | None = None  # texts that end it
    n_kept: int | None = None  # tokens up to its end; the server may have sampled more
    n_sent_again: int = 0  # pieces in a row that the server ended unasked

    @property
    def left(self) -> int:
        return self.request.max_new_tokens - len(self.ids)

    def piece(self, rid: str, version: int, salt: str = "") -> RequestPiece:
        """The rest of the request, to be sent under this version."""
        self.rid, self.since, self.n_sure = rid, version, None
        self.new_ids, self.new_logps = [], []
        request, n_least = self.request, max(0, self.request.controls.min_new_tokens - len(self.ids))
        controls, ids = replace(request.controls, min_new_tokens=n_least), [*request.ids, *self.ids]
        return RequestPiece(rid, ids, self.left, request.temperature, request.top_p, controls, self.stops, salt)

    def start_anew(self) -> None:
        """Drop the tokens so far if settings depend on them (penalties): a server counts them as prompt."""
        if self.request.controls.counts_completion:
            self.ids, self.logps, self.spans = [], [], []
            self.n_kept = None

    def find_end(self) -> bool:
        """Whether the sample ended where a server does not end it (stop strings, ignore_eos); drops the rest."""
        if self.n_kept is not None or self.request.controls == PLAIN:
            return self.n_kept is not None
        ids = self.ids + self.new_ids
        ends = [] if self.strings is None else [self.strings.end(ids)]
        ends += [next((at + 1 for at, token in enumerate(ids) if token in self.stops), None)]
        self.n_kept = min((end for end in ends if end is not None), default=None)
        return self.n_kept is not None

    def cut(self) -> None:
        """Drop the tokens after its end."""
        n = self.n_kept
        if n is not None:
            self.spans = shorter(self.spans, len(self.ids) - n)
            self.ids, self.logps = self.ids[:n], self.logps[:n]

    def hear(self, news: PieceUpdate) -> None:
        """Add an update of the piece. Raises EngineLost if it has too many tokens or lacks log-probs."""
        if len(news.ids) != len(news.logps) or len(self.new_ids) + len(news.ids) > self.left:
            raise EngineLost(
                f"a server gives a log-prob for each token, and no more tokens than asked for: {len(news.ids)} came "
                f"with {len(news.logps)} after {len(self.new_ids)} of {self.left}"
            )
        self.new_ids += news.ids
        self.new_logps += news.logps

    def mark(self) -> None:
        """An update begins: later tokens may be of either version."""
        if self.rid is not None and self.n_sure is None:
            self.n_sure = len(self.new_ids)

    def keep_sure(self) -> None:
        """Drop the tokens of the piece whose versions are not known."""
        n = len(self.new_ids) if self.n_sure is None else self.n_sure
        self.new_ids, self.new_logps = self.new_ids[:n], self.new_logps[:n]
        if self.n_kept is not None and self.n_kept > len(self.ids) + n:
            self.n_kept = None

    def settle(self, spans: list[list[int]]) -> None:
        """End the piece: its tokens have these versions."""
        stamped = sum(n for _, n in spans)
        if stamped != len(self.new_ids):
            raise EngineLost(
                f"a server must report the weight version of every token: it reported {stamped} of {len(self.new_ids)}"
            )
        self.ids += self.new_ids
        self.logps += self.new_logps
        self.spans = joined(self.spans, spans)
        self.rid, self.new_ids, self.new_logps, self.n_sure = None, [], [], None

    def done(self) -> Done | None:
        """A copy of the tokens with known versions; None if there are none."""
        n = len(self.new_ids) if self.n_sure is None else self.n_sure
        if self.n_kept is not None:  # another engine that continues it must find the end
            n = max(0, min(n, self.n_kept - 1 - len(self.ids)))
        ids, logps = self.ids + self.new_ids[:n], self.logps + self.new_logps[:n]
        return Done(ids, logps, joined(self.spans, [[self.since, n]])) if ids else None

    def completion(self, finish: str) -> Completion:
        return Completion(self.request.key, self.ids, self.logps, self.spans, finish)

    def given_up(self) -> Completion:
        """Its tokens whose versions are known, as an aborted completion."""
        done = self.done() or Done([], [], [])
        return Completion(self.request.key, done.ids, done.logps, done.spans, "abort")


def begun(request: Request, *, stop_ids: frozenset[int], tokenizer: Any) -> ServerRequest:
    """A new request, with its tokens so far. `stop_ids`: those of the model; `tokenizer`: for stop strings."""
    done, controls = request.done or Done([], [], []), request.controls
    sample = ServerRequest(request, list(done.ids), list(done.logps), [list(span) for span in done.spans])
    sample.stops = tuple(sorted(stops_of(controls, stop_ids)))
    sample.strings = StopStrings(tokenizer, controls) if controls.stop else None
    sample.start_anew()
    return sample


def shorter(spans: list[list[int]], n_over: int) -> list[list[int]]:
    """Spans without their last tokens."""
    left, kept = sum(n for _, n in spans) - n_over, []
    for version, n in spans:
        if left > 0:
            kept.append([version, min(n, left)])
        left -= n
    return kept


def joined(first: list[list[int]], then: list[list[int]]) -> list[list[int]]:
    """Concatenate spans; adjacent ones of one version become one."""
    spans = [list(span) for span in first]
    for version, n in then:
        if n:
            stamp(spans, version, n)
    return spans


def versions(labels: list[tuple[str, int]], known: Mapping[str, int]) -> list[list[int]]:
    """Versions of labels. Raises EngineLost for a label that was never sent: another process updates the server."""
    if any(n < 0 for _, n in labels):
        raise EngineLost(f"a server must report weight versions in the order of the tokens: {labels}")
    for label, n in labels:
        if n and label not in known:
            raise EngineLost(
                f"weights mismatch: the server's tokens are of {label!r}, which this generator never sent; it was "
                "restarted, or another client updates it"
            )
    return [[known[label], n] for label, n in labels if n]
