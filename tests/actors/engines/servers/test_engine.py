"""The engine over servers of the test's own: tokens, versions, broken streams, and when a server is lost."""

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.engines.protocol import Completion, Done, Request
from actors.engines.servers.engine import SENT_AGAIN, ServerEngine
from areal_bus.errors import EngineError, EngineLost
from tests.servers.attached import (
    SPEAKING,
    WEIGHTS,
    ask,
    attach,
    expected,
    having,
    lost,
    old,
    plain,
    requests,
    running,
    update,
    whole_events,
)
from tests.servers.engines import EOS, PATIENCE_S, Running
from tests.servers.speaks_sglang import SpeaksSGLang, V, speaking
from tests.support.polling import wait_until


@pytest.fixture(params=["sglang", "vllm"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_nothing_is_sent_while_it_rests(folder: Path) -> None:
    with speaking() as fake, running(folder, fake) as run:
        update(run.engine, 5)
        fake.allow(8)
        run.engine.pause()
        assert fake.is_paused
        run.engine.submit(ask())
        assert [run.engine.step() for _ in range(3)] == [[]] * 3
        assert not requests(fake)
        update(run.engine, 2, term=1)
        assert [completion.spans for completion in run.all().values()] == [[[2, 8]]]


def test_weights_of_another_model_are_refused_before_they_reach_the_server(folder: Path) -> None:
    with speaking() as fake, running(folder, fake) as run:
        with pytest.raises(EngineError, match="mismatch of"):
            run.engine.update(0, {"a": torch.zeros(1)})
        assert not fake.called("/pause_generation")
        assert run.engine.version is None


def test_an_aborted_sample_is_ended_at_the_server_by_a_name_that_begins_no_other(folder: Path, kind: str) -> None:
    with SPEAKING[kind]() as fake, running(folder, fake) as run:
        update(run.engine, 0)
        for uid in range(12):
            run.engine.submit(ask(uid))
        fake.allow(1)
        run.tokens(12)
        (name,) = (rid for rid in fake.streams if rid.endswith("-000000000001"))
        aborted = run.engine.abort(ask(0).key)
        assert aborted.spans == [[0, 1]]
        fake.allow(8)
        assert set(run.all()) == {ask(uid).key for uid in range(1, 12)}
        route, names = ("/abort_request", name) if kind == "sglang" else ("/abort_requests", [name])
        wait_until(lambda: names in fake.called(route)[-1].values())


def test_no_connection_is_used_twice_and_no_proxy_is_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server may be closing a connection that has been idle."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    with speaking() as fake, running(folder, fake) as run:
        for version in range(2):
            update(run.engine, version)
            run.engine.submit(ask())
            fake.allow(8)
            run.all()
            run.ended.clear()
        assert len(fake.calls) > 10
        assert fake.most_on_one == 1


# samples that end too early


def breaks_off(fake: SpeaksSGLang, run: Running) -> None:
    """0.5.23 breaks a stream by its own fault when it aborts a retracted sample."""
    fake.break_after = [4]


def has_a_smaller_budget(fake: SpeaksSGLang, run: Running) -> None:
    """SGLang's SGLANG_MAX_NEW_TOKENS_LIMIT, and where its memory is short."""
    fake.most_new_tokens = 2


def breaks_off_at_the_end(fake: SpeaksSGLang, run: Running) -> None:
    fake.break_after = [9]


def refuses(fake: SpeaksSGLang, run: Running) -> None:
    """From the next sample on."""
    fake.answers["/generate"] = [(503, "busy")] * SENT_AGAIN
    run.engine.abort(ask(n=9).key)
    run.engine.submit(ask(n=9))


@pytest.mark.parametrize(
    ("server", "budgets"),
    [
        (breaks_off, [9, 5]),
        (has_a_smaller_budget, [9, 7, 5, 3, 1]),  # more often than without a token
        (breaks_off_at_the_end, [9]),
        (refuses, [9] * 5),
    ],
)
def test_a_sample_that_ends_early_goes_on_from_its_tokens(folder: Path, server: Any, budgets: list[int]) -> None:
    request = ask(n=9)
    with speaking() as fake, running(folder, fake) as run:
        update(run.engine, 0)
        run.engine.submit(request)
        wait_until(lambda: fake.streams)
        server(fake, run)
        fake.allow(9)
        completion = run.all()[request.key]
        sent = requests(fake)
    assert (completion.spans, completion.finish) == ([[0, 9]], "length")
    assert (completion.ids, completion.logps) == expected(request, [[0, 9]])
    assert [body["sampling_params"]["max_new_tokens"] for body in sent] == budgets
    assert [body["input_ids"] for body in sent] == [[3, 4, *completion.ids[: 9 - n]] for n in budgets]


@pytest.mark.parametrize("says_why", [False, True])
def test_of_a_broken_stream_only_tokens_of_known_versions_are_kept(folder: Path, says_why: bool) -> None:
    with speaking() as fake, running(folder, fake) as run:
        update(run.engine, 0)
        request = ask(n=9)
        run.engine.submit(request)
        fake.allow(3)
        run.tokens(3)
        update(run.engine, 1)
        fake.break_after, fake.says_why = [5], says_why
        fake.allow(9)
        completion = run.all()[request.key]
    assert completion.spans == [[0, 3], [1, 6]]
    assert (completion.ids, completion.logps) == expected(request, completion.spans)


def test_a_piece_that_was_ended_just_after_its_stop_token_is_no_longer_asked_for(folder: Path) -> None:
    with speaking(old) as fake, running(folder, fake) as run:
        update(run.engine, 30)  # its first token is the end of text
        run.engine.submit(ask(n=9))
        fake.allow(1)
        run.tokens(1)
        update(run.engine, 31)
        fake.allow(9)
        (completion,) = run.all().values()
    assert (completion.ids, completion.spans, completion.finish) == ([EOS], [[30, 1]], "stop")


# servers that are lost


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (having(breaks=True), f"has ended a sample {SENT_AGAIN + 1} times: the stream broke off"),
        (having(most_new_tokens=0), f"has ended a sample {SENT_AGAIN + 1} times: .* 0 of 8 tokens"),
        (having(answers={"/generate": [(503, "busy")] * (SENT_AGAIN + 1)}), f"{SENT_AGAIN + 1} times: .* 503: busy"),
        (
            having(break_after=[3], hangs={"/model_info"}),
            r"the stream broke off: .*; the server at .* must answer /model_info within 0\.5 s",
        ),
    ],
)
def test_a_server_that_never_ends_a_sample_is_lost(folder: Path, change: Any, why: str) -> None:
    with speaking() as fake, running(folder, fake, call_timeout_s=0.5) as run:
        update(run.engine, 0)
        change(fake)
        run.engine.submit(ask())
        fake.allow(8)
        lost(run, why)


