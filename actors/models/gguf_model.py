"""Converts a GGUF file of a Llama or Gemma 3 model into a folder that transformers loads: float32 safetensors."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from areal_bus.errors import ConfigError

LLAMA_PARTS = {  # name in a GGUF block -> name in a transformers layer
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA3_PARTS = LLAMA_PARTS | {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ENDS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
WINDOWS_A_FULL, LOCAL_THETA = 6, 1e4  # of Gemma 3: each sixth layer attends to all; RoPE's base in the others


def check_new(folder: Path) -> None:
    """Raises ConfigError for a folder that exists."""
    if folder.exists():
        raise ConfigError(f"the model is written to a new folder: {folder} exists and is no whole model; remove it")


def convert(folder: Path, source: Path) -> bool:
    """Make the model folder, whole or not at all; False when it is there. ConfigError: another folder or family."""
    if is_whole(folder):
        return False
    check_new(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _write_model(made, source)
        made.chmod(0o755)
        os.rename(made, folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return True


def is_whole(folder: Path) -> bool:
    names = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    return all((folder / name).is_file() for name in names)


def _write_model(folder: Path, source: Path) -> None:
    from gguf import GGUFReader  # an extra of its own: only this module needs it
    from transformers import AutoTokenizer  # takes seconds: not for a folder that is there

    reader = GGUFReader(source)
    name = _field(reader, "general.architecture")
    if name not in FAMILIES:
        raise ConfigError(f"unsupported architecture {name!r} of {source}: the converter reads {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    config = _shape(reader, name) | family.config(reader)
    save_file(read_tensors(reader, family, config), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name, local_files_only=True)
    if "tokenizer.chat_template" in reader.fields:
        tokenizer.chat_template = _field(reader, "tokenizer.chat_template")
    tokenizer.save_pretrained(folder)
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n", encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Family:
    """How tensors and settings of one GGUF architecture become those of transformers."""

    parts: Mapping[str, str]
    weight: Callable[[str, np.ndarray[Any, Any], dict[str, Any]], np.ndarray[Any, Any]]  # of a block or an end
    config: Callable[[Any], dict[str, Any]]  # what _shape lacks


def read_tensors(reader: Any, family: Family, config: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """All weights as float32 under their transformers names; the head is tied to the embedding and absent."""
    from gguf import dequantize

    tensors = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        tensors[rename(tensor.name, family.parts)] = np.ascontiguousarray(family.weight(tensor.name, weight, config))
    return tensors


def rename(name: str, parts: Mapping[str, str]) -> str:
    """A tensor's transformers name. Raises ConfigError for one that the family does not have."""
    if name in ENDS:
        return ENDS[name]
    fields = name.split(".")  # "blk.7.attn_q.weight"
    if len(fields) != 4 or fields[0] != "blk" or fields[2] not in parts:
        raise ConfigError(f"unknown tensor {name!r}: the converter reads the tied models of {', '.join(FAMILIES)}")
    return f"model.layers.{fields[1]}.{parts[fields[2]]}.{fields[3]}"


def _llama_weight(name: str, weight: np.ndarray[Any, Any], config: dict[str, Any]) -> np.ndarray[Any, Any]:
    if ".attn_q." in name:
        return unpermute(weight, config["num_attention_heads"])
    return unpermute(weight, config["num_key_value_heads"]) if ".attn_k." in name else weight


def unpermute(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of Q or K from llama.cpp's order (rotary pairs side by side) to transformers' (halves of a head)."""
    half = weight.shape[0] // heads // 2
    pairs = weight.reshape(heads, half, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _gemma3_weight(name: str, weight: np.ndarray[Any, Any], config: dict[str, Any]) -> np.ndarray[Any, Any]:
    """A norm multiplies by 1 + weight in transformers and by weight in llama.cpp."""
    return weight - np.float32(1) if name.endswith("norm.weight") else weight


def _llama_config(reader: Any) -> dict[str, Any]:
    theta = _field(reader, "llama.rope.freq_base")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
    }


def _gemma3_config(reader: Any) -> dict[str, Any]:
    """Gemma 3 (arXiv 2503.19786) without vision and without scaled RoPE: 270M and 1B."""
    if "gemma3.rope.scaling.factor" in reader.fields:
        raise ConfigError("unsupported RoPE scaling: of Gemma 3 the converter reads 270M and 1B, which have no scaling")
    n_layers, head = (_field(reader, f"gemma3.{name}") for name in ("block_count", "attention.key_length"))
    kinds = ["full_attention" if (i + 1) % WINDOWS_A_FULL == 0 else "sliding_attention" for i in range(n_layers)]
    bases = {"sliding_attention": LOCAL_THETA, "full_attention": _field(reader, "gemma3.rope.freq_base")}
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "head_dim": head,
        "query_pre_attn_scalar": head,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": _field(reader, "gemma3.attention.sliding_window"),
        "layer_types": kinds,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()},
    }


FAMILIES = {
    "llama": Family(LLAMA_PARTS, _llama_weight, _llama_config),
    "gemma3": Family(GEMMA3_PARTS, _gemma3_weight, _gemma3_config),
}


def _shape(reader: Any, family: str) -> dict[str, Any]:
    def shape(name: str) -> Any:
        return _field(reader, f"{family}.{name}")

    return {
        "vocab_size": len(reader.fields["tokenizer.ggml.tokens"].data),
        "hidden_size": shape("embedding_length"),
        "intermediate_size": shape("feed_forward_length"),
        "num_hidden_layers": shape("block_count"),
        "num_attention_heads": shape("attention.head_count"),
        "num_key_value_heads": shape("attention.head_count_kv"),
        "max_position_embeddings": shape("context_length"),
        "rms_norm_eps": shape("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": True,
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
    }


def _field(reader: Any, name: str) -> Any:
    return reader.fields[name].contents()
