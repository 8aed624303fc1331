"""A decode step by one C call is what the model computes, for all shapes; what C could not follow is refused."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from areal_cpu import build
from areal_cpu import fused_llama as module
from areal_cpu.decode_step import DecodeStep, LayerWeights, ModelWeights, PackedWeights, PlainWeights
from areal_cpu.fused_llama import FusedLlama, disagreement
from areal_cpu.layer_kernels import LayerKernels
from areal_cpu.paged_attention import WIDEST, Decode, P, Tables
from areal_cpu.paged_cache import PagedCache
from areal_cpu.sequences import CachePiece

pytestmark = [
    pytest.mark.usefixtures("as_kernels_run"),
    pytest.mark.skipif(build.library() is None, reason="no C compiler on this machine"),
]
needs_vectors = pytest.mark.skipif(
    build.library() is None or not LayerKernels().attends, reason="this processor's vectors are too short"
)

FAMILIES: list[tuple[type, Callable[..., Any], dict[str, Any]]] = [
    (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    (Qwen2Config, Qwen2ForCausalLM, {}),
    (Qwen3Config, Qwen3ForCausalLM, {}),
]


def model_of(
    family: int, width: int, gates: int, heads: tuple[int, int], head_width: int, words: int, seed: int = 0
) -> Any:
    """Two layers whose weights, norms and biases all matter."""
    config, kind, more = FAMILIES[family]
    torch.manual_seed(seed)
    model = kind(
        config(
            vocab_size=words,
            hidden_size=width,
            intermediate_size=gates,
            num_hidden_layers=2,
            num_attention_heads=heads[0],
            num_key_value_heads=heads[1],
            head_dim=head_width,
            max_position_embeddings=128,
            **more,
        )
    )
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3 + (1.0 if parameter.ndim == 1 else 0.0)
    return model.eval().requires_grad_(False)


def kept_twice(is_copied: bool) -> Any:
    """Whether models made meanwhile are small enough for it."""
    return patch.object(module, "MOST_PACKED", module.MOST_PACKED if is_copied else 0)


def stepped(forward: FusedLlama, texts: Sequence[Sequence[int]]) -> Tensor:
    """(n, V) after each text, whose last token is decoded in one step with those of all others."""
    blocks, ends = PagedCache(*forward.heads), [len(text) - 1 for text in texts]
    blocks.reserve([len(text) for text in texts], 0)
    for row, (text, end) in enumerate(zip(texts, ends, strict=True)):
        view = blocks.filling([CachePiece([row], 0, end, 0)])
        mask = torch.full((1, 1, end, end), -torch.inf).triu(1) if end > 1 else torch.zeros(1, 1, end, end)
        forward(torch.tensor([text[:end]]), torch.arange(end)[None], end, mask, view)
    blocks.reserve([len(text) for text in texts], len(texts))
    view, _ = blocks.decoding(ends, torch.float32, torch.device("cpu"))
    return forward.decoded([text[-1] for text in texts], ends, view)


@pytest.mark.slow
@given(
    family=st.sampled_from(range(len(FAMILIES))),
    share=st.sampled_from([1, 4, 5, 18]),
    gates=st.sampled_from([1, 8, 33, 96]),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 3), (5, 1)]),
    head_width=st.sampled_from([2, 6, 32]),
    words=st.sampled_from([3, 64, 65, 200]),
    lengths=st.lists(st.integers(2, 3 * P), min_size=1, max_size=14),
    seed=st.integers(0, 9),
    is_copied=st.booleans(),
)
def test_a_decode_step_equals_the_models_forward(
    family: int, share: int, gates: int, heads: tuple[int, int], head_width: int, words: int, lengths: list[int],
    seed: int, is_copied: bool,
) -> None:  # fmt: skip
    model = model_of(family, share * heads[0], gates, heads, head_width, words, seed)
    texts = [[(7 * row + 3 * at + seed) % words for at in range(length)] for row, length in enumerate(lengths)]
    with kept_twice(is_copied):
        found = stepped(FusedLlama(model), texts)
    exact = model.double()
    for row, text in enumerate(texts):
        expected = exact(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
        torch.testing.assert_close(found[row].double(), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@needs_vectors
@pytest.mark.parametrize("is_copied", [True, False])
def test_a_rows_output_does_not_depend_on_the_other_rows_of_the_batch(is_copied: bool) -> None:
    with kept_twice(is_copied):
        forward = FusedLlama(model_of(0, 72, 33, (4, 2), 6, 65))
    texts = [[(5 * row + at) % 65 for at in range(2 + 3 * row)] for row in range(13)]
    alone = [stepped(forward, [text])[0] for text in texts]
    for n in (2, 5, 6, 7, 13):
        together = stepped(forward, texts[:n])
        assert all(torch.equal(together[row], alone[row]) for row in range(n))


@needs_vectors
def test_many_rows_of_a_model_that_is_not_kept_twice_are_computed_layer_by_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, texts = model_of(0, 72, 33, (4, 2), 6, 65), [[1, 2, 3], [4, 5, 6, 7], [8, 9]]
    n_bytes = sum(parameter.nbytes for parameter in model.parameters())
    monkeypatch.setattr(module, "MANY", 2)
    small, found = FusedLlama(model), {}
    for most in (n_bytes, n_bytes - 1):
        monkeypatch.setattr(module, "MOST_PACKED", most)
        forward = FusedLlama(model)
        with patch.object(DecodeStep, "__call__", autospec=True, side_effect=DecodeStep.__call__) as step:
            for n in (3, 2, 1):
                torch.testing.assert_close(stepped(forward, texts[:n]), stepped(small, texts[:n]), rtol=1e-4, atol=1e-4)
        found[most] = step.call_count
    assert found == {n_bytes: 6, n_bytes - 1: 5}


@pytest.mark.parametrize("is_copied", [True, False])
def test_a_step_has_the_weights_of_the_last_bind(is_copied: bool) -> None:
    first, second = (model_of(2, 16, 8, (4, 2), 6, 64, seed) for seed in (0, 1))
    texts = [[1, 2, 3], [4, 5]]
    with kept_twice(is_copied):
        forward, expected = FusedLlama(first), stepped(FusedLlama(second), texts)
    assert not torch.allclose(stepped(forward, texts), expected, atol=0.1)
    for parameter, other in zip(first.parameters(), second.parameters(), strict=True):
        parameter.data = other.data.clone()
    forward.bind()
    assert torch.equal(stepped(forward, texts), expected)


@needs_vectors
@pytest.mark.parametrize("what", ["a head of more words", "an embedding that is not contiguous", "norms that differ"])
def test_a_step_of_an_unusual_model_equals_its_forward(what: str) -> None:
    model, ids = model_of(0, 72, 33, (4, 2), 6, 65), torch.tensor([[1, 2, 3]])
    if what == "a head of more words":
        model.lm_head = torch.nn.Linear(72, 70, bias=False).requires_grad_(False)
    elif what == "norms that differ":
        model.model.layers[1].input_layernorm.variance_epsilon = 0.5
    else:
        model.model.embed_tokens.weight.data = model.model.embed_tokens.weight.data.t().contiguous().t()
    assert disagreement(model, FusedLlama(model)) is None
    expected = model.double()(input_ids=ids, use_cache=False).logits[0, -1]
    found = stepped(FusedLlama(model.float()), [[1, 2, 3]])[0].double()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def weights(**changed: Any) -> ModelWeights:
    """4 query heads and 2 key heads of 6, a width of 16, 8 gates, 40 words."""
    layer = LayerWeights(
        first_E=torch.ones(16), second_E=torch.ones(16), query_D=torch.ones(6), key_D=torch.ones(6),
        qkv=PackedWeights(torch.randn(48, 16)),
        out=PackedWeights(torch.randn(16, 24)),
        gate_up=PackedWeights(torch.randn(16, 16)), down=PackedWeights(torch.randn(16, 8)),
    )  # fmt: skip
    layer = replace(layer, **{name: changed.pop(name) for name in list(changed) if hasattr(layer, name)})
    whole = ModelWeights(
        embedding_VE=torch.randn(40, 16), norm_E=torch.ones(16), head=PackedWeights(torch.randn(40, 16)),
        layers=(layer,),
        n_query=4, n_key=2, head_width=6, scale=0.4, epsilon=1e-5,
    )  # fmt: skip
    return replace(whole, **changed)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("qkv", lambda: PackedWeights(torch.randn(47, 16))),
        ("out", lambda: PackedWeights(torch.randn(16, 25))),
        ("gate_up", lambda: PackedWeights(torch.randn(17, 16))),
        ("down", lambda: PackedWeights(torch.randn(15, 8))),
        ("head", lambda: PackedWeights(torch.randn(40, 15))),
        ("out", lambda: PlainWeights(torch.randn(16, 25))),
        ("out", lambda: PlainWeights(torch.randn(24, 16).t())),
        ("down", lambda: PlainWeights(torch.randn(16, 8).double())),
        ("head", lambda: PlainWeights(torch.randn(40, 16), torch.zeros(39))),
        ("qkv", lambda: PlainWeights(torch.randn(48, 16), torch.zeros(96)[::2])),
        ("first_E", lambda: torch.ones(15)),
        ("second_E", lambda: torch.ones(16, dtype=torch.float64)),
        ("key_D", lambda: torch.ones(5)),
        ("norm_E", lambda: torch.ones(17)),
        ("embedding_VE", lambda: torch.randn(16, 40).t()),
        ("n_key", lambda: 3),
        ("head_width", lambda: 5),
        ("head_width", lambda: WIDEST + 2),
    ],
)
def test_weights_that_do_not_fit_together_are_refused(name: str, other: Callable[[], Any]) -> None:
    DecodeStep(weights())
    with pytest.raises(ValueError, match=r"one shape|contiguous float32|a product is of|the width of a head"):
        DecodeStep(weights(**{name: other()}))


def test_a_decode_step_refuses_invalid_tokens_tables_and_positions() -> None:
    step, angles, pool = DecodeStep(weights()), torch.zeros(P, 6), torch.zeros(2, 2, 2, P, 6)
    tables = Tables([[], []], [[0], [1]])
    decode = Decode(tables, [3, P - 1], 4, 2)
    assert step([0, 39], decode, angles, angles, [(pool, None)]).shape == (2, 40)
    right: dict[str, Any] = {"ids": [0, 1], "decode": decode, "angles": angles, "pools": [(pool, None)]}
    for why, changed in (
        ("a vocabulary of 40", {"ids": [0, 40]}),
        ("a vocabulary of 40", {"ids": [-1, 0]}),
        ("there are 2 rows", {"ids": [0]}),
        ("up to position 15", {"angles": angles[:-1]}),
        ("4 and 2 heads", {"decode": Decode(tables, [3, 4], 2, 2)}),
        ("a pool is", {"pools": [(torch.zeros(2, 2, 1, P, 6), None)]}),
        ("one shape", {"angles": torch.zeros(P, 8)}),
        ("argument 2", {"pools": []}),
    ):
        ids, tabled, turns, pools = (right | changed).values()
        with pytest.raises(ValueError, match=why):
            step(ids, tabled, turns, turns, pools)
