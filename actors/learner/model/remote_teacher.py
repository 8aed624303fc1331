"""A teacher behind a URL (teacher.path = "http://..."): log-probs of token ids by vLLM or SGLang, at temperature 1.

vLLM: POST /v1/completions with `prompt_logprobs`; SGLang: POST /generate with `return_logprob`. A sequence is one call,
whose answer is kept until `free`. A call that fails is repeated with back-off for PATIENCE_S.

Shapes: T tokens of a sequence, N wanted tokens of several, K likeliest words, B = K + 1 classes (`divergence.py`).
"""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import httpx2
import torch
from loguru import logger
from torch import Tensor

from actors.learner.model.chunked_head import GivenTeacher
from actors.models.packed_row import SequencePiece
from actors.rewards.judge import RETRIED, TEXT, asked_pause_s, back_off_s
from areal_bus.errors import ConfigError, EngineLost

CALLS = 16  # at once, of a learner rank
CALL_S = 120.0
PATIENCE_S = 600.0  # for a server that is away
START_S = 5.0  # the same at the start of a run
TICK_S = 0.5
KEY = "TEACHER_API_KEY"  # environment variable with the key of the server, if it wants one
LEAST_OTHERS = 1e-6  # probability of all other words, of which rounding may leave none
SAMPLE = "The answer is 3.14; naive café, 你好, Привет!\n\tdef f(x):\n        return x ** 2\n"


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
        self._server, self._n_words, self._top_k, self._device = TeacherServer(url), n_words, top_k or 0, device
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
                new[key] = self._pool.submit(self._server.score, one, self._top_k, self._n_words)
        while wait(new.values(), TICK_S).not_done:
            self.tick()
        self._held |= {key: future.result() for key, future in new.items()}
        return [self._held[key] for key in keys]

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


class TeacherServer:
    """Calls of one server, from several threads."""

    def __init__(self, url: str, *, patience_s: float = PATIENCE_S) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        key = os.environ.get(KEY, "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx2.Limits(max_keepalive_connections=0)  # a server may close an idle one just as it is taken again
        self._http = httpx2.Client(headers=headers, timeout=CALL_S, limits=limits, follow_redirects=False)
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._model: str | None = None  # "" of SGLang

    def score(self, ids: list[int], top_k: int, n_words: int) -> Answer:
        """Log-probs of the tokens but the first, and the `top_k` likeliest of `n_words` words before each."""
        if model := self.model():
            body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": top_k}
            rows = vllm_rows(self.call("POST", "/v1/completions", body), ids)
        else:
            sampling = {"max_new_tokens": 1, "temperature": 1.0}
            body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
            rows = sglang_rows(self.call("POST", "/generate", body | {"top_logprobs_num": top_k}), ids)
        return as_answer(rows, ids, top_k, n_words, self.url)

    def model(self) -> str:
        """Its name of the model; "" of SGLang, which needs none."""
        with self._lock:
            if self._model is None:
                is_sglang = self.call("GET", "/get_model_info", absent=True) is not None
                self._model = "" if is_sglang else str(self.call("GET", "/v1/models")["data"][0]["id"])
            return self._model

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None, *, absent: bool = False) -> Any:
        """The JSON of the answer; None for a path that it does not have, if it may be absent."""
        deadline, n = time.monotonic() + self._patience_s, 0
        while True:
            n += 1
            try:
                response = self._http.request(method, f"{self.url}{path}", json=body)
                status, why, pause_s = response.status_code, f"status {response.status_code}", asked_pause_s(response)
            except httpx2.TransportError as error:
                status, why, pause_s = 503, f"{type(error).__name__}: {error}", 0.0
            if status == 200:
                return response.json()
            if absent and status in (404, 405):
                return None
            if status not in RETRIED and status < 500:
                raise ConfigError(f"the teacher at {self.url} rejects {path}: {why}: {response.text[:TEXT]}")
            if n == 1:
                logger.warning("no answer from the teacher at {} ({}): asked again for {} s", self.url, why, CALL_S)
            if time.monotonic() + (pause_s := max(pause_s, back_off_s(n))) > deadline:
                raise EngineLost(
                    f"no answer from the teacher at {self.url} in {n} calls of {self._patience_s:g} s; the last: {why}"
                )
            time.sleep(pause_s)


Row = tuple[float, list[tuple[int, float]]]  # log-prob of the token, and (word, log-prob) of the likeliest


def vllm_rows(answer: Any, ids: list[int]) -> list[Row]:
    """Of the tokens but the first. An entry of `prompt_logprobs` is {id: {"logprob": ...}} of the likeliest, and of the
    token itself.
    """
    entries = _found(answer, "choices", 0, "prompt_logprobs")
    rows = [{int(word): float(one["logprob"]) for word, one in entry.items()} for entry in entries[1:]]
    return [(row[token], list(row.items())) for row, token in zip(rows, ids[1:], strict=True)]


def sglang_rows(answer: Any, ids: list[int]) -> list[Row]:
    """The same of `input_token_logprobs` and `input_top_logprobs`, whose entries are [log-prob, id, text]."""
    own = _found(answer, "meta_info", "input_token_logprobs")[1:]
    tops = _found(answer, "meta_info").get("input_top_logprobs") or [None, *([[]] * len(own))]
    if [one[1] for one in own] != ids[1:]:
        raise ConfigError("token mismatch: the teacher's server scored other tokens than those that it was sent")
    return [(float(one[0]), [(word, logp) for logp, word, *_ in top]) for one, top in zip(own, tops[1:], strict=True)]


def _found(answer: Any, *path: str | int) -> Any:
    for name in path:
        try:
            answer = answer[name]
        except (LookupError, TypeError):
            answer = None
        if answer is None:
            raise ConfigError(
                f"missing {name!r} in an answer of the teacher's server: it must give log-probs of the prompt, as vLLM "
                "(prompt_logprobs) and SGLang (return_logprob) do"
            )
    return answer


def as_answer(rows: list[Row], ids: list[int], top_k: int, n_words: int, url: str) -> Answer:
    """Raises ConfigError for too few words, or numbers that are no log-probs."""
    tops = [sorted((one for one in top if one[0] < n_words), key=lambda one: -one[1])[:top_k] for _, top in rows]
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


def check_server(url: str, text: str, ours: list[int]) -> None:
    """Raises ConfigError unless the server answers, gives log-probs of a prompt and has the policy's tokenizer: it
    reads `text` as the ids `ours`, or as that many (and one that begins a sequence) if it shows none.
    """
    server = TeacherServer(url, patience_s=START_S)
    try:
        model = server.model()
        asked = {"model": model, "prompt": text, "add_special_tokens": False}
        told = server.call("POST", "/tokenize", asked, absent=True)
        server.score(ours, 0, max(ours) + 1)
        if told is None:
            body = {"model": model or "default", "prompt": text, "max_tokens": 1}
            n = server.call("POST", "/v1/completions", body)["usage"]["prompt_tokens"]
    except EngineLost as error:
        raise ConfigError(f"teacher.path must be a server that answers: {error}") from None
    theirs = ours if told is None and n - len(ours) in (0, 1) else [] if told is None else list(told["tokens"])
    if theirs != ours:
        found = f"{n} tokens" if told is None else f"the ids {theirs[:8]}"
        raise ConfigError(
            f"tokenizer mismatch: the teacher at {url} reads a sample text as {found}, the policy as {len(ours)} "
            f"tokens, {ours[:8]}; teacher.path must have the policy's tokenizer"
        )
