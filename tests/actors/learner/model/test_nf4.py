"""Adapters over 4-bit weights: the learner computes with the rounded base, and pushes what it would push without."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.learner.model.nf4 import BLOCK, Nf4Linear, dequantized, quantized, values
from areal_bus.config.sections import Config
from areal_bus.config.validation import check
from areal_bus.errors import ConfigError
from launch.memory.ranks import learner_need
from launch.memory.shape import KNOWN_SHAPES
from tests.support.learner_setup import (
    PLAIN,
    gradients,
    random_shard,
    settings,
    tiny_actor,
    tiny_model,
    weights,
)

SHARD = random_shard(3)


def config_of(variant: list[str], **actor: Any) -> Config:
    return settings(actor={"lora": {"rank": 4, "variant": variant}, "advantage": "rloo", "lr": 1e-2, **actor})


def rounded_model() -> Any:
    """The small model whose decoder layers have the numbers that 4 bits leave."""
    model = tiny_model()
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name.startswith("model.layers"):
                weight = module.weight
                weight.copy_(dequantized(*quantized(weight), weight.shape, weight.dtype))
    return model


def test_values_are_those_of_the_paper() -> None:
    """Appendix E of QLoRA, to the digits that single-precision quantiles have."""
    known = [-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0]
    known += [0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0]
    assert values().tolist() == pytest.approx(known, abs=1e-6)


@given(st.integers(0, 10**6), st.sampled_from([(1, 1), (3, 7), (5, 64), (9, 33)]), st.sampled_from([0.0, 1e-6, 3.0]))
def test_a_number_becomes_the_nearest_value_of_its_block(seed: int, shape: tuple[int, int], scale: float) -> None:
    weight = scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    packed, largest = quantized(weight)
    assert packed.numel() == BLOCK // 2 * largest.numel()
    found = dequantized(packed, largest, weight.shape, torch.float32)
    of_block = largest.repeat_interleave(BLOCK)[: weight.numel()]
    nearest = (of_block.unsqueeze(1) * values() - weight.flatten().unsqueeze(1)).abs().amin(1)
    torch.testing.assert_close((found - weight).abs().flatten(), nearest, atol=1e-6 * scale, rtol=0)
    again = quantized(found)
    torch.testing.assert_close(dequantized(*again, weight.shape, torch.float32), found, atol=0, rtol=0)


def test_training_over_four_bits_is_training_over_the_rounded_base(tmp_path: Path) -> None:
    ours = tiny_actor(tmp_path / "four", config_of(["nf4"], kl_ctl=0.1))
    theirs = tiny_actor(tmp_path / "rounded", config_of([], kl_ctl=0.1), model=rounded_model())
    assert sum(isinstance(module, Nf4Linear) for module in ours.policy.model.modules()) == 14
    assert not any("base_layer" in name for name in dict(ours.policy.model.named_parameters()))
    torch.testing.assert_close(gradients(ours, SHARD), gradients(theirs, SHARD), atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(weights(ours.policy), weights(theirs.policy), atol=1e-5, rtol=0)


def test_the_push_is_that_of_the_base_as_it_was(tmp_path: Path) -> None:
    four, plain = (tiny_actor(tmp_path / str(i), config_of(way)).policy.pushed() for i, way in enumerate((["nf4"], [])))
    assert four.keys() == plain.keys()
    assert all(torch.equal(four[name], value) for name, value in plain.items())


def test_the_plan_has_the_memory_of_four_bits() -> None:
    shape = KNOWN_SHAPES["Qwen/Qwen2.5-7B-Instruct"]
    needs = [
        learner_need(
            settings(
                actor={"lora": {"variant": variant}},
                model={"path": "Qwen/Qwen2.5-7B-Instruct", "dtype": "bfloat16"},
                topology={"gpus_per_host": 2},
                learner={"gradient_checkpointing": True},
            ),
            shape, 0, 64,
        ).device
        for variant in ([], ["nf4"])
    ]  # fmt: skip
    assert needs[0] - needs[1] == pytest.approx(1.4375 * 6.5e9, rel=0.15)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"actor": {"lora": {"variant": ["nf4", "dora"]}}}, r'"nf4" is refused with "dora"'),
        ({"topology": {"learners": 2}}, r'"nf4" is refused with topology\.learners = 2'),
        ({"actor": {"lora": {"variant": ["nf4"]}, "correction": "none"}}, r'missing correction with .*"nf4"'),
    ],
)
def test_four_bits_are_refused_where_they_do_not_go(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(settings(**{"actor": {"lora": {"variant": ["nf4"]}}, "data": PLAIN, **sections}))
