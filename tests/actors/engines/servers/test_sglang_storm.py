"""The engine sglang, all at once: no token is lost, doubled or stamped with weights that did not make it."""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actors.engines.protocol import Completion, Done, Request
from actors.engines.servers.engine import ServerEngine
from tests.actors.engines.servers.test_sglang import attach, expected, old, plain, update, whole_events
from tests.servers.engines import EOS, PATIENCE_S, model_folder
from tests.servers.speaks_sglang import SpeaksSGLang, speaking


def usual(fake: SpeaksSGLang) -> None: ...


def without_stamps(fake: SpeaksSGLang) -> None:
    fake.stamps = False


def without_pause(fake: SpeaksSGLang) -> None:
    fake.modes = ["abort"]


class Storm:
    """Requests, updates, pauses, aborts that are continued, and ends by the server itself, in an order of chance."""

    def __init__(self, engine: ServerEngine, fake: SpeaksSGLang, chance: random.Random) -> None:
        self.engine, self.fake, self.chance = engine, fake, chance
        self.live: dict[Any, Request] = {}
        self.n_asked = self.n_ended = self.n_allowed = self.version = 0
        update(engine, 0)

    def ask(self, ids: Any = None, n: int = 0, done: Done | None = None) -> None:
        key = ("", self.n_asked, 0, 0, 0)
        n = n or self.chance.randint(1, 40)
        self.live[key] = Request(key, ids or [3] * self.chance.randint(1, 4), (), n, 1.0, 1.0, done)
        self.n_asked += 1
        self.engine.submit(self.live[key])

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


def check(request: Request, said: Completion | Done) -> None:
    """Each token is the one that the version stamped on it makes at its place."""
    ids, logps = expected(request, said.spans)
    assert (said.ids, said.logps) == (ids, pytest.approx(logps))
    assert len(said.ids) <= request.max_new_tokens


@pytest.mark.slow
@pytest.mark.parametrize("kind", [usual, plain, whole_events, without_stamps, without_pause, old])
def test_every_token_is_there_once_with_the_version_that_made_it(tmp_path: Path, kind: Any) -> None:
    with speaking(kind) as fake:
        engine = attach(model_folder(tmp_path / "model"), fake, call_timeout_s=PATIENCE_S)
        storm = Storm(engine, fake, random.Random(kind.__name__))
        deeds: list[Callable[[], None]] = [storm.ask, storm.ask, storm.sample, storm.sample, storm.update, storm.abort]
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
