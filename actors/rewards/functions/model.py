"""Reward "model": a Hugging Face sequence classifier with one label, per sample, or per group (reward.group)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from actors.rewards.binding.values import chat_of
from areal_bus.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """[reward.model]."""

    path: str
    device: str = "cpu"
    max_tokens: int = 4096


class RewardModel:
    """A model and its tokenizer in this process."""

    def __init__(self, options: ModelOptions) -> None:
        """Raises ConfigError for a model without a head of one number, or none at all."""
        self.options = options
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(options.path)
            dtype = torch.float32 if options.device == "cpu" else "auto"
            model: Any = AutoModelForSequenceClassification.from_pretrained(options.path, dtype=dtype)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"missing or unreadable reward model, reward.model.path {options.path!r}: {error}"
            ) from error
        if model.config.num_labels != 1:
            raise ConfigError(
                f"unsuitable reward model {options.path!r}: its head has {model.config.num_labels} labels, and a "
                "reward is one number (num_labels = 1)"
            )
        self.tokenizer.truncation_side = "left"
        most = getattr(model.config, "max_position_embeddings", options.max_tokens)
        self.max_tokens = min(options.max_tokens, most, self.tokenizer.model_max_length)
        self._own_pad: int | None = model.config.get_text_config().pad_token_id
        self.model = model.to(options.device).eval()

    @torch.inference_mode()
    def scores(self, texts: Sequence[str]) -> list[float]:
        """One number a text. A longer text loses its beginning."""
        given = self.tokenizer(
            list(texts),
            truncation=True,
            max_length=self.max_tokens,
            add_special_tokens=self.tokenizer.chat_template is None,  # a template has its own
        )
        ids = [torch.tensor(one) for one in given["input_ids"]]
        config = self.model.config.get_text_config()
        config.pad_token_id = pad = self._pad_for(given["input_ids"])
        ids_BT = pad_sequence(ids, batch_first=True, padding_value=pad).to(self.options.device)
        mask_BT = pad_sequence([torch.ones_like(one) for one in ids], batch_first=True).to(self.options.device)
        logits_B1 = self.model(input_ids=ids_BT, attention_mask=mask_BT).logits
        return [float(value) for value in logits_B1[:, 0].float()]

    def _pad_for(self, ids: Sequence[Sequence[int]]) -> int:
        """The token of padding. A decoder's number is that of a text's last token that is no padding: without a token
        of the checkpoint's own it is one that these texts do not have, so that their last tokens count.
        """
        if self._own_pad is not None and self._own_pad >= 0:
            return self._own_pad
        held = {token for one in ids for token in one}
        return next(token for token in count() if token not in held)

    def text(self, prompt: str, completion: str, row: Mapping[str, Any]) -> str:
        """The conversation in the model's chat template; without a template prompt and completion as they are."""
        if self.tokenizer.chat_template is None:
            return prompt + completion
        asked = chat_of(row) or [{"role": "user", "content": str(row.get("question", prompt))}]
        messages = [*asked, {"role": "assistant", "content": completion}]
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False))


_model: RewardModel | None = None


def configure(options: ModelOptions) -> None:
    global _model
    if _model is None or _model.options != options:
        _model = RewardModel(options)


def loaded() -> RewardModel:
    if _model is None:
        raise RuntimeError('the reward "model" must be configured: it has no reward.model.path')
    return _model


def score(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """The model's number for one answer."""
    return group_score(prompt, [completion], row)[0]


def group_score(prompt: str, completions: Sequence[str], row: Mapping[str, Any]) -> list[float]:
    """The model's number for each answer to a prompt, in one batch."""
    model = loaded()
    return model.scores([model.text(prompt, completion, row) for completion in completions])
