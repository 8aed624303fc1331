"""The faster forward against the model's own, and the memory that the two share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from actors.engines.builtin.engine import BuiltinEngine, EngineOptions
from actors.engines.protocol import Request
from actors.models.loading import load_model
from areal_cpu import fused_llama as module
from areal_cpu.build import library
from areal_cpu.decode_step import DecodeStep
from areal_cpu.fused_llama import FusedLlama, NoCache, disagreement, fused, together
from areal_cpu.paged_attention import WIDEST, Decode

pytestmark = pytest.mark.usefixtures("as_kernels_run")

V = 40
DEMO = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct"
SHAPE = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def sharp(model: Any, seed: int = 0) -> Any:
    """Weights, norms and biases that all matter."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3 + (1.0 if parameter.ndim == 1 else 0.0)
    return model.eval().requires_grad_(False)


MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "one head of keys each": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE | {"num_key_value_heads": 4})),
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "biased": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True)),
    "wide heads": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, head_dim=24)),
    "scaled rotation": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=SCALED)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8)),
}


@pytest.mark.parametrize("most_packed", [0, module.MOST_PACKED])  # a decode step with weights as they lie, and a copy
@pytest.mark.parametrize("kind", MODELS)
def test_the_fused_forward_equals_the_models_forward(
    kind: str, most_packed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_PACKED", most_packed)
    model = sharp(MODELS[kind]())
    forward = fused(model)
    assert forward is not None
    assert disagreement(model, forward) is None
    ids = torch.randint(0, V, (3, 30), generator=torch.Generator().manual_seed(1))
    position = torch.arange(30).expand(3, 30)
    plain = model(input_ids=ids, use_cache=False).logits.reshape(90, V)
    torch.testing.assert_close(forward(ids, position, 30, None, NoCache()), plain, atol=1e-4, rtol=1e-5)
    keep = torch.tensor([4, 89])
    torch.testing.assert_close(forward(ids, position, 30, None, NoCache(), keep), plain[keep], atol=1e-4, rtol=1e-5)


def test_a_texts_first_token_may_differ_by_more_and_others_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some models' first token has activations of thousands: their rounding shows, whatever the order of sums."""
    model = sharp(MODELS["llama"]())
    forward = FusedLlama(model)
    largest = float(model(input_ids=(torch.arange(module.PROBE) * 7919 % V)[None]).logits.abs().max())
    plain = type(forward).__call__

    def found(at: int, gap: float) -> str | None:
        def off(self: FusedLlama, *given: Any, **named: Any) -> Tensor:
            logits_TV = plain(self, *given, **named)
            if len(logits_TV) == module.PROBE:  # not of a decode step
                logits_TV[at, 2] += gap * largest
            return logits_TV

        monkeypatch.setattr(FusedLlama, "__call__", off)
        return disagreement(model, forward)

    assert found(0, 5e-5) is None
    assert found(0, 2e-4) is not None
    assert found(1, 5e-5) is not None


@pytest.mark.skipif(library() is None, reason="no C compiler on this machine")
@pytest.mark.parametrize(
    ("most_packed", "kind", "method"),
    [(0, Decode, "attended"), (0, DecodeStep, "__call__"), (2**20, DecodeStep, "__call__")],
)
def test_a_decode_step_that_errs_is_found(
    most_packed: int, kind: type, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_PACKED", most_packed)
    model = sharp(MODELS["llama"]())
    forward = FusedLlama(model)
    if kind is DecodeStep and not forward.packs_by_kernel:
        pytest.skip("this processor's vectors are too short")
    assert disagreement(model, forward) is None
    right = getattr(kind, method)

    def off(self: Any, *given: Any) -> Tensor:
        found: Tensor = right(self, *given) * 1.001
        return found

    monkeypatch.setattr(kind, method, off)
    assert disagreement(model, FusedLlama(model)) is not None


def test_heads_too_wide_for_the_kernels_go_by_torch() -> None:
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": V}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=1, num_key_value_heads=1, head_dim=WIDEST + 2))
    assert not FusedLlama(model).by_kernel
    assert disagreement(model, FusedLlama(model)) is None


@pytest.mark.skipif(not DEMO.is_dir(), reason="the demo's model is not there: make model")
def test_the_demos_model_has_the_faster_forward() -> None:
    model = load_model(str(DEMO), "float32", "cpu")
    assert disagreement(model, FusedLlama(model)) is None


def test_the_forwards_differ_when_one_weight_does() -> None:
    model = sharp(MODELS["llama"]())
    forward = FusedLlama(model)
    model.model.layers[1].self_attn.k_proj.weight.data = torch.randn(16, 32)  # and nobody was told
    why = disagreement(model, forward)
    assert why is not None
    assert why.startswith("logits differ by")
    forward.bind()
    assert disagreement(model, forward) is None
    model.model.norm.weight.data[3] = torch.nan  # agrees with nothing
    assert disagreement(model, FusedLlama(model)) is not None


def test_other_families_have_no_faster_forward() -> None:
    shape = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": V, "bos_token_id": 0, "eos_token_id": 0}
    assert fused(GPT2LMHeadModel(GPT2Config(**shape))) is None
    assert fused(LlamaForCausalLM(LlamaConfig(**SHAPE, hidden_act="gelu"))) is None


def test_adjacent_weights_are_joined_without_a_copy() -> None:
    flat = torch.arange(48.0)
    rows = [flat[:8].view(2, 4), flat[8:24].view(4, 4), flat[24:].view(6, 4)]
    whole = together(rows)
    assert whole.data_ptr() == flat.data_ptr()
    assert torch.equal(whole, flat.view(12, 4))


def test_separate_weights_are_joined_by_a_copy_and_share_its_memory() -> None:
    flat = torch.arange(48.0)
    rows = [torch.nn.Parameter(flat[at : at + 8].view(2, 4).clone()) for at in (0, 16, 32)]
    before = [row.detach().clone() for row in rows]
    whole = together(rows)
    assert torch.equal(whole, torch.cat(before))
    whole[3] = 7.0
    assert rows[1][1].tolist() == [7.0] * 4
    assert together(rows).data_ptr() == whole.data_ptr()
    swapped = [rows[1], rows[0]]  # adjacent, in another order
    assert torch.equal(together(swapped), torch.cat([before[1], before[0]]).index_fill(0, torch.tensor([1]), 7.0))


def sampled(engine: BuiltinEngine) -> list[int]:
    engine.submit(Request(("", 0, 0, 0, 0), [3, 4, 5], (1,), 8, 0.0, 1.0))
    while engine.n_live:
        for completion in engine.step():
            return completion.ids
    raise AssertionError("it ends with a completion")


@pytest.mark.parametrize("in_one_piece", [True, False])
def test_new_weights_are_computed_with_wherever_they_lie(in_one_piece: bool) -> None:
    first, second = sharp(MODELS["qwen2"](), 1), sharp(MODELS["qwen2"](), 2)
    expected = [
        sampled(BuiltinEngine(m, EngineOptions(n_slots=2), stop_ids=frozenset(), version=0)) for m in (first, second)
    ]
    assert expected[0] != expected[1]
    engine = BuiltinEngine(sharp(MODELS["qwen2"](), 3), EngineOptions(n_slots=2), stop_ids=frozenset())
    for version, m in enumerate((first, second, first)):
        tensors = {name: parameter.data.clone() for name, parameter in m.named_parameters()}
        if in_one_piece:
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
            parts = flat.split([tensor.numel() for tensor in tensors.values()])
            tensors = {name: part.view_as(tensors[name]) for name, part in zip(tensors, parts, strict=True)}
        engine.update(version, tensors)
        assert sampled(engine) == expected[version % 2]


def test_a_forward_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sharp(MODELS["llama"]())
    expected = sampled(BuiltinEngine(model, EngineOptions(n_slots=2), stop_ids=frozenset(), version=0))
    monkeypatch.setattr(module.MergedLinear, "added", lambda joined, x, to: to)
    assert sampled(BuiltinEngine(model, EngineOptions(n_slots=2), stop_ids=frozenset(), version=0)) == expected
