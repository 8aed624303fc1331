"""Sequences laid out as one packed row, with the prompt that several of them share read once; knows no model.

Samples of one prompt differ after it only, and a causal model's hidden states of the prompt do not depend on what
follows. So the row holds the prompt once and each completion after it, and only attention sees whole sequences.

Shapes: T tokens of one sequence, S of the row, E of all sequences laid end to end, K wanted places of a sequence, N of
all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """A sequence and the places (each at least 1) whose tokens' log-probs are wanted."""

    ids_T: Tensor
    places_K: Tensor
    family: int | None = None  # pieces of one family begin with the same prompt

    @property
    def n_read(self) -> int:
        """Tokens the model has to read: the last wanted token and what follows it predict nothing that is wanted."""
        return int(self.places_K[-1]) if len(self.places_K) else 1


@dataclass(frozen=True, slots=True)
class Row:
    """What a packed forward needs."""

    ids_S: Tensor
    positions_S: Tensor  # within each sequence
    lengths: tuple[int, ...]  # of the whole sequences, in the order of expand_E; they add up to E
    wanted_N: Tensor  # rows whose next token is wanted
    targets_N: Tensor  # that token
    expand_E: Tensor | None  # row of each token of the whole sequences, the shortest first; None: the row is these
    keep_S: Tensor | None  # for each row, a place among the E at which it stands

    def filled(self, n_tokens: int, n_wanted: int) -> "Row":
        """As many tokens and wanted ones: behind it zeros, a sequence of their own, and its last wanted one again."""
        more, again = n_tokens - len(self.ids_S), n_wanted - len(self.wanted_N)
        row = self
        if again:
            wanted_N = torch.cat([self.wanted_N, self.wanted_N[-1:].expand(again)])
            row = replace(
                row, wanted_N=wanted_N, targets_N=torch.cat([self.targets_N, self.targets_N[-1:].expand(again)])
            )
        if more:
            zeros = torch.zeros(more, dtype=torch.int64)
            row = replace(
                row,
                ids_S=torch.cat([self.ids_S, zeros.to(self.ids_S.dtype)]),
                positions_S=torch.cat([self.positions_S, zeros]),  # some models have few
                lengths=(*self.lengths, more),
                expand_E=_counted_on(self.expand_E, len(self.ids_S), more),
                keep_S=_counted_on(self.keep_S, sum(self.lengths), more),
            )
        return row


def lay_out(pieces: Sequence[Piece], *, share: bool) -> Row:
    """One row for all pieces; without `share` each is read in full, in order.

    With `share` attention sees the whole sequences by length: those of one length go through one call.
    """
    parts: list[Tensor] = []  # positions of each run of the row
    ids: list[Tensor] = []
    rows: list[Tensor] = [torch.empty(0)] * len(pieces)  # (n_read,) of each piece: its tokens' rows
    n_rows = 0
    families = _families(pieces, share=share)
    for members in families:
        n_shared = _n_shared([pieces[i] for i in members])
        prompt = torch.arange(n_rows, n_rows + n_shared)
        parts.append(torch.arange(n_shared))
        ids.append(pieces[members[0]].ids_T[:n_shared])
        n_rows += n_shared
        for i in members:
            own = pieces[i].n_read - n_shared
            rows[i] = torch.cat([prompt, torch.arange(n_rows, n_rows + own)])
            parts.append(torch.arange(n_shared, n_shared + own))
            ids.append(pieces[i].ids_T[n_shared : n_shared + own])
            n_rows += own
    expands = share and len(pieces) > 1
    whole = sorted(rows, key=len) if expands else rows
    return Row(
        ids_S=torch.cat(ids),
        positions_S=torch.cat(parts),
        lengths=tuple(len(r) for r in whole),
        wanted_N=torch.cat([r[piece.places_K - 1] for r, piece in zip(rows, pieces, strict=True)]),
        targets_N=torch.cat([piece.ids_T[piece.places_K] for piece in pieces]),
        expand_E=torch.cat(whole) if expands else None,
        keep_S=_first_places(whole, n_rows) if expands else None,
    )


def _counted_on(places: Tensor | None, first: int, n: int) -> Tensor | None:
    return None if places is None else torch.cat([places, torch.arange(first, first + n)])


def n_rows(pieces: Sequence[Piece]) -> int:
    """Length of the row that pieces of one family make."""
    n_shared = _n_shared(pieces)
    return n_shared + sum(piece.n_read - n_shared for piece in pieces)


def _families(pieces: Sequence[Piece], *, share: bool) -> list[list[int]]:
    found: dict[tuple[str, int], list[int]] = {}
    for i, piece in enumerate(pieces):
        together = share and piece.family is not None
        key = ("family", piece.family or 0) if together else ("alone", i)
        found.setdefault(key, []).append(i)
    return list(found.values())


def _n_shared(pieces: Sequence[Piece]) -> int:
    """Tokens with which all pieces begin; 0 for a single one."""
    if len(pieces) < 2:
        return 0
    most = min(piece.n_read for piece in pieces)
    alike = torch.stack([piece.ids_T[:most] == pieces[0].ids_T[:most] for piece in pieces]).all(dim=0)
    return int(alike.long().cumprod(dim=0).sum())


def _first_places(rows: Sequence[Tensor], n: int) -> Tensor:
    keep = torch.empty(n, dtype=torch.int64)
    end = sum(len(r) for r in rows)
    for r in reversed(rows):
        keep[r] = torch.arange(end - len(r), end)
        end -= len(r)
    return keep
