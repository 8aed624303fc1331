"""Plans prefill: which sequences share one packed forward pass, and which prompts they share (trees)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from actors.engines.builtin.dense_cache import CachePiece
from areal_cpu.sequences import Sequences


@dataclass(frozen=True, slots=True)
class Branch:
    """One sequence: its row, and its tokens after the prompt."""

    row: int
    tail: Sequence[int]


@dataclass(slots=True)
class Tree:
    """Sequences with the same prompt."""

    prompt: tuple[int, ...]
    branches: list[Branch] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PrefillPack:
    """One packed forward of T tokens; `last` are the tokens whose logits are wanted, one for each of `rows`."""

    ids: list[int]
    positions: list[int]
    pieces: list[CachePiece]
    rows: list[int]
    last: list[int]
    parents: list[tuple[int, int, int, int]]  # prompt begin, prompt end, tail begin, tail end: tail sees prompt

    def filled(self, n_tokens: int) -> "PrefillPack":
        """As many tokens: zeros behind these, a sequence of no row."""
        n = len(self.ids)
        if n == n_tokens:
            return self
        zeros, piece = [0] * (n_tokens - n), CachePiece([], n, n_tokens, 0)
        return replace(self, ids=[*self.ids, *zeros], positions=[*self.positions, *zeros], pieces=[*self.pieces, piece])

    def sequences(self) -> Sequences:
        """What attends to what, as the kernel takes it: tails after the prompts whose queries are their own."""
        prompts = {begin: (first, end) for first, end, begin, _ in self.parents}
        lengths, firsts, rows = [], [], list[int]()
        for piece in self.pieces:
            first, end = prompts.get(piece.begin, (0, 0))
            rows += [*range(first, end), *range(piece.begin, piece.end)]
            lengths.append(end - first + piece.end - piece.begin)
            firsts.append(end - first)
        return Sequences(len(self.ids), torch.tensor(lengths), torch.tensor(firsts), torch.tensor(rows))

    def mask(self, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """As `full_mask`; None for plain causal."""
        if len(self.pieces) == 1 or (len(self.pieces) == 2 and len(self.parents) == 1):
            return None
        return self.full_mask(dtype, device)

    def full_mask(self, dtype: torch.dtype, device: torch.device, *, window: int | None = None) -> Tensor:
        """(1, 1, T, T), 0 where a token sees another and the least number where not.

        With `window` a token sees the last `window` positions of its sequence, its own included.
        """
        size = len(self.ids)
        sees_TT = torch.zeros(size, size, dtype=torch.bool)
        for piece in self.pieces:
            sees_TT[piece.begin : piece.end, piece.begin : piece.end] = True
        for prompt_begin, prompt_end, begin, end in self.parents:
            sees_TT[begin:end, prompt_begin:prompt_end] = True
        sees_TT.tril_()
        if window is not None:
            position_T = torch.tensor(self.positions)
            sees_TT &= position_T[:, None] - position_T < window
        mask_TT = torch.zeros(size, size, dtype=dtype).masked_fill_(~sees_TT, torch.finfo(dtype).min)
        return mask_TT[None, None].to(device)


def plan(sequences: Iterable[tuple[int, tuple[int, ...], Sequence[int]]], budget: int) -> list[PrefillPack]:
    """Packs of at most `budget` tokens (or of one sequence that is longer) for (row, prompt, tail) each."""
    groups: dict[tuple[int, ...], list[Branch]] = {}
    for row, prompt, tail in sequences:
        groups.setdefault(prompt, []).append(Branch(row, tail))
    packs: list[list[Tree]] = [[]]
    used = 0
    for prompt, branches in groups.items():
        tree = None
        for branch in branches:
            cost = len(branch.tail) + (0 if tree else len(prompt))
            if used and used + cost > budget:
                packs.append([])
                tree, used, cost = None, 0, len(branch.tail) + len(prompt)
            if tree is None:
                tree = Tree(prompt)
                packs[-1].append(tree)
            tree.branches.append(branch)
            used += cost
    return [pack(trees) for trees in packs if trees]


def pack(trees: Sequence[Tree]) -> PrefillPack:
    """The trees behind one another."""
    made = PrefillPack([], [], [], [], [], [])
    for tree in trees:
        begin = len(made.ids)
        end = begin + len(tree.prompt)
        made.ids.extend(tree.prompt)
        made.positions.extend(range(len(tree.prompt)))
        made.pieces.append(CachePiece([branch.row for branch in tree.branches], begin, end, 0))
        for branch in tree.branches:
            if branch.tail:
                at = len(made.ids)
                made.ids.extend(branch.tail)
                made.positions.extend(range(len(tree.prompt), len(tree.prompt) + len(branch.tail)))
                made.pieces.append(CachePiece([branch.row], at, len(made.ids), len(tree.prompt)))
                made.parents.append((begin, end, at, len(made.ids)))
            made.rows.append(branch.row)
            made.last.append(len(made.ids) - 1 if branch.tail else end - 1)
    return made
