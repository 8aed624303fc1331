"""Bench `versions`: CPU time of a token while weights change, for each `rollout.on_update` that does not drain.

The builtin engine samples answers of log-normal lengths; new weights come once in the mean length of an answer.
"""

import random
import time
from collections.abc import Mapping
from statistics import median

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from actors.engines.builtin.engine import AHEAD_S, BuiltinEngine, EngineOptions
from actors.engines.builtin.versions import VersionedEngine
from actors.engines.protocol import Engine, Request
from areal_bus.config.rollout import OnUpdate
from benchmarks.generate.requests import SHAPE
from benchmarks.harness import pace
from benchmarks.harness.protocol import Figures

WAYS: tuple[OnUpdate, ...] = ("recompute", "keep", "finish_old")
N_SLOTS, N_ANSWERS, PROMPT, MEDIAN, SIGMA, LONGEST = 16, 64, 32, 48, 0.7, 400
MOST = 5  # versions: eta 4
ROUNDS = 7


class VersionsBench:
    about = (
        "CPU time of a sampled token while weights change: several versions at once, and kept keys, over recomputing"
    )

    def measure(self, *, quiet: bool) -> Figures:
        """One thread; in each round every way samples the same answers."""
        torch.set_num_threads(1)
        torch.manual_seed(0)
        models = [LlamaForCausalLM(LlamaConfig(**SHAPE)) for _ in range(2)]
        weights = [{name: p.detach().clone() for name, p in model.named_parameters()} for model in models]
        n_rounds = pace.of(ROUNDS, 3)
        rounds = [{way: cost(models[0], weights, way, seed) for way in WAYS} for seed in range(n_rounds)]
        figures: Figures = {"bench": "versions", "n_slots": N_SLOTS, "versions": MOST, "rounds": n_rounds}
        for way in WAYS:
            figures[f"{way}_us"] = round(1e6 * median(one[way] for one in rounds), 1)
        for way in WAYS[1:]:
            ratios = sorted(one[way] / one["recompute"] for one in rounds)
            figures[f"{way}_over_recompute"] = round(median(ratios), 3)
            figures[f"{way}_range"] = [round(ratios[0], 3), round(ratios[-1], 3)]
        return figures


def cost(model: LlamaForCausalLM, weights: list[dict[str, Tensor]], way: OnUpdate, seed: int) -> float:
    """CPU seconds a token."""
    draw = random.Random(seed)
    lengths = [min(round(draw.lognormvariate(0, SIGMA) * MEDIAN) + 1, LONGEST) for _ in range(N_ANSWERS)]
    running, version = opened(model, weights[0], way), 0
    every = sum(lengths) * N_SLOTS // N_ANSWERS  # tokens of all slots in the mean length of an answer
    for uid, n in enumerate(lengths):
        ids = [draw.randrange(SHAPE["vocab_size"]) for _ in range(PROMPT)]
        running.submit(Request(("", uid, 0, 0, 0), ids, (seed, uid), n, 1.0, 1.0))
    began, n_tokens, forget = time.process_time(), running.n_tokens, getattr(running, "forget", lambda episode: None)
    while running.n_live:
        for done in running.step():
            forget(done.key[:4])
        is_due = running.n_tokens - n_tokens >= (version + 1) * every
        if is_due and not (way == "finish_old" and running.hold()):
            version += 1
            running.update(version, copied(weights[version % 2]))
    return (time.process_time() - began) / (running.n_tokens - n_tokens)


def opened(model: LlamaForCausalLM, weights: Mapping[str, Tensor], way: OnUpdate) -> Engine:
    options = EngineOptions(n_slots=N_SLOTS, on_update=way, ahead_s=AHEAD_S)

    def made(model: LlamaForCausalLM) -> BuiltinEngine:
        return BuiltinEngine(model, options, stop_ids=frozenset())

    several = VersionedEngine(model, made, n_slots=N_SLOTS, most=MOST) if way == "finish_old" else made(model)
    several.update(0, copied(weights))
    return several


def copied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in weights.items()}
