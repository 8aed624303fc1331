"""Padding in an update: counts the tokens of the forward passes of real updates of a small model.

Real tokens: each completion, and the prompt of each group once.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from areal_cpu.matmul import stepped
from benchmarks.pack.inputs import lengths
from tests.support.learner_setup import settings, shard_item, tiny_actor, tiny_model, update


class PaddingCount:
    """Counts the tokens that go through the model and through its attention (which repeats shared prompts)."""

    def __init__(self, model: Any) -> None:
        self.model = self.attention = 0
        model.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, _module: Any, _arguments: Any, named: dict[str, Any]) -> None:
        self.model += named["input_ids"].numel()
        self.attention += sum(named["packing"].lengths)


def counted(completions: list[int], n_samples: int, n_prompt: int, budget: int, folder: Path) -> dict[str, int]:
    """Train once on groups of samples with completions of these lengths, in this order; all rewards differ."""
    config = settings(gconfig={"n_samples": n_samples}, learner={"max_tokens_per_mb": budget})
    shard = [
        shard_item(
            group=i // n_samples,
            sample=i % n_samples,
            n_groups=len(completions) // n_samples,
            reward=float(i % n_samples),
            prompt=[2 + i // n_samples % 20] * n_prompt,
            sampled=[2 + i % 19] * n,
        )
        for i, n in enumerate(completions)
    ]
    actor = tiny_actor(folder, config, model=model())
    count = PaddingCount(actor.policy.model)
    figures = update(actor, shard)
    return {"model": count.model, "attention": count.attention, "trained": int(figures["n_tokens_trained"])}


def model() -> Any:
    config = tiny_model().config
    config.max_position_embeddings = 4096
    return LlamaForCausalLM(config)


@pytest.mark.usefixtures("as_kernels_run")
def test_an_update_reads_each_completion_without_its_last_token_and_each_prompt_once(tmp_path: Path) -> None:
    found = counted([5, 9, 3, 3], n_samples=2, n_prompt=7, budget=64, folder=tmp_path)
    n, n_seen = 2 * 7 + 20 - 4, 4 * 7 + 20 - 4
    more = stepped(n, torch.device("cpu")) - n  # rows are padded to a length that is compiled already
    assert found == {"model": n + more, "attention": n_seen + more, "trained": 20}


@pytest.mark.usefixtures("as_kernels_run")
@pytest.mark.parametrize("seed", range(2))
def test_an_update_computes_at_most_1_03_tokens_for_each_real_one(tmp_path: Path, seed: int) -> None:
    """Log-normal lengths; a micro-batch holds a tenth of the update. Padding to the longest costs over 4."""
    n_groups, n_samples, n_prompt = 32, 4, 20
    completions = lengths(n_groups * n_samples, seed, median=39.0, sigma=1.0, longest=512)
    found = counted(completions, n_samples, n_prompt, budget=1024, folder=tmp_path)
    real = sum(completions) + n_prompt * n_groups
    whole = sum(completions) + n_prompt * len(completions)
    assert found["trained"] == sum(completions)
    assert found["model"] <= 1.03 * real
    assert found["attention"] <= 1.03 * whole
    assert (max(completions) + n_prompt) * len(completions) > 3 * whole
