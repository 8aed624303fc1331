"""What an exported folder says of its tokenizer and of the end of a generation."""

import json
from pathlib import Path

import pytest

from actors.learner.checkpoint.model_part import add_turn_end, keep_class
from tests.support.learner_setup import scratch_tokenizer

SETTINGS, GENERATION = "tokenizer_config.json", "generation_config.json"


@pytest.mark.parametrize(
    ("named", "kept"),
    [
        ("PreTrainedTokenizerFast", "PreTrainedTokenizerFast"),
        ("GPT2Tokenizer", "GPT2Tokenizer"),
        ("TokenizersBackend", "PreTrainedTokenizerFast"),
    ],
)
def test_an_export_names_the_tokenizer_class_of_its_source(tmp_path: Path, named: str, kept: str) -> None:
    tokenizer = scratch_tokenizer(tmp_path / "source")
    source = tmp_path / "source" / SETTINGS
    source.write_text(json.dumps(json.loads(source.read_text()) | {"tokenizer_class": named}))
    tokenizer.save_pretrained(tmp_path / "export")
    export = tmp_path / "export" / SETTINGS
    export.write_text(json.dumps(json.loads(export.read_text()) | {"tokenizer_class": "TokenizersBackend"}))
    keep_class(tmp_path / "export", tokenizer)
    assert json.loads(export.read_text())["tokenizer_class"] == kept


def test_an_export_stops_at_the_end_of_a_turn(tmp_path: Path) -> None:
    tokenizer = scratch_tokenizer(tmp_path)
    before = json.loads((tmp_path / GENERATION).read_text())
    add_turn_end(tmp_path, tokenizer)
    assert json.loads((tmp_path / GENERATION).read_text()) == before  # no template
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    tokenizer.chat_template = "{% for m in messages %}{{m['content']}}<|im_end|>{% endfor %}"
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for _ in range(2):
        add_turn_end(tmp_path, tokenizer)
        assert json.loads((tmp_path / GENERATION).read_text())["eos_token_id"] == [1, end]