def wait(seconds: float) -> None:
    began = time.monotonic()
    wait_until(lambda: time.monotonic() > began + seconds)


def test_a_server_with_work_that_is_silent_is_lost_unless_its_responses_are_not_read(folder: Path) -> None:
    with speaking() as fake, running(folder, fake, silent_s=0.3) as run:
        update(run.engine, 0)
        wait(0.5)
        assert [run.engine.step() for _ in range(3)] == [[]] * 3  # without work it may be
        run.engine.submit(ask())
        fake.allow(8)
        wait_until(lambda: not fake.streams and bool(requests(fake)))
        wait(0.5)
        assert [completion.spans for completion in run.all().values()] == [[[0, 8]]]
        run.engine.submit(ask(1, n=9))
        lost(run, "every 0.3 s .*has 1 samples and sent nothing")


@pytest.mark.parametrize(("kind", "change"), [("sglang", None), ("sglang", old), ("vllm", None)])
def test_a_server_that_was_restarted_is_lost_and_none_of_its_tokens_is_kept(
    folder: Path, kind: str, change: Any
) -> None:
    with SPEAKING[kind](change) as fake, running(folder, fake) as run:
        update(run.engine, 0)
        fake.label = "default"
        run.engine.submit(ask())
        fake.allow(8)
        lost(run, "'default'.*(restarted, or another client updates it|which this generator never sent)")


