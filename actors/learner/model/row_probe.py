"""Tests at load whether a model keeps the sequences of a packed row apart: short ones are read alone and together.

Shapes: S tokens of a row, N wanted tokens of it, V outputs of the head.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from actors.models.packed_row import PackedRow, SequencePiece, lay_out
from areal_bus.errors import ConfigError

Read = Callable[[PackedRow], Tensor]  # (1, N, V) outputs of the head
LENGTHS = (12, 9)  # tokens of the two sequences
PROMPT = 4  # tokens with which both begin
FIRST = 3  # first wanted place: some outputs are not wanted, as those of a prompt
FULL = (2e-4, 2e-4)  # float32: largest difference from a sequence read alone; by what its neighbours are
HALF = (0.5, 0.02)  # other types: rows of other shapes round otherwise, rows of one shape do not
APART = {"full_attention", "sliding_attention"}  # layers whose masks transformers makes for each sequence of a row
CANNOT = "model family refused"


class RowProbe:
    """Two sequences, how the model reads each of them alone, and what changes when they share a row."""

    def __init__(self, config: Any, n_words: int, agree: Callable[[list[float]], list[float]]) -> None:
        """`config`: of the text model. `agree`: largest values over the ranks."""
        self._family, self._agree = config.model_type, agree
        self._far = far_position(config)
        self._pieces = [_piece(n, n_words, start) for start, n in enumerate(LENGTHS)]
        self._changed = _piece(LENGTHS[0], n_words, 5)
        self._alone: list[Tensor] = []

    def read_alone(self, read: Read) -> None:
        """Read each sequence by itself. Raises ConfigError if the model cannot, or is not causal."""
        try:
            self._alone = [_values(read, lay_out([piece], share=False)) for piece in self._pieces]
            ids_T = self._pieces[0].ids_T.clone()
            ids_T[-2] = self._changed.ids_T[0]  # the last one that is read
            later = _values(read, lay_out([replace(self._pieces[0], ids_T=ids_T)], share=False))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{CANNOT}: {self._family} cannot compute log-probs of chosen tokens (input_ids, position_ids, "
                f"logits_to_keep): {_brief(error)}; choose a causal language model that transformers runs in this way"
            ) from error
        if not all(values.isfinite().all() for values in self._alone):
            raise ConfigError(f"{CANNOT}: log-probs of {self._family} are not finite; check its weights for NaN")
        if self._differ([self._alone[0][:-2]], [later[:-2]], 1):
            raise ConfigError(
                f"{CANNOT}: {self._family} is not causal: a later token changes the log-probs of earlier ones by "
                f"{_gap([self._alone[0][:-2]], [later[:-2]]):.2g}; choose a decoder (is_decoder = true in config.json)"
            )

    def trouble(self, read: Read, *, share: bool) -> str:
        """Why the sequences cannot share a row; "" if they can. `share`: a common prompt stands there once."""
        try:
            found = self._together(read, self._pieces, self._far, share=share)
            swapped = self._together(read, [self._changed, self._pieces[1]], 0, share=share)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001  foreign code raises any error
            return f"a packed row raises {_brief(error)}"
        if self._differ(found, self._alone, 0) or self._differ(found[1:], swapped[1:], 1):
            gap = max(_gap(found, self._alone), _gap(found[1:], swapped[1:]))
            return f"log-probs change by {gap:.2g} with what else is in the row"
        return ""

    def _together(self, read: Read, pieces: list[SequencePiece], far: int, *, share: bool) -> list[Tensor]:
        """Values of each piece in one row, behind which one more token stands at a far position."""
        last = SequencePiece(pieces[0].ids_T[:1], torch.zeros(0, dtype=torch.int64))
        row = lay_out([*pieces, last], share=share)
        positions_S = row.positions_S.clone()
        positions_S[-1] = far
        values_N = _values(read, replace(row, positions_S=positions_S))
        return list(torch.split(values_N, [len(piece.places_K) for piece in pieces]))

    def _differ(self, found: list[Tensor], expected: list[Tensor], which: int) -> bool:
        """Whether two readings differ by more than rounding, on any rank."""
        limits = FULL if expected[0].dtype is torch.float32 else HALF
        (gap,) = self._agree([_gap(found, expected)])
        return not gap <= limits[which]


def far_position(config: Any) -> int:
    """A position where rotary frequencies that follow the longest sequence have changed; 0 if positions are unknown."""
    most = int(getattr(config, "max_position_embeddings", None) or 0)
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, dict)}
    return 4 * most if "dynamic" in kinds else max(most - 1, 0)  # a table of positions ends there


def whole_row(config: Any) -> str:
    """What the model's layers count over the whole row, beyond what short sequences show; "" for nothing."""
    others = set(getattr(config, "layer_types", None) or ()) - APART
    if others:
        return f"layers of kind {', '.join(sorted(others))} count over the row"
    return "its index of keys is that of the row" if getattr(config, "index_topk", None) else ""


def _piece(n: int, n_words: int, start: int) -> SequencePiece:
    """A sequence of n tokens; those of one `start` are alike, and all begin alike."""
    ids_T = (torch.arange(n) + 1) * (7919 + 2 * start) % n_words
    ids_T[:PROMPT] = (torch.arange(PROMPT) + 1) * 7919 % n_words
    return SequencePiece(ids_T, torch.arange(FIRST, n), family=0)


@torch.no_grad()
def _values(read: Read, row: PackedRow) -> Tensor:
    """(N,) log-probs of the targets, or the outputs of a head that has one; in the type of the outputs."""
    outputs_NV = read(row).flatten(0, 1)
    if len(outputs_NV) != len(row.targets_N):
        raise ValueError(f"{len(outputs_NV)} outputs where logits_to_keep names {len(row.targets_N)}")
    if outputs_NV.shape[1] == 1:
        return outputs_NV[:, 0].detach().cpu()
    values_N = outputs_NV.float().log_softmax(-1).cpu().gather(1, row.targets_N.unsqueeze(1)).squeeze(1)
    return values_N.to(outputs_NV.dtype)


def _gap(found: list[Tensor], expected: list[Tensor]) -> float:
    return float((torch.cat(found).float() - torch.cat(expected).float()).abs().max())


def _brief(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
