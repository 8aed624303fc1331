"""GGUF files of both families become models that compute what transformers' own do."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter, TokenType
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from actors.models.download import bring, find_smollm2
from actors.models.gguf_model import FAMILIES, convert, is_whole
from actors.models.loading import load_model, load_tokenizer, stop_ids
from areal_bus.errors import ConfigError

CONTROL = ["<pad>", "<eos>", "<bos>", "<unk>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "a", "b", "c", "ab", "abc", "▁a", "▁ab"]
SHAPE: dict[str, Any] = {"vocab_size": 268, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 7}
HEADS: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
WINDOW = 5


def tiny(family: str) -> Any:
    """Random weights, norms too: a fresh norm is 0 or 1 everywhere, which would hide its offset."""
    torch.manual_seed(3)
    if family == "gemma3":
        more: dict[str, Any] = {"query_pre_attn_scalar": 8, "sliding_window": WINDOW, "rms_norm_eps": 1e-6}
        model: Any = Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, **HEADS, **more, tie_word_embeddings=True))
    else:
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, **HEADS, rms_norm_eps=1e-6, tie_word_embeddings=True))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def write_gguf(path: Path, family: str, model: Any, *, scale: float | None = None) -> None:
    """The file as llama.cpp's converter writes it: Gemma's norms + 1, Llama's rotary pairs side by side."""
    writer, shape = GGUFWriter(path, family), model.config
    writer.add_context_length(64)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_hidden_layers)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_attention_heads)
    writer.add_head_count_kv(shape.num_key_value_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.rms_norm_eps)
    writer.add_rope_freq_base(1e6 if family == "gemma3" else 1e4)
    writer.add_sliding_window(WINDOW)
    if scale is not None:
        writer.add_rope_scaling_factor(scale)
    write_tokenizer(writer)
    names = {new: old for old, new in FAMILIES[family].parts.items()}
    for name, parameter in model.named_parameters():
        writer.add_tensor(*exported(name, parameter.detach().numpy(), family, names, shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_tokenizer(writer: GGUFWriter) -> None:
    tokens = [*CONTROL, *BYTES, *WORDS]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(i) for i in range(len(tokens))])
    kinds = [TokenType.CONTROL] * len(CONTROL) + [TokenType.BYTE] * len(BYTES) + [TokenType.NORMAL] * len(WORDS)
    writer.add_token_types(kinds)
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)


def exported(
    name: str, weight: np.ndarray[Any, Any], family: str, names: dict[str, str], shape: Any
) -> tuple[str, np.ndarray[Any, Any]]:
    if family == "gemma3" and "norm" in name:
        weight = weight + 1
    if family == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = shape.num_attention_heads if "q_proj" in name else shape.num_key_value_heads
        halves = weight.reshape(heads, 2, -1, weight.shape[1])
        weight = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)
    if name in ("model.embed_tokens.weight", "model.norm.weight"):
        return ("token_embd.weight" if "embed" in name else "output_norm.weight"), weight
    layer, _, part = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{names[part.removesuffix('.weight')]}.weight", weight


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_converted_model_computes_what_the_original_does(family: str, tmp_path: Path) -> None:
    original = tiny(family)
    write_gguf(tmp_path / "model.gguf", family, original)
    folder = tmp_path / "converted"
    assert convert(folder, tmp_path / "model.gguf")
    assert is_whole(folder)
    assert not convert(folder, tmp_path / "model.gguf")
    model, tokenizer = load_model(str(folder), "float32", "cpu").eval(), load_tokenizer(str(folder))
    assert type(model) is type(original)
    ids = torch.randint(4, 268, (2, 4 * WINDOW))  # longer than the window
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, original(ids).logits, atol=1e-5, rtol=1e-5)
    assert tokenizer.decode(tokenizer("abc ab")["input_ids"], skip_special_tokens=True) == "abc ab"
    assert stop_ids(model, tokenizer) == {1}


def test_a_gguf_that_would_convert_wrongly_is_refused(tmp_path: Path) -> None:
    scaled, other, folder = tmp_path / "scaled.gguf", tmp_path / "other.gguf", tmp_path / "folder"
    write_gguf(scaled, "gemma3", tiny("gemma3"), scale=8.0)
    with pytest.raises(ConfigError, match="unsupported RoPE scaling"):
        convert(folder, scaled)
    other.write_bytes(scaled.read_bytes().replace(b"gemma3", b"gemma9"))
    with pytest.raises(ConfigError, match="unsupported architecture 'gemma9'"):
        convert(folder, other)
    write_gguf(other, "gemma3", tiny("gemma3"))
    other.write_bytes(other.read_bytes().replace(b"blk.0.attn_q_norm", b"blk.0.attn_q_bias"))
    with pytest.raises(ConfigError, match=r"unknown tensor 'blk\.0\.attn_q_bias\.weight'"):
        convert(folder, other)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.gguf", "scaled.gguf"]


def test_a_folder_that_is_no_whole_model_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "kept.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match="remove it"):
        convert(tmp_path, tmp_path / "none.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]


@pytest.mark.slow
def test_smollm2_converts_once_and_answers(tmp_path: Path) -> None:
    folder = tmp_path / "SmolLM2"
    assert find_smollm2().is_file()
    assert bring("smollm2-135m-instruct", folder)
    assert is_whole(folder)
    assert not bring("smollm2-135m-instruct", folder)
    assert [path.name for path in tmp_path.iterdir()] == ["SmolLM2"]
    model, tokenizer = load_model(str(folder), "float32", "cpu"), load_tokenizer(str(folder))
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(out)
    assert stop_ids(model, tokenizer) == {tokenizer.convert_tokens_to_ids("<|im_end|>")}
