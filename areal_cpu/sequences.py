"""Where the tokens of packed sequences are, for the attention kernels."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class CachePiece:
    """Tokens begin .. end of a packed sequence are positions start .. of these rows."""

    rows: list[int]
    begin: int
    end: int
    start: int


class Sequences:
    """Which rows are each sequence's tokens; of its `first` ones an earlier sequence has the queries.

    Not a dataclass: FSDP2's mixed precision takes each dataclass among a forward's arguments apart and builds it again.
    """

    __slots__ = ("firsts", "lengths", "n_rows", "rows")

    def __init__(self, n_rows: int, lengths: Tensor, firsts: Tensor, rows: Tensor) -> None:
        """`rows`: of all tokens, one sequence after the other. Raises ValueError for what C could not follow."""
        given = (lengths, firsts, rows)
        if not all(part.dtype is torch.int64 and part.is_contiguous() and part.device.type == "cpu" for part in given):
            raise ValueError("a kernel takes contiguous int64 on a CPU for lengths, firsts and rows")
        if len(lengths) != len(firsts) or int(lengths.sum()) != len(rows):
            raise ValueError(f"{len(lengths)} sequences have {len(firsts)} firsts, {len(rows)} rows")
        if ((firsts < 0) | (firsts > lengths)).any():
            raise ValueError("a shared prefix may not be longer than its sequence")
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < n_rows:
            raise ValueError(f"rows of a sequence must be below {n_rows}")
        self.n_rows, self.lengths, self.firsts, self.rows = n_rows, lengths, firsts, rows

    @staticmethod
    def of(lengths: Sequence[int], expand: Tensor | None, keep: Tensor | None) -> "Sequences | None":
        """Of a row laid out by actors/models/packed_row.py.

        None if a prompt row is not the first of a sequence that holds it whole.
        """
        sizes = torch.tensor(lengths, dtype=torch.int64)
        n_tokens = int(sizes.sum())
        places = torch.arange(n_tokens)
        if expand is None or keep is None:
            return Sequences(n_tokens, sizes, torch.zeros_like(sizes), places)
        if len(expand) != n_tokens:
            raise ValueError(f"sequences of {n_tokens} tokens need a row for each token: got {len(expand)}")
        first_places = torch.full((len(keep),), n_tokens).scatter_reduce(0, expand, places, "amin")
        owners = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        firsts = sizes - torch.bincount(owners[keep], minlength=len(sizes))
        is_first = places - (sizes.cumsum(0) - sizes)[owners] >= firsts[owners]
        if not (torch.equal(first_places, keep) and torch.equal(is_first.nonzero()[:, 0], keep.sort().values)):
            return None
        order = expand[sizes.cumsum(0) - sizes].argsort(stable=True)  # sequences that share rows are neighbours
        turn = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        if (turn[owners[keep]][expand] > turn[owners]).any():  # a row's queries would come behind those who see it
            order = torch.arange(len(order))
        parts = torch.split(expand, sizes.tolist())
        return Sequences(len(keep), sizes[order], firsts[order], torch.cat([parts[i] for i in order.tolist()]))
