"""How cost grows: CPU seconds of an engine's step, of packing, and of the head for a trajectory; a point a question."""

import random
import time
from statistics import median

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from actors.engines.builtin.engine import BuiltinEngine
from actors.engines.protocol import Request
from actors.learner.micro_batches import pack
from areal_bus import messages as m
from areal_bus.core.effects import Effect
from areal_bus.core.head import Head
from areal_bus.core.staleness import StalenessPolicy
from tools.bench.generate.requests import SHAPE
from tools.bench.harness.worker_main import seconds, serve
from tools.bench.pack.inputs import LONGEST, lengths
from tools.staleness.simulator.ring import Ring
from tools.staleness.simulator.scenario import Scenario

STEPS = 12  # of an engine, timed

torch.set_num_threads(1)
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, "max_position_embeddings": 8192}))


def engine(slots: int, context: int) -> float:
    """Seconds of a decode step with every slot at about this many positions."""
    running = BuiltinEngine(model, stop_ids=frozenset(), n_slots=slots, version=0)
    dice = random.Random(0)
    ids = [dice.randrange(1, SHAPE["vocab_size"]) for _ in range(context)]  # the same in all slots: read once
    for number in range(slots):
        running.submit(Request(("", number, 0, 0, 0), ids, (number,), STEPS + 4, 1.0, 1.0))
    for _ in range(3):  # reads the prompts, and makes room
        running.step()
    took = []
    for _ in range(STEPS):
        began = time.process_time()
        running.step()
        took.append(time.process_time() - began)
    return median(took)


def packing(n: int) -> float:
    """Seconds to pack n log-normal lengths."""
    drawn = lengths(n, seed=n)
    return seconds(lambda: pack(drawn, capacity=LONGEST))


class Clocked(Head):
    """A head that knows how long its decisions took."""

    spent_s = 0.0

    def on(self, sender: str, message: m.Message, now: float) -> list[Effect]:
        began = time.process_time()
        effects = super().on(sender, message, now)
        self.spent_s += time.process_time() - began
        return effects

    def tick(self, now: float, *, until: float | None = None) -> list[Effect]:
        began = time.process_time()
        effects = super().tick(now, until=until)
        self.spent_s += time.process_time() - began
        return effects


def head(ranks: int, steps: int, rounds: int) -> float:
    """Seconds of the head's decisions for a trajectory; of the ranks an eighth are rewards, and one is the learner.

    Heartbeats, leases, verdicts, batches and pushes of a simulated ring without faults; messages are not encoded.
    """
    found = []
    for seed in range(rounds):
        n_rewards = ranks // 8
        scenario = Scenario(
            seed=seed,
            policy=StalenessPolicy.MASK,
            batch_size=ranks,
            eta=1,
            n_samples=4,
            total_steps=steps,
            n_generators=ranks - n_rewards - 1,
            n_rewards=n_rewards,
        )
        ring = Ring(scenario, head_class=Clocked)
        outcome = ring.run()
        if outcome.end is None or outcome.end.code or outcome.violations or not isinstance(ring.head, Clocked):
            raise RuntimeError(f"a ring without faults ends well: {outcome}")
        found.append(ring.head.spent_s / (steps * ranks * scenario.n_samples))
    return median(found)


if __name__ == "__main__":
    serve({"engine": engine, "packing": packing, "head": head})
