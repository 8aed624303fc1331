"""Packs sequences into one row; a prompt that several sequences share is stored once.

Samples of one prompt differ after it only, and a causal model's hidden states of the prompt do not depend on what
follows. So the row holds the prompt once and each completion after it, and only attention sees whole sequences.

Shapes: T tokens of one sequence, S of the row, E of all sequences laid end to end, K wanted places of a sequence, N of
all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[Any]


@dataclass(frozen=True, slots=True)
class SequencePiece:
    """A sequence and the places (each at least 1) whose tokens' log-probs are wanted."""

    ids_T: Tensor
    places_K: Tensor
    family: int | None = None  # pieces of one family begin with the same prompt
    targets_K: Tensor | None = None  # other tokens whose log-probs are wanted there; None: those of the sequence
    temperature: float | None = None  # of its log-probs; None: the model's

    @property
    def n_read(self) -> int:
        """Tokens the model has to read: the last wanted token and what follows it predict nothing that is wanted."""
        return int(self.places_K.numpy()[-1]) if len(self.places_K) else 1


@dataclass(frozen=True, slots=True)
class PackedRow:
    """What a packed forward needs."""

    ids_S: Tensor
    positions_S: Tensor  # within each sequence
    lengths: tuple[int, ...]  # of the whole sequences, in the order of expand_E; they add up to E
    wanted_N: Tensor  # rows whose next token is wanted
    targets_N: Tensor  # that token
    expand_E: Tensor | None  # row of each token of the whole sequences, the shortest first; None: the row is these
    keep_S: Tensor | None  # for each row, a place among the E at which it stands
    heat_N: Tensor | None = None  # float32 temperature of each target; None: all have the model's

    def filled(self, n_tokens: int, n_wanted: int) -> "PackedRow":
        """As many tokens and wanted ones: behind it zeros, a sequence of their own, and its last wanted one again."""
        more, again = n_tokens - len(self.ids_S), n_wanted - len(self.wanted_N)
        row = self
        if again:
            wanted_N = torch.cat([self.wanted_N, self.wanted_N[-1:].expand(again)])
            targets_N = torch.cat([self.targets_N, self.targets_N[-1:].expand(again)])
            heat_N = None if self.heat_N is None else torch.cat([self.heat_N, self.heat_N[-1:].expand(again)])
            row = replace(row, wanted_N=wanted_N, targets_N=targets_N, heat_N=heat_N)
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


def lay_out(pieces: Sequence[SequencePiece], *, share: bool, temperature: float = 1.0) -> PackedRow:
    """One row for all pieces, in order; with `share` attention sees sequences by length, equal ones in one call.

    `temperature`: of pieces without their own.
    """
    ids, places = [piece.ids_T.numpy() for piece in pieces], [piece.places_K.numpy() for piece in pieces]
    n_read_P = np.array([piece.n_read for piece in pieces])
    expands = share and len(pieces) > 1
    laid = _Laid(pieces, n_read_P, share=share)
    whole_P = np.argsort(n_read_P, kind="stable") if expands else np.arange(len(pieces))
    length_P = n_read_P[whole_P]
    place_E = np.arange(length_P.sum()) - np.repeat(np.cumsum(length_P) - length_P, length_P)
    expand_E = laid.rows(np.repeat(whole_P, length_P), place_E)
    keep_S = _first_places(expand_E, laid.n_rows)
    wanting_N = np.repeat(np.arange(len(pieces)), [len(part) for part in places])
    heat_P = [temperature if piece.temperature is None else piece.temperature for piece in pieces]
    has_own = any(heat != temperature for heat in heat_P)
    return PackedRow(
        ids_S=torch.from_numpy(np.concatenate([ids[i][begin:end] for i, begin, end in laid.runs])),
        positions_S=torch.from_numpy(place_E[keep_S]),
        lengths=tuple(length_P.tolist()),
        wanted_N=torch.from_numpy(laid.rows(wanting_N, np.concatenate(places) - 1)),
        targets_N=torch.from_numpy(np.concatenate([_targets(piece) for piece in pieces])),
        expand_E=torch.from_numpy(expand_E) if expands else None,
        keep_S=torch.from_numpy(keep_S) if expands else None,
        heat_N=torch.tensor(heat_P, dtype=torch.float32)[torch.from_numpy(wanting_N)] if has_own else None,
    )


def _targets(piece: SequencePiece) -> Numbers:
    tokens = piece.ids_T[piece.places_K] if piece.targets_K is None else piece.targets_K
    return tokens.numpy()


class _Laid:
    """Where each of P pieces stands in the row."""

    def __init__(self, pieces: Sequence[SequencePiece], n_read_P: Numbers, *, share: bool) -> None:
        self._n_shared_P, self._prompt_P, self._own_P = np.zeros((3, len(pieces)), np.int64)  # of both the first row
        self.runs: list[tuple[int, int, int]] = []  # (piece, first token, last one + 1) in the row's order
        self.n_rows = 0
        for members in _families(pieces, share=share):
            n_shared = _n_shared([pieces[i] for i in members])
            self._n_shared_P[members], self._prompt_P[members] = n_shared, self.n_rows
            self.runs.append((members[0], 0, n_shared))
            self.n_rows += n_shared
            for i in members:
                self.runs.append((i, n_shared, int(n_read_P[i])))
                self._own_P[i] = self.n_rows
                self.n_rows += int(n_read_P[i]) - n_shared

    def rows(self, piece_N: Numbers, place_N: Numbers) -> Numbers:
        """Of pieces' tokens."""
        own_N = place_N - self._n_shared_P[piece_N]
        return np.where(own_N < 0, self._prompt_P[piece_N] + place_N, self._own_P[piece_N] + own_N)


def _counted_on(places: Tensor | None, first: int, n: int) -> Tensor | None:
    return None if places is None else torch.cat([places, torch.arange(first, first + n)])


def n_rows(pieces: Sequence[SequencePiece]) -> int:
    """Length of the row that pieces of one family make."""
    n_shared = _n_shared(pieces)
    return n_shared + sum(piece.n_read - n_shared for piece in pieces)


def _families(pieces: Sequence[SequencePiece], *, share: bool) -> list[list[int]]:
    found: dict[tuple[str, int], list[int]] = {}
    for i, piece in enumerate(pieces):
        together = share and piece.family is not None
        key = ("family", piece.family or 0) if together else ("alone", i)
        found.setdefault(key, []).append(i)
    return list(found.values())


def _n_shared(pieces: Sequence[SequencePiece]) -> int:
    """Tokens with which all pieces begin; 0 for a single one."""
    if len(pieces) < 2:
        return 0
    most, first_T = min(piece.n_read for piece in pieces), pieces[0].ids_T.numpy()
    for piece in pieces[1:]:
        differs_T = piece.ids_T.numpy()[:most] != first_T[:most]
        if differs_T.any():
            most = int(differs_T.argmax())
    return most


def _first_places(expand_E: Numbers, n_rows: int) -> Numbers:
    keep_S = np.empty(n_rows, np.int64)
    keep_S[expand_E[::-1]] = np.arange(len(expand_E) - 1, -1, -1)  # of one row's places the last that is given stays
    return keep_S
