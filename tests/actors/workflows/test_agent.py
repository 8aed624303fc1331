"""The bytes of single tokens, of both kinds of vocabularies with bytes."""

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from actors.workflows.agent import byte_letters, token_bytes

TEXT = "a€b 🙂 ü"


def byte_level() -> Any:
    vocabulary = {letter: n for n, letter in enumerate(byte_letters())}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def byte_fallback() -> Any:
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), "a", "b", " ", "<unk>"]
    backend = Tokenizer(
        models.BPE(vocab={piece: n for n, piece in enumerate(pieces)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_the_bytes_of_the_tokens_of_a_text_are_its_bytes(make: Any) -> None:
    tokenizer = make()
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert len(ids) > len(TEXT)  # characters are split
    assert b"".join(token_bytes(tokenizer, token) for token in ids) == TEXT.encode()


def test_letters_stand_for_all_bytes() -> None:
    assert sorted(byte_letters().values()) == list(range(256))
    assert set(byte_letters()) == set(pre_tokenizers.ByteLevel.alphabet())
