"""Our side of the bench `smollm2`: the builtin engine and an update of the learner's actor."""

import array
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from actors.engines.builtin.engine import AHEAD_S, BuiltinEngine, EngineOptions
from actors.engines.protocol import Request
from actors.learner.batching import build
from actors.learner.link.rendezvous import LearnerRanks
from actors.learner.model.policy import Policy
from actors.learner.update.ppo import PPOActor, UpdateContext
from actors.models.loading import load_model
from actors.runtime.context import HeartbeatState
from areal_bus.config.sections import Config
from areal_bus.messages import ShardItem
from areal_bus.storage.journal import Journal
from benchmarks.harness.worker_main import serve
from benchmarks.smollm2 import inputs as work

SETTINGS = {
    "model": {"scratch": {}},  # not built: the model is given
    "data": {"task": "sums"},
    "gconfig": {"n_samples": work.SAMPLES},
    "actor": {
        "use_decoupled_loss": False,
        "advantage": "rloo",
        "normalize_batch": False,
        "eps_clip": work.CLIP_RATIO,
        "lr": work.LR,
        "lr_schedule": "constant",
        "lr_warmup_steps": 0,
        "adam_beta1": work.BETAS[0],
        "adam_beta2": work.BETAS[1],
        "adam_eps": work.EPS,
        "weight_decay": work.DECAY,
        "max_grad_norm": work.CLIP_NORM,
    },
}
sampling: list[Any] = []  # the model that samples and the actor that trains, once loaded
training: list[PPOActor] = []


def load(model: str) -> None:
    config = Config.model_validate(SETTINGS)
    folder = Path(tempfile.mkdtemp())
    policy = Policy(load_model(model, "float32", "cpu"), ranks=LearnerRanks(), device="cpu", temperature=1.0)
    journal = Journal(folder / "journal", role="learner", index=0, incarnation=0)
    training.append(PPOActor(policy, config, UpdateContext(journal, HeartbeatState(), folder)))
    sampling.append(load_model(model, "float32", "cpu"))


def generate(seed: int) -> dict[str, float]:
    """CPU seconds and tokens, log-probs and versions included."""
    return sampled(work.requests(seed, work.BATCH), seed)


def generate_few(seed: int) -> dict[str, float]:
    """The same of few rows."""
    return sampled(work.requests(seed, work.FEW), seed)


def sampled(asked: list[work.TimedRequest], seed: int) -> dict[str, float]:
    began = time.process_time()
    made = run(asked, seed, temperature=1.0)
    return {"seconds": time.process_time() - began, "tokens": sum(len(ids) for ids in made)}


def greedy(seed: int, n_new: int) -> list[list[int]]:
    """The most likely tokens, for a comparison."""
    return run([work.TimedRequest(one.ids, n_new) for one in work.requests(seed, work.BATCH)], seed, temperature=0.0)


def run(asked: list[work.TimedRequest], seed: int, *, temperature: float) -> list[list[int]]:
    engine = BuiltinEngine(
        sampling[0], EngineOptions(n_slots=len(asked), ahead_s=AHEAD_S), stop_ids=frozenset(), version=0
    )
    for number, one in enumerate(asked):
        engine.submit(Request(("", number, 0, 0, 0), one.ids, (seed, number), one.n_new, temperature, 1.0))
    made: dict[int, list[int]] = {}
    while engine.n_live:
        made |= {completion.key[1]: completion.ids for completion in engine.step()}
    return [made[number] for number in range(len(asked))]


def update(seed: int) -> dict[str, float]:
    """CPU seconds of an update, its trained tokens, and the figures that must equal the other side's."""
    actor, samples = training[0], work.batch(seed)
    shard = [item(i, one, actor.version) for i, one in enumerate(samples)]
    clock = actor.version
    began = time.process_time()
    trained = build(shard, step=clock, clock=clock, n_groups=work.GROUPS, eta=1, n_samples=work.SAMPLES)
    stats = actor.ppo_update(actor.compute_advantages_and_returns(trained))
    took = time.process_time() - began
    return {"seconds": took, "tokens": stats["n_tokens_trained"], "loss": stats["loss"], "norm": stats["grad_norm"]}


def item(index: int, one: work.TrainingSample, clock: int) -> ShardItem:
    """As the head sends it."""
    n, ids = len(one.ids), [*one.prompt, *one.ids]
    return ShardItem(
        step=clock, clock=clock, group=one.group, n_groups=work.GROUPS, uid=one.group, sample=index % work.SAMPLES,
        reward=one.reward, correct=None, finish="stop", segments=[[len(one.prompt), n]], spans=[[clock, n]],
        ids=array.array("i", ids).tobytes(), logps=array.array("f", [-10.0] * n).tobytes(), text="",
    )  # fmt: skip


torch.set_num_threads(1)

if __name__ == "__main__":
    serve({"load": load, "generate": generate, "generate_few": generate_few, "greedy": greedy, "update": update})
