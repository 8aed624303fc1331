"""A teacher behind a URL is the same teacher as on the learner; a server that is away, wrong or another is an error."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from actors.learner.link import teacher_server
from actors.learner.link.teacher_server import TeacherServer, check_server
from actors.learner.model.frozen_model import FrozenModels
from actors.learner.model.remote_teacher import RemoteTeacher
from actors.models.scratch import character_tokenizer
from areal_bus.config.sections import Config, ScratchConfig
from areal_bus.errors import ConfigError, EngineLost
from tests.support.learner_setup import (
    VOCABULARY,
    batch_of,
    gradients,
    random_shard,
    settings,
    tiny_actor,
    tiny_model,
    train,
)

KINDS = ("vllm", "sglang")
SHARD = random_shard(3, clock=3, old=True)
TEXT = "abcdefgh >"


class Served:
    """Answers as a server of this kind does, by the model of `tiny_model(2)`."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.model = tiny_model(2).eval()
        self.calls: list[list[int]] = []  # token ids that were scored
        self.refusals: list[int] = []  # statuses of the next calls
        self.most = 20  # words before a token
        self.tokenizer: Any = character_tokenizer(ScratchConfig(characters=TEXT))
        self.shows_tokens = True
        self.spoils = False
        self.is_short = False
        self.n_more = 1  # tokens before a text

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if self.refusals:
            return self.refusals.pop(0), {"error": "busy"}
        if path == "/v1/models":
            return 200, {"data": [{"id": "teacher"}]}
        if path == "/get_model_info" and self.kind == "sglang":
            return 200, {"model_path": "teacher"}
        if path == "/tokenize" and self.shows_tokens:
            return 200, {"tokens": self.tokenizer.encode(body["prompt"]).ids}
        if path == "/v1/completions" and isinstance(body["prompt"], str):
            return 200, {"usage": {"prompt_tokens": len(self.tokenizer.encode(body["prompt"]).ids) + self.n_more}}
        if path == "/v1/completions" and self.kind == "vllm":
            return 200, {"choices": [{"text": "", "prompt_logprobs": None if self.spoils else self.by_vllm(body)}]}
        if path == "/generate" and self.kind == "sglang":
            return 200, {"text": "", "meta_info": self.by_sglang(body)}
        return 404, {}

    def scored(self, ids: list[int], k: int) -> list[tuple[float, list[tuple[int, float]]]]:
        self.calls.append(ids)
        with torch.no_grad():
            logp = self.model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
        rows = list(zip(logp[:-1], ids[1:], strict=True))[: 1 if self.is_short else None]
        return [(float(row[token]), [(w, float(row[w])) for w in row.topk(k).indices.tolist()]) for row, token in rows]

    def by_vllm(self, body: Any) -> list[dict[str, Any] | None]:
        ids, k = body["prompt"], min(body["prompt_logprobs"], self.most)
        found = [{**dict(top), token: own} for (own, top), token in zip(self.scored(ids, k), ids[1:])]  # noqa: B905
        return [None, *({str(w): {"logprob": x, "decoded_token": "?"} for w, x in row.items()} for row in found)]

    def by_sglang(self, body: Any) -> dict[str, Any]:
        ids, k = body["input_ids"], min(body["top_logprobs_num"], self.most)
        assert body["logprob_start_len"] == 0
        rows = self.scored(ids, k)
        own = [[x, 0 if self.spoils else token, None] for (x, _), token in zip(rows, ids[1:])]  # noqa: B905
        tops = [[[x, w, None] for w, x in top] for _, top in rows]
        return {"input_token_logprobs": [[None, ids[0], None], *own], "input_top_logprobs": [None, *tops]}


@contextmanager
def serving(kind: str) -> Iterator[tuple[str, Served]]:
    served = Served(kind)

    class Handler(BaseHTTPRequestHandler):
        def respond(self) -> None:
            n = int(self.headers.get("Content-Length") or 0)
            status, answer = served.answer(self.path, json.loads(self.rfile.read(n)) if n else None)
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = respond

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", served
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def remote(url: str, top_k: int | None = None) -> RemoteTeacher:
    return RemoteTeacher(url, n_words=VOCABULARY, top_k=top_k, device=torch.device("cpu"))


