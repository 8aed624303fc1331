"""Padding in an update: counts the tokens of the forward passes of real updates of a small model.

Real tokens: each completion, and the prompt of each group once.
"""

import array
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from actors.learner.batching import build
from actors.learner.link.rendezvous import LearnerRanks
from actors.learner.model.policy import Policy
from actors.learner.update.ppo import PPOActor, UpdateContext
from actors.runtime.context import HeartbeatState
from areal_bus.config.sections import Config
from areal_bus.messages import ShardItem
from areal_bus.storage.journal import Journal
from areal_cpu.matmul import stepped
from benchmarks.pack.inputs import lengths

VOCABULARY = 64


class PaddingCount:
    """Counts the tokens that go through the model and through its attention (which repeats shared prompts)."""

    def __init__(self, model: Any) -> None:
        self.model = self.attention = 0
        model.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, _module: Any, _arguments: Any, named: dict[str, Any]) -> None:
        self.model += named["input_ids"].numel()
        self.attention += sum(named["packing"].lengths)


def update(completions: list[int], n_samples: int, n_prompt: int, budget: int) -> dict[str, int]:
    """Train once on groups of samples with completions of these lengths, in this order."""
    config = Config.model_validate(
        {
            "model": {"scratch": {}},
            "data": {"task": "sums"},
            "gconfig": {"n_samples": n_samples},
            "learner": {"max_tokens_per_mb": budget},
        }
    )
    n_groups = len(completions) // n_samples
    items = [item(i, n, n_samples, n_prompt, n_groups) for i, n in enumerate(completions)]
    with tempfile.TemporaryDirectory() as folder:
        policy = Policy(model(), ranks=LearnerRanks(), device="cpu", temperature=1.0)
        journal = Journal(Path(folder) / "journal", role="learner", index=0, incarnation=0)
        actor = PPOActor(policy, config, UpdateContext(journal, HeartbeatState(), Path(folder)))
        count = PaddingCount(policy.model)
        batch = build(items, step=0, clock=0, n_groups=n_groups, eta=1, n_samples=n_samples)
        figures = actor.ppo_update(actor.compute_advantages_and_returns(batch))
        journal.close(reason="measured")
    return {"model": count.model, "attention": count.attention, "trained": int(figures["n_tokens_trained"])}


def model() -> Any:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )
    )


def item(index: int, n: int, n_samples: int, n_prompt: int, n_groups: int) -> ShardItem:
    """A sample whose reward differs within its group, so that every group has a signal."""
    group, sample = divmod(index, n_samples)
    dice = random.Random(group)
    prompt = [dice.randrange(2, VOCABULARY) for _ in range(n_prompt)]
    dice.seed(1000 + index)
    sampled = [dice.randrange(2, VOCABULARY) for _ in range(n)]
    return ShardItem(
        step=0, clock=0, group=group, n_groups=n_groups, uid=group, sample=sample, reward=sample / n_samples,
        correct=None, finish="stop", segments=[[n_prompt, n]], spans=[[0, n]],
        ids=array.array("i", [*prompt, *sampled]).tobytes(), logps=array.array("f", [-4.0] * n).tobytes(), text="",
    )  # fmt: skip


@pytest.mark.usefixtures("as_kernels_run")
def test_an_update_reads_each_completion_without_its_last_token_and_each_prompt_once() -> None:
    counted = update([5, 9, 3, 3], n_samples=2, n_prompt=7, budget=64)
    n, n_seen = 2 * 7 + 20 - 4, 4 * 7 + 20 - 4
    more = stepped(n, torch.device("cpu")) - n  # rows are padded to a length that is compiled already
    assert counted == {"model": n + more, "attention": n_seen + more, "trained": 20}


@pytest.mark.usefixtures("as_kernels_run")
@pytest.mark.parametrize("seed", range(5))
def test_an_update_computes_at_most_1_03_tokens_for_each_real_one(seed: int) -> None:
    """Log-normal lengths; a micro-batch holds a tenth of the update. Padding to the longest costs over 4."""
    n_groups, n_samples, n_prompt = 32, 4, 20
    completions = lengths(n_groups * n_samples, seed, median=39.0, sigma=1.0, longest=512)
    counted = update(completions, n_samples, n_prompt, budget=1024)
    real = sum(completions) + n_prompt * n_groups
    whole = sum(completions) + n_prompt * len(completions)
    assert counted["trained"] == sum(completions)
    assert counted["model"] <= 1.03 * real
    assert counted["attention"] <= 1.03 * whole
    assert (max(completions) + n_prompt) * len(completions) > 3 * whole
