"""The reward "model" against transformers' own classifier, on a tiny random model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from actors.rewards.functions import model
from actors.rewards.loading import load_group, load_reward, reward_options
from areal_bus.config.rewards import RewardConfig
from areal_bus.errors import ConfigError

ROW = {"question": "What is 1+1?", "answer": "2"}
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(model, "_model", None)
    return make(tmp_path / "model")


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """A token a byte, and one of the end, which begins and ends nothing."""
    vocabulary = {letter: i for i, letter in enumerate(["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    bytes_ = Tokenizer(models.BPE(vocabulary, []))
    bytes_.pre_tokenizer, bytes_.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytes_, eos_token="<end>", chat_template=template)


def make(folder: Path, *, n_labels: int = 1, template: str | None = TEMPLATE, pad: int | None = 0) -> Path:
    torch.manual_seed(1)
    tokenizer(template).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, num_labels=n_labels, pad_token_id=pad,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(folder)
    return folder


def options(folder: Path, **keys: object) -> dict[str, Any]:
    return reward_options(RewardConfig.model_validate({"function": "model", "model": {"path": str(folder), **keys}}))


def own(folder: Path, text: str, *, max_tokens: int = 64) -> float:
    """By transformers alone, one text without padding."""
    reader = AutoTokenizer.from_pretrained(folder, truncation_side="left")
    classifier = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    ids = reader(text, return_tensors="pt", truncation=True, max_length=max_tokens)
    with torch.no_grad():
        return float(classifier(**ids).logits[0, 0])


def test_a_reward_model_gives_transformers_own_number(folder: Path, tmp_path: Path) -> None:
    score = load_reward("model", tmp_path, options=options(folder))
    for completion in ("2", "It is 2.", "é"):
        text = f"<user>What is 1+1?<assistant>{completion}"
        assert abs(score("asked", completion, ROW) - own(folder, text)) < 1e-5


def test_a_batch_gives_the_numbers_of_its_samples_alone(folder: Path, tmp_path: Path) -> None:
    """Shorter ones are padded, which must not change them."""
    group = load_group("model", tmp_path, options=options(folder))
    texts = ["2", "It is two, of course: 1+1=2.", "", "no"]
    samples = [{"completion": text, "reward": 0.0, "correct": None} for text in texts]
    expected = [own(folder, f"<user>What is 1+1?<assistant>{text}") for text in texts]
    assert group("asked", samples, ROW) == pytest.approx(expected, abs=1e-5)
    assert len(set(expected)) == len(texts)


@pytest.mark.parametrize("pad", [None, 0, 7])
def test_a_text_that_ends_with_the_end_token_has_transformers_own_number(folder: Path, pad: int | None) -> None:
    """Templates end so, and many tokenizers have no token of padding: the end token is none."""
    made = make(folder.parent / "other", template=TEMPLATE + "<end>", pad=pad)
    classifier = model.RewardModel(model.ModelOptions(str(made)))
    texts = ["<user>What?<assistant>2<end>", "<user>What?<assistant>It is two, of course.<end>", "<end>"]
    expected = [own(made, text) for text in texts]
    assert classifier.scores(texts) == pytest.approx(expected, abs=1e-5)
    assert [classifier.scores([text])[0] for text in texts] == pytest.approx(expected, abs=1e-5)


def test_a_long_text_loses_its_beginning(folder: Path, tmp_path: Path) -> None:
    whole_model = load_reward("model", tmp_path, options=options(folder))
    assert abs(whole_model("asked", "b" * 300, ROW) - own(folder, "b" * 64)) < 1e-5  # its own limit
    score = load_reward("model", tmp_path, options=options(folder, max_tokens=16))
    completion = "a long way to 2"
    whole = own(folder, f"<user>What is 1+1?<assistant>{completion}")
    assert abs(score("asked", completion, ROW) - own(folder, completion.rjust(16, ">"))) < 1e-5
    assert abs(score("asked", completion, ROW) - whole) > 1e-4


def test_without_a_chat_template_the_texts_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "_model", None)
    plain = make(tmp_path / "plain", template=None)
    score = load_reward("model", tmp_path, options=options(plain))
    assert abs(score("asked: ", "2", ROW) - own(plain, "asked: 2")) < 1e-5


def test_a_model_that_is_missing_or_has_another_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="its head has 3 labels"):
        load_reward("model", tmp_path, options=options(make(tmp_path / "wrong", n_labels=3)))
    with pytest.raises(ConfigError, match="missing or unreadable reward model"):
        load_reward("model", tmp_path, options=options(tmp_path / "nothing"))
