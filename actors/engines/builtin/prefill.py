"""Plans prefill: which sequences share one packed forward pass, and which prompts they share (trees).

Tokens of a prompt whose keys and values are given (the prefix cache has them) have their places among the others, and
are not computed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from actors.engines.builtin.prefix_cache import P
from areal_cpu.sequences import CachePiece, Sequences


@dataclass(frozen=True, slots=True)
class Branch:
    """One sequence: its row, and its tokens after the prompt."""

    row: int
    tail: Sequence[int]


@dataclass(slots=True)
class Tree:
    """Sequences with the same prompt."""

    prompt: tuple[int, ...]
    given: list[int]  # blocks of the prefix cache that the prompt begins with
    branches: list[Branch] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PrefillPack:
    """One packed forward of T tokens; `last` are the tokens whose logits are wanted, one for each of `rows`.

    `reused`: tokens of each row's prompt that are given, or computed for another row.
    """

    ids: list[int]
    positions: list[int]
    pieces: list[CachePiece]
    rows: list[int]
    last: list[int]
    parents: list[tuple[int, int, int, int]]  # prompt begin, prompt end, tail begin, tail end: tail sees prompt
    given: list[tuple[int, list[int]]]  # where given tokens begin, and their blocks
    reused: list[int]
    trees: list[Tree]

    @property
    def n_computed(self) -> int:
        return len(self.ids) - sum(len(blocks) for _, blocks in self.given) * P

    def computed(self) -> list[int]:
        """The places of the tokens that are computed."""
        given = {at for begin, blocks in self.given for at in range(begin, begin + len(blocks) * P)}
        return [at for at in range(len(self.ids)) if at not in given]

    def filled(self, n_computed: int) -> "PrefillPack":
        """As many computed tokens: zeros behind these, a sequence of no row."""
        n, n_more = len(self.ids), n_computed - self.n_computed
        if not n_more:
            return self
        zeros, piece = [0] * n_more, CachePiece([], n, n + n_more, 0)
        return replace(self, ids=[*self.ids, *zeros], positions=[*self.positions, *zeros], pieces=[*self.pieces, piece])

    def sequences(self) -> Sequences:
        """What attends to what, as the kernel takes it: tails after the prompts whose queries are their own."""
        prompts = {begin: (first, end) for first, end, begin, _ in self.parents}
        given = {begin: len(blocks) * P for begin, blocks in self.given}
        lengths, firsts, rows = [], [], list[int]()
        for piece in self.pieces:
            first, end = prompts.get(piece.begin, (0, 0))
            rows += [*range(first, end), *range(piece.begin, piece.end)]
            lengths.append(end - first + piece.end - piece.begin)
            firsts.append(end - first or given.get(piece.begin, 0))
        return Sequences(len(self.ids), torch.tensor(lengths), torch.tensor(firsts), torch.tensor(rows))

    def mask(self, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """As `full_mask`; None for plain causal."""
        if self.given:
            return self.full_mask(dtype, device)
        if len(self.pieces) == 1 or (len(self.pieces) == 2 and len(self.parents) == 1):
            return None
        return self.full_mask(dtype, device)

    def full_mask(self, dtype: torch.dtype, device: torch.device, *, window: int | None = None) -> Tensor:
        """(1, 1, T, all), 0 where a computed token sees another and the least number where not.

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
        if self.given:
            sees_TT = sees_TT[self.computed()]
        mask_TT = torch.zeros(sees_TT.shape, dtype=dtype).masked_fill_(~sees_TT, torch.finfo(dtype).min)
        return mask_TT[None, None].to(device)


def nothing(prompt: Sequence[int]) -> list[int]:
    """No prompt begins with blocks that are known."""
    return []


def plan(
    sequences: Iterable[tuple[int, tuple[int, ...], Sequence[int]]],
    budget: int,
    find: Callable[[Sequence[int]], list[int]] = nothing,
) -> Iterator[PrefillPack]:
    """Packs of at most `budget` tokens (or of one sequence that is longer) for (row, prompt, tail) each.

    `find` gives the blocks that a prompt begins with; it is asked after the pack before is computed. A given token
    costs a part of one that is computed.
    """
    groups: dict[tuple[int, ...], list[Branch]] = {}
    for row, prompt, tail in sequences:
        groups.setdefault(prompt, []).append(Branch(row, tail))
    trees, used = list[Tree](), 0
    for prompt, branches in groups.items():
        tree, given = None, find(prompt)
        for branch in branches:
            cost = len(branch.tail) + (0 if tree else _cost(prompt, given))
            if used and used + cost > budget:
                yield pack(trees)
                trees, tree, given = [], None, find(prompt)
                used, cost = 0, len(branch.tail) + _cost(prompt, given)
            if tree is None:
                tree = Tree(prompt, given)
                trees.append(tree)
            tree.branches.append(branch)
            used += cost
    if trees:
        yield pack(trees)


def _cost(prompt: Sequence[int], given: Sequence[int]) -> int:
    return len(prompt) - len(given) * P * 3 // 4


def pack(trees: Sequence[Tree]) -> PrefillPack:
    """The trees behind one another."""
    made = PrefillPack([], [], [], [], [], [], [], [], list(trees))
    for tree in trees:
        begin = len(made.ids)
        end = begin + len(tree.prompt)
        made.ids.extend(tree.prompt)
        made.positions.extend(range(len(tree.prompt)))
        made.pieces.append(CachePiece([branch.row for branch in tree.branches], begin, end, 0))
        made.reused.extend([len(tree.given) * P, *[len(tree.prompt)] * (len(tree.branches) - 1)])
        if tree.given:
            made.given.append((begin, tree.given))
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
