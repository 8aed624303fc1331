"""Writes a small character-level model as a transformers folder without weights (random by seed). No torch."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from areal_bus.config.sections import ScratchConfig
from areal_bus.errors import ConfigError

FAMILIES = {  # ScratchConfig.family: what differs from Llama in config.json
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral"},
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"},
    "gemma3": {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"},
}
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
SCRATCH_FILE = "scratch.json"


def write_scratch_folder(folder: Path, scratch: ScratchConfig) -> None:
    """config.json, tokenizer files and SCRATCH_FILE. Raises ConfigError when the shape makes no model."""
    check_shape(scratch)
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = _vocabulary(scratch.characters)
    character_tokenizer(scratch).save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", _tokenizer_config(scratch))
    _write(folder / "generation_config.json", {"eos_token_id": vocabulary[EOS], "pad_token_id": vocabulary[PAD]})
    _write(folder / SCRATCH_FILE, scratch.model_dump())
    _write(folder / "config.json", _model_config(scratch, vocabulary))  # last: it makes the folder a model


def check_shape(scratch: ScratchConfig) -> None:
    """Raises ConfigError when the shape makes no model."""
    if scratch.hidden_size % (2 * scratch.heads):
        raise ConfigError(
            f"model.scratch.hidden_size must be an even multiple of model.scratch.heads: {scratch.hidden_size} is not "
            f"one of {scratch.heads}"
        )


def is_scratch_folder(folder: Path) -> bool:
    """Whether the folder is meant to have no weights."""
    return (folder / SCRATCH_FILE).is_file()


def _vocabulary(characters: str) -> dict[str, int]:
    tokens = [PAD, EOS, UNKNOWN, *dict.fromkeys(characters)]
    return {token: index for index, token in enumerate(tokens)}


def character_tokenizer(scratch: ScratchConfig) -> Tokenizer:
    """One token a character, UNKNOWN for those that are not in the vocabulary."""
    tokenizer = Tokenizer(WordLevel(_vocabulary(scratch.characters), unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = Split(pattern="", behavior="isolated")
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, EOS, UNKNOWN)])
    return tokenizer


def _tokenizer_config(scratch: ScratchConfig) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "unk_token": UNKNOWN,
        "model_max_length": scratch.max_positions,
        "clean_up_tokenization_spaces": False,
    }


def _model_config(scratch: ScratchConfig, vocabulary: dict[str, int]) -> dict[str, Any]:
    return {
        **FAMILIES[scratch.family],
        "vocab_size": len(vocabulary),
        "hidden_size": scratch.hidden_size,
        "intermediate_size": 4 * scratch.hidden_size,
        "num_hidden_layers": scratch.layers,
        "num_attention_heads": scratch.heads,
        "num_key_value_heads": scratch.heads,
        "head_dim": scratch.hidden_size // scratch.heads,
        "max_position_embeddings": scratch.max_positions,
        "rms_norm_eps": 1e-6,
        "rope_parameters": _rope_parameters(scratch.family),
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": vocabulary[EOS],
        "pad_token_id": vocabulary[PAD],
        "dtype": "float32",
    }


def _rope_parameters(family: str) -> dict[str, Any]:
    """Gemma 3 has one base for its windows and one for full attention."""
    default = {"rope_type": "default", "rope_theta": 10000.0}
    return {"sliding_attention": default, "full_attention": default} if family == "gemma3" else default


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
