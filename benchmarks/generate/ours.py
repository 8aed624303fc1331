"""Our side of the bench `generate`: the builtin engine, and the bare matrix products of its decode steps."""

import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from actors.engines.builtin.engine import AHEAD_S, BuiltinEngine, EngineOptions
from actors.engines.protocol import Request
from benchmarks.generate.requests import N_NEW, SHAPE, requests
from benchmarks.harness.worker_main import seconds, serve

torch.set_num_threads(1)
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**SHAPE))


def engine(batch: int, mixed: bool, seed: int) -> float:
    """CPU seconds a sampled token, log-probs and versions included; the engine is open, as the peer's model is."""
    asked = requests(batch, mixed=mixed, seed=seed)
    running = BuiltinEngine(model, EngineOptions(n_slots=batch, ahead_s=AHEAD_S), stop_ids=frozenset(), version=0)
    began, n_tokens = time.process_time(), 0
    for number, one in enumerate(asked):
        running.submit(Request(("", number, 0, 0, 0), one.ids, (seed, number), one.n_new, 1.0, 1.0))
    while running.n_live:
        for completion in running.step():
            n_tokens += len(completion.logps)
    took = time.process_time() - began
    if n_tokens != sum(one.n_new for one in asked):
        raise RuntimeError(f"every request ends at its length: {n_tokens} tokens came")
    return took / n_tokens


def floor(batch: int) -> float:
    """CPU seconds a token of the model's matrix products, and of nothing else."""
    weights = [module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)]
    inputs = [torch.rand(batch, weight.shape[1]) for weight in weights]

    def steps() -> None:
        for _ in range(N_NEW):
            for x, weight in zip(inputs, weights, strict=True):
                torch.nn.functional.linear(x, weight)

    with torch.inference_mode():
        return seconds(steps) / N_NEW / batch


if __name__ == "__main__":
    serve({"engine": engine, "floor": floor})
