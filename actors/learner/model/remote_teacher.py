"""A teacher behind a URL (teacher.path = "http://..."), in the place of a frozen model on the learner ranks.

A sequence is one call, whose answer is kept until `free`.

Shapes: T tokens of a sequence, N wanted tokens of several, K likeliest words, B = K + 1 classes (`divergence.py`).
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.learner.link.teacher_server import Row, TeacherServer
from actors.learner.model.chunked_head import GivenTeacher
from actors.models.packed_row import SequencePiece
from areal_bus.errors import ConfigError

CALLS = 16  # at once, of a learner rank
TICK_S = 0.5
LEAST_OTHERS = 1e-6  # probability of all other words, of which rounding may leave none


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server says of one sequence; row t is of token t, row 0 is empty."""

    logp_T: Tensor
    words_TK: Tensor  # int64, the likeliest first
    top_TK: Tensor  # their log-probs


class RemoteTeacher:
    """Reads sequences as `FrozenModel` does, without weights on the learner ranks."""

    def __init__(self, url: str, *, n_words: int, top_k: int | None, device: torch.device) -> None:
        """`n_words` of the policy; `top_k`: words before each token beside its own log-prob."""
        self._server, self._n_words, self._device = TeacherServer(url), n_words, device
        self._top_k = min(top_k or 0, n_words - 1)  # the last word is all others
        self._held: dict[bytes, Answer] = {}
        self._pool = ThreadPoolExecutor(CALLS, "teacher")
        self.tick: Callable[[], None] = lambda: None  # runs while it waits

    def ask(self, pieces: Sequence[SequencePiece]) -> list[Answer]:
        """The answers for these sequences. Raises EngineLost for a server that is away, ConfigError if it refuses."""
        ids = [piece.ids_T[: piece.n_read + 1].tolist() for piece in pieces]
        keys = [repr(one).encode() for one in ids]
        new: dict[bytes, Future[Answer]] = {}
        for key, one in zip(keys, ids, strict=True):
            if key not in self._held and key not in new:
                new[key] = self._pool.submit(self._read, one)
        while wait(new.values(), TICK_S).not_done:
            self.tick()
        self._held |= {key: future.result() for key, future in new.items()}
        return [self._held[key] for key in keys]

    def _read(self, ids: list[int]) -> Answer:
        rows = self._server.score(ids, self._top_k)
        return as_answer(rows, ids, self._top_k, self._n_words, self._server.url)

    def logprobs(self, pieces: Sequence[SequencePiece]) -> tuple[Tensor, None]:
        """(N,) of the wanted tokens, on the host."""
        found = zip(self.ask(pieces), pieces, strict=True)
        return torch.cat([answer.logp_T[piece.places_K] for answer, piece in found]), None

    def teach(self, pieces: Sequence[SequencePiece], *, beta: float, top_k: int | None) -> GivenTeacher:
        """What a policy needs to diverge from it at the wanted tokens."""
        found = list(zip(self.ask(pieces), pieces, strict=True))
        top_NK = torch.cat([answer.top_TK[piece.places_K] for answer, piece in found])[:, :top_k]
        words_NK = torch.cat([answer.words_TK[piece.places_K] for answer, piece in found])[:, :top_k]
        others_N1 = (1 - top_NK.exp().sum(1, keepdim=True)).clamp(min=LEAST_OTHERS).log()
        log_p_NB = torch.cat([top_NK, others_N1], 1)
        return GivenTeacher(log_p_NB.to(self._device), words_NK.to(self._device), beta)

    def idle_pass(self) -> None:
        """No other rank waits for it."""

    def free(self) -> None:
        """Forget the answers."""
        self._held.clear()


def as_answer(rows: list[Row], ids: list[int], top_k: int, n_words: int, url: str) -> Answer:
    """Raises ConfigError for too few words, or numbers that are no log-probs."""
    tops = [sorted((one for one in top if 0 <= one[0] < n_words), key=lambda one: -one[1])[:top_k] for _, top in rows]
    least = min(map(len, tops), default=top_k)
    if least < top_k:
        raise ConfigError(
            f"too few words: the teacher at {url} gives {least} of actor.distill_top_k = {top_k} before a token; lower "
            "it, or start vLLM with --max-logprobs"
        )
    table = torch.tensor([[own, *(logp for _, logp in top)] for (own, _), top in zip(rows, tops, strict=True)])
    table = torch.cat([torch.zeros(1, 1 + top_k), table.view(len(rows), 1 + top_k).float()])
    if not bool((table <= 1e-3).all()):  # NaN, too
        raise ConfigError(f"invalid log-prob from the teacher at {url}: numbers must be at most 0")
    words_TK = torch.tensor([[0] * top_k, *([word for word, _ in top] for top in tops)], dtype=torch.int64)
    return Answer(table[:, 0], words_TK.view(len(ids), top_k), table[:, 1:])