def test_two_generators_that_update_one_server_both_fail(folder: Path) -> None:
    with speaking() as fake, running(folder, fake) as run, running(folder, fake) as other:
        update(run.engine, 0)
        update(other.engine, 0)  # perhaps of another run: other weights by the same number
        fake.allow(8)
        run.engine.submit(ask())
        lost(run, "restarted, or another client updates it")


CALLS = [
    *(("sglang", path) for path in ("/pause_generation", "/begin_weight_update", "/end_weight_update")),
    *(("vllm", path) for path in ("/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version")),
]


@pytest.mark.parametrize(("kind", "path"), CALLS)
def test_a_call_whose_answer_is_no_yes_loses_the_server(folder: Path, kind: str, path: str) -> None:
    answers = [(200, "<html>a printer</html>"), (500, "internal error")]
    if kind == "sglang" or path == "/reset_prefix_cache":  # other routes of vLLM do not say it
        answers.append((200, '{"success": false, "message": "no"}'))
    for answer in answers:
        with SPEAKING[kind]() as fake, running(folder, fake) as run:
            update(run.engine, 0)
            fake.answers[path] = [answer]
            with pytest.raises(EngineLost, match=f"it answers {answer[0]}: "):
                update(run.engine, 1)


@pytest.mark.parametrize(("kind", "path"), [*CALLS, ("sglang", "/continue_generation"), ("vllm", "/resume")])
def test_a_call_without_an_answer_ends_by_its_deadline(folder: Path, kind: str, path: str) -> None:
    with SPEAKING[kind]() as fake, running(folder, fake) as run:
        update(run.engine, 0)
        fake.hangs.add(path)
        server: Any = run.engine._server  # type: ignore[attr-defined]
        server._call_timeout_s = server._load_timeout_s = 0.3
        with pytest.raises(EngineLost, match=rf"must answer {path}.* within 0\.[23]"):
            update(run.engine, 1)


def test_a_server_that_stops_in_the_middle_of_weights_is_given_up(folder: Path) -> None:
    with speaking() as fake, running(folder, fake) as run:
        update(run.engine, 0)
        fake.hangs.add(WEIGHTS["sglang"])
        run.engine._server._load_timeout_s = 0.3  # type: ignore[attr-defined]
        with pytest.raises(EngineLost, match=f"did not receive the weights within|must answer {WEIGHTS['sglang']}"):
            update(run.engine, 1)


def token(token: int = 3, logp: float | None = -1.0, **more: Any) -> dict[str, Any]:
    about = {"output_token_logprobs": [[logp, token, None]], "finish_reason": None}
    return {"output_ids": [token], "meta_info": about | more}


RUBBISH: list[Any] = [
    [1],
    "text",
    {"meta_info": "text"},
    {"meta_info": {}, "output_ids": [V + 1000]},
    *(token(logp=logp) for logp in (None, float("nan"), float("-inf"), 0.5)),
    token(9999),
    token(-1),
    token(
        finish_reason={"type": "stop", "matched": "NaN happened"},
        weight_versions=[{"version": "0", "start": 0, "end": 1}],
    ),
    token(
        finish_reason={"type": "stop"},
        weight_versions=[{"version": "0", "start": 3, "end": 1}, {"version": "0", "start": 0, "end": 3}],
    ),
]


def test_an_event_that_is_none_loses_the_server_with_a_sentence(folder: Path) -> None:
    with speaking() as fake:
        for event in RUBBISH:
            with running(folder, fake) as run:
                update(run.engine, 0)
                fake.answers["/generate"] = [(200, f"data: {json.dumps(event)}\n\n")]
                run.engine.submit(ask())
                lost(run, "must answer as SGLang|a log-prob is|samples token ids below|report weight versions in the o")


# all at once


