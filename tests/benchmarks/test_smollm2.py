"""Bench `smollm2`: both sides do the same work, here with a very small model. Nothing is timed."""

from pathlib import Path
from statistics import mean

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from areal_bus.errors import ConfigError
from benchmarks.harness.interleave import Rounds
from benchmarks.smollm2 import bench as smollm2
from benchmarks.smollm2 import huggingface as theirs
from benchmarks.smollm2 import inputs as work
from benchmarks.smollm2 import ours


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=work.VOCABULARY,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=True,
        **shape,
    )
    folder: Path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(folder)
    ours.load(str(folder))
    theirs.load(str(folder))


def test_lengths_have_their_mean_and_every_round_its_own() -> None:
    many = [one.n_new for seed in range(40) for one in work.requests(seed, work.BATCH)]
    assert work.N_NEW * 0.9 < mean(many) < work.N_NEW * 1.1
    assert max(many) <= work.LONGEST
    assert work.requests(1, 5) == work.requests(1, 5) != work.requests(2, 5)
    assert {len(one.ids) for one in work.requests(1, 9)} == {work.N_GIVEN}


def test_no_group_is_without_advantage() -> None:
    gains = work.advantages(work.batch(0))
    assert len(gains) == work.GROUPS * work.SAMPLES
    assert sum(gains) == pytest.approx(0, abs=1e-9)
    assert all(gain != 0 for gain in gains)


@pytest.mark.slow
@pytest.mark.usefixtures("loaded")
def test_both_sides_take_the_same_step_on_the_same_tokens() -> None:
    for seed in (1, 2):
        here, there = ours.update(seed), theirs.update(seed)
        assert here["tokens"] == sum(len(one.ids) for one in work.batch(seed))
        assert here["norm"] > 0
        smollm2.check("update", here, there)
        with pytest.raises(ConfigError, match="same update"):
            smollm2.check("update", here, there | {"norm": there["norm"] * 1.01})
    with pytest.raises(ConfigError, match="as many tokens"):
        smollm2.check("update", here, there | {"tokens": there["tokens"] + 1})


@pytest.mark.usefixtures("loaded")
def test_both_sides_sample_the_tokens_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "BATCH", 3)
    assert ours.greedy(1, 5) == theirs.greedy(1, 5)
    monkeypatch.setattr(work, "FEW", 2)
    wanted, of_few = (sum(one.n_new for one in work.requests(1, n)) for n in (3, 2))
    assert ours.generate(1)["tokens"] == theirs.generate(1)["tokens"] == wanted
    assert ours.generate_few(1)["tokens"] == theirs.generate_few(1)["tokens"] == of_few


def test_figures_name_the_two_ratios() -> None:
    generate, few, update = (Rounds(({"hf": cost, "ours": 0.01},), 0, 1e-3, 1.0) for cost in (0.02, 0.04, 0.03))
    found = smollm2.figures({"generate": generate, "generate_few": few, "update": update}, 1.0)
    assert (found["generate_ratio"], found["generate_few_ratio"], found["train_ratio"]) == (2.0, 4.0, 3.0)
    assert (found["generate_few_refused"], found["train_refused"]) == (0, 0)
    assert (found["train_tokens_per_cpu_s"], found["hf_generate_tokens_per_cpu_s"]) == (100.0, 50.0)