def config_of(beta: float | None = None, top_k: int | None = None, **actor: Any) -> Config:
    keys = {"advantage": "distill", "distill_beta": beta, "distill_top_k": top_k, "max_grad_norm": 1e9, **actor}
    return settings(actor=keys, learner={"max_tokens_per_mb": 40})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("beta", "top_k"), [(None, None), (0.0, 4), (0.3, 7), (0.0, VOCABULARY + 5)])
def test_a_teacher_behind_a_url_gives_the_gradient_of_the_same_teacher_on_the_learner(
    tmp_path: Path, kind: str, beta: float | None, top_k: int | None
) -> None:
    config = config_of(beta, top_k)
    local = gradients(tiny_actor(tmp_path / "local", config), SHARD)
    with serving(kind) as (url, served):
        served.most = VOCABULARY
        actor = tiny_actor(tmp_path / "remote", config)
        actor.frozen = FrozenModels(None, remote(url, top_k))
        torch.testing.assert_close(gradients(actor, SHARD), local, atol=1e-5, rtol=1e-4)


def test_each_sequence_is_sent_once_an_update_whatever_the_passes_over_the_batch(tmp_path: Path) -> None:
    with serving("vllm") as (url, served):
        actor = tiny_actor(tmp_path, config_of(0.0, 3, ppo_epochs=2, loss="ppo"))
        actor.frozen = FrozenModels(None, remote(url, 3))
        train(actor, range(2))
        items = [item for version in range(2) for item in batch_of(random_shard(version), clock=0).items]
        assert sorted(served.calls) == sorted(item.ids_T.tolist() for item in items)


@pytest.mark.parametrize("kind", KINDS)
def test_a_busy_server_is_asked_again_and_one_that_stays_away_is_lost(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher_server, "back_off_s", lambda n: 0.001)
    with serving(kind) as (url, served):
        server = TeacherServer(url, patience_s=30.0)
        served.refusals = [503, 429]
        assert len(server.score([3, 4, 5], 0)) == 2
        served.refusals = [500] * 10_000
        server._patience_s = 0.05
        with pytest.raises(EngineLost, match=r"no answer from the teacher at http://\S+ in \d+ calls .* status 500"):
            server.score([3, 4, 5], 0)
    monkeypatch.setattr(teacher_server, "back_off_s", lambda n: 99.0)
    with pytest.raises(ConfigError, match=r"teacher\.path must be a server that answers: no answer"):
        check_server(url, "abc", [3, 4, 5])


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_without_what_was_asked_is_refused_in_words(kind: str) -> None:
    with serving(kind) as (url, served):
        served.most = 2
        with pytest.raises(ConfigError, match=r"too few words: .* gives 2 of actor\.distill_top_k = 5|lower it"):
            remote(url, 5)._read([3, 3, 3])
        served.spoils = True
        with pytest.raises(ConfigError, match=r"missing 'prompt_logprobs'|token mismatch"):
            TeacherServer(url).score([3, 4, 5], 0)
        served.spoils, served.is_short = False, True
        with pytest.raises(ConfigError, match=r"invalid answer of the teacher at http|token mismatch"):
            TeacherServer(url).score([3, 4, 5], 0)
        with pytest.raises(ConfigError, match=r"invalid answer of the teacher at http|token mismatch"):
            check_server(url, "abc", [3, 4, 5])
        served.refusals = [400]
        with pytest.raises(ConfigError, match=r"the teacher at \S+ rejects /get_model_info: status 400"):
            TeacherServer(url).score([3, 4, 5], 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shows_tokens", [True, False])
def test_a_server_with_another_tokenizer_is_refused_at_the_start(kind: str, shows_tokens: bool) -> None:
    with serving(kind) as (url, served):
        served.shows_tokens = shows_tokens
        ours = served.tokenizer.encode(TEXT).ids
        check_server(url, TEXT, ours)
        served.tokenizer, served.n_more = character_tokenizer(ScratchConfig(characters="hgfedcba >")), 2
        with pytest.raises(ConfigError, match=r"tokenizer mismatch: the teacher at .* the policy's tokenizer"):
            check_server(url, TEXT, ours)
