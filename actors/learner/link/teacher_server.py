"""The server of a teacher: log-probs of token ids by vLLM or SGLang, at temperature 1. Imports without torch.

vLLM: POST /v1/completions with `prompt_logprobs`; SGLang: POST /generate with `return_logprob`. A call that fails is
repeated with back-off for PATIENCE_S.
"""

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx2
from loguru import logger

from actors.rewards.judge import RETRIED, TEXT, asked_pause_s, back_off_s
from areal_bus.errors import ConfigError, EngineLost

CALL_S = 120.0
PATIENCE_S = 600.0  # for a server that is away
START_S = 5.0  # the same at the start of a run
KEY = "TEACHER_API_KEY"  # environment variable with the key of the server, if it wants one
SAMPLE = "The answer is 3.14; naive café, 你好, Привет!\n\tdef f(x):\n        return x ** 2\n"
Row = tuple[float, list[tuple[int, float]]]  # log-prob of a token, and (word, log-prob) of the likeliest in its place


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

    def score(self, ids: list[int], top_k: int) -> list[Row]:
        """Of the tokens but the first: log-probs, and at least the `top_k` likeliest words. Raises ConfigError."""
        with self.read():
            if model := self.model():
                body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": top_k}
                return vllm_rows(self.call("POST", "/v1/completions", body), ids)
            sampling = {"max_new_tokens": 1, "temperature": 1.0}
            body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
            return sglang_rows(self.call("POST", "/generate", body | {"top_logprobs_num": top_k}), ids)

    @contextmanager
    def read(self) -> Iterator[None]:
        """An answer of another form becomes a ConfigError."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            why = f"{type(error).__name__}: {error}"
            raise ConfigError(f"invalid answer of the teacher at {self.url}: {why}") from error

    def model(self) -> str:
        """Its name of the model; "" of SGLang, which needs none."""
        with self._lock:
            if self._model is None:
                names = ("/get_model_info", "/model_info")  # of SGLang: the former name, the new one
                is_sglang = any(self.call("GET", name, absent=True) is not None for name in names)
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
                logger.warning(
                    "no answer from the teacher at {} ({}): asked again for {} s", self.url, why, self._patience_s
                )
            if time.monotonic() + (pause_s := max(pause_s, back_off_s(n))) > deadline:
                raise EngineLost(
                    f"no answer from the teacher at {self.url} in {n} calls of {self._patience_s:g} s; the last: {why}"
                )
            time.sleep(pause_s)


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


def check_server(url: str, text: str, ours: list[int]) -> None:
    """Raises ConfigError unless the server answers, gives log-probs of a prompt and has the policy's tokenizer: it
    reads `text` as the ids `ours`, or as that many (and one that begins a sequence) if it shows none.
    """
    server = TeacherServer(url, patience_s=START_S)
    try:
        with server.read():
            model = server.model()
            asked = {"model": model, "prompt": text, "add_special_tokens": False}
            told = server.call("POST", "/tokenize", asked, absent=True)
            server.score(ours, 0)
            if told is None:
                body = {"model": model or "default", "prompt": text, "max_tokens": 1}
                n = int(server.call("POST", "/v1/completions", body)["usage"]["prompt_tokens"])
                is_same, found = n - len(ours) in (0, 1), f"{n} tokens"
            else:
                is_same, found = told["tokens"] == ours, f"the ids {told['tokens'][:8]}"
    except EngineLost as error:
        raise ConfigError(f"teacher.path must be a server that answers: {error}") from None
    if not is_same:
        raise ConfigError(
            f"tokenizer mismatch: the teacher at {url} reads a sample text as {found}, the policy as {len(ours)} "
            f"tokens, {ours[:8]}; teacher.path must have the policy's tokenizer"
        )
