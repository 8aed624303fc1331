"""Writes the initial model of both sides of the end-to-end benches: a small random Llama and its tokenizer."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.e2e.setting import EOS, SEED, SHAPE, vocabulary
from benchmarks.harness.worker_main import serve


def write(folder: str) -> int:
    """A transformers folder; the number of parameters."""
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, bos_token_id=None, eos_token_id=EOS))
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    if not (Path(folder) / "tokenizer.json").is_file():
        raise RuntimeError(f"a model comes with its tokenizer: {folder} has none")
    return sum(parameter.numel() for parameter in model.parameters())


def tokenizer() -> Any:
    raw = Tokenizer(WordLevel(vocabulary(), unk_token="<pad>"))
    raw.pre_tokenizer = Split(pattern="", behavior="isolated")
    raw.decoder = Fuse()
    raw.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ("<pad>", "<eos>")])
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False)


if __name__ == "__main__":
    serve({"write": write})