class Storm:
    """Requests, updates, pauses, aborts that are continued, and ends by the server itself, in an order of chance."""

    def __init__(self, engine: ServerEngine, fake: SpeaksSGLang, chance: random.Random) -> None:
        self.engine, self.fake, self.chance = engine, fake, chance
        self.live: dict[Any, Request] = {}
        self.n_asked = self.n_ended = self.n_versions = self.n_allowed = self.version = 0
        update(engine, 0)

    def ask(self, ids: Any = None, n: int = 0, done: Done | None = None) -> None:
        key = ("", self.n_asked, 0, 0, 0)
        n = n or self.chance.randint(1, 40)
        self.live[key] = Request(key, ids or [3] * self.chance.randint(1, 4), (), n, 1.0, 1.0, done)
        self.n_asked += 1
        self.engine.submit(self.live[key])

    def begin(self) -> None:
        """A request that has tokens of one version and goes on with the next."""
        self.ask([3], 40)
        self.n_allowed = 2
        self.fake.allow(self.n_allowed)
        deadline = time.monotonic() + PATIENCE_S
        while self.engine.so_far(next(iter(self.live))) is None:
            self.step()
            assert time.monotonic() < deadline
        self.version += 1
        update(self.engine, self.version)

    def sample(self) -> None:
        self.n_allowed += self.chance.randint(0, 3)
        self.fake.allow(self.n_allowed)

    def update(self) -> None:
        if self.chance.random() < 0.3:
            self.engine.pause()
        self.version += self.chance.randint(0, 2)
        update(self.engine, self.version)

    def abort(self) -> None:
        """And go on from what it had."""
        if self.live:
            request = self.live.pop(self.chance.choice(sorted(self.live)))
            had = self.engine.abort(request.key)
            assert had is not None
            check(request, had)
            if had.finish == "abort" and had.ids:
                self.ask(request.ids, request.max_new_tokens, Done(had.ids, had.logps, had.spans))

    def end_at_server(self) -> None:
        with self.fake.changed:
            for stream in list(self.fake.streams.values())[:1]:
                if stream.finish is None:
                    stream.ends_in_queue = self.chance.random() < 0.5
                    stream.finish = {"type": "abort", "message": "out of memory"}
            self.fake.changed.notify_all()

    def look(self) -> None:
        for key, request in self.live.items():
            if (done := self.engine.so_far(key)) is not None:
                check(request, done)

    def step(self) -> None:
        for completion in self.engine.step():
            request = self.live.pop(completion.key)
            check(request, completion)
            is_whole = len(completion.ids) == request.max_new_tokens
            assert is_whole or (completion.finish, completion.ids[-1]) == ("stop", EOS)
            self.n_ended += 1
            self.n_versions = max(self.n_versions, len(completion.spans))


def check(request: Request, said: Completion | Done) -> None:
    """Each token is the one that the version stamped on it makes at its place."""
    assert (said.ids, said.logps) == expected(request, said.spans)
    assert len(said.ids) <= request.max_new_tokens


STORMS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "usual": ("sglang", having()),
    "plain": ("sglang", plain),
    "whole_events": ("sglang", whole_events),
    "without_stamps": ("sglang", having(stamps=False)),
    "without_pause": ("sglang", lambda fake: setattr(fake, "modes", ["abort"])),
    "old": ("sglang", old),
    "vllm": ("vllm", having()),
}


@pytest.mark.parametrize("server", STORMS)
def test_every_token_is_there_once_with_the_version_that_made_it(folder: Path, server: str) -> None:
    kind, change = STORMS[server]
    with SPEAKING[kind](change) as fake:
        engine = attach(folder, fake, call_timeout_s=PATIENCE_S)
        storm = Storm(engine, fake, random.Random(server))
        deeds: list[Callable[[], None]] = [storm.ask, storm.ask, storm.sample, storm.sample, storm.update, storm.abort]
        storm.begin()
        for _ in range(80):
            storm.chance.choice([*deeds, storm.end_at_server, storm.look, storm.step, storm.step])()
        fake.allow(1 << 20)
        deadline = time.monotonic() + PATIENCE_S
        while engine.n_live:
            storm.step()
            assert time.monotonic() < deadline
        engine.close()
    assert not storm.live
    assert storm.n_ended >= 5
    assert storm.n_versions > 1, "none went on over an update"
