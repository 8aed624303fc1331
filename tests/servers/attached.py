"""Engines attached to a server of the test's own, and what such a server samples by its rule."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.engines.protocol import Engine, Request
from actors.engines.servers.connect import open_engine
from actors.models.loading import load_tokenizer
from areal_bus.config.sections import Config
from areal_bus.errors import EngineLost
from tests.servers import speaks_sglang, speaks_vllm
from tests.servers.engines import Running, context_of
from tests.servers.speaks_sglang import OLD, SpeaksSGLang, V
from tests.servers.speaks_vllm import SpeaksVLLM

SPEAKING: dict[str, Any] = {"sglang": speaks_sglang.speaking, "vllm": speaks_vllm.speaking}
WEIGHTS = {"sglang": "/update_weights_from_distributed", "vllm": "/collective_rpc"}


def config(
    folder: Path,
    kind: str,
    *,
    on_update: str = "recompute",
    gconfig: Any = None,
    lora: Any = None,
    actor: Any = None,
    **engine: Any,
) -> Config:
    return Config.model_validate({
        "model": {"path": str(folder)},
        "data": {"task": "sums"},
        "gconfig": gconfig or {},
        "rollout": {"engine": kind, "on_update": on_update},
        "engine": {"call_timeout_s": 10.0, **engine},
        "weights": {"timeout_s": 10.0},
        "actor": {"lora": lora, **(actor or {})},
    })  # fmt: skip


def attach(folder: Path, fake: SpeaksSGLang | str, *, incarnation: int = 0, **settings: Any) -> Any:
    """An engine of the kind of that server; at an address alone, one of SGLang."""
    kind = "vllm" if isinstance(fake, SpeaksVLLM) else "sglang"
    settled = config(folder, kind, urls=(fake if isinstance(fake, str) else fake.url,), **settings)
    return open_engine(context_of(folder, incarnation=incarnation), settled, load_tokenizer(str(folder)))


@contextmanager
def running(folder: Path, fake: SpeaksSGLang, **settings: Any) -> Iterator[Running]:
    engine = attach(folder, fake, **settings)
    try:
        yield Running(engine)
    finally:
        engine.close()


def having(**attributes: Any) -> Callable[[Any], None]:
    """Makes a server one that has these; those of a mapping or list are added to it."""

    def change(fake: Any) -> None:
        for name, value in attributes.items():
            before = getattr(fake, name)
            if isinstance(before, dict | set):
                before |= value
            else:
                setattr(fake, name, before + value if isinstance(before, list) else value)

    return change


def without(path: str) -> Callable[[Any], None]:
    return lambda fake: fake.routes.remove(path)


def old(fake: SpeaksSGLang) -> None:
    """A server that can neither pause nor stamp, and knows no sessions."""
    fake.version, fake.stamps, fake.incremental = "0.5.12", False, False
    fake.routes = [path for path in fake.routes if path not in OLD]


def plain(fake: SpeaksSGLang) -> None:
    """One that takes weights without a session (0.5.20)."""
    fake.routes = [path for path in fake.routes if "_weight_update" not in path]


def whole_events(fake: SpeaksSGLang) -> None:
    fake.incremental = False


def update(engine: Engine, version: int, *, term: int = 0) -> None:
    """Weights that are all the same number."""
    shapes = engine.parameters()
    engine.update(version, {name: torch.full(p.shape, float(version)) for name, p in shapes.items()}, term=term)


def ask(uid: int = 0, *, n: int = 8, temperature: float = 1.0, top_p: float = 1.0) -> Request:
    return Request(("", uid, 0, 0, 0), [3, 4], (uid,), n, temperature, top_p)


def requests(fake: SpeaksSGLang) -> list[dict[str, Any]]:
    """Bodies of the requests for samples, in order."""
    return [body for body in fake.called("/generate") if "rid" in body]


def sent(folder: Path, request: Request, change: Any = None, *, kind: str = "sglang") -> dict[str, Any]:
    """The body of this request as a server gets it, which answers it."""
    with SPEAKING[kind](change) as fake, running(folder, fake) as run:
        update(run.engine, 0)
        fake.allow(request.max_new_tokens)
        run.engine.submit(request)
        run.all()
    (body,) = requests(fake)
    return body


def expected(request: Request, spans: list[list[int]]) -> tuple[list[int], Any]:
    """Tokens and log-probs that the server samples by its rule, given the versions."""
    weights = [version for version, n in spans for _ in range(n)]
    at = list(enumerate(weights, len(request.ids)))
    return [(w + i) % V for i, w in at], pytest.approx([-(w + i / 1000) for i, w in at])


def lost(run: Running, why: str) -> None:
    with pytest.raises(EngineLost, match=why):
        run.all()
