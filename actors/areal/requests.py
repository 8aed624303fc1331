"""What an AReaL workflow exchanges with its engine: requests, responses and generation settings."""

import copy
import uuid
from dataclasses import dataclass, field, fields, replace
from typing import Any


@dataclass
class GenerationHyperparameters:
    """Generation settings with AReaL's names."""

    n_samples: int = 1
    max_new_tokens: int = 16384
    min_new_tokens: int = 0
    max_tokens: int | None = None
    greedy: bool = False
    top_p: float = 1.0
    top_k: int = 0
    temperature: float = 1.0
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stop: list[str] | None = None
    frequency_penalty: float = 0.0

    def new(self, **changed: Any) -> "GenerationHyperparameters":
        """A copy with changes."""
        return replace(copy.deepcopy(self), **changed)

    def new_with_stop_and_pad_token_ids(self, tokenizer: Any) -> "GenerationHyperparameters":
        """A copy whose stop tokens include end-of-text and padding."""
        special = [one for one in (tokenizer.pad_token_id, tokenizer.eos_token_id) if one is not None]
        return self.new(stop_token_ids=list(dict.fromkeys([*self.stop_token_ids, *special])))


@dataclass
class ModelRequest:
    """A prompt of token ids to complete."""

    rid: str = field(default_factory=lambda: uuid.uuid4().hex)
    input_ids: list[int] = field(default_factory=list)
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    metadata: dict[str, Any] = field(default_factory=dict)
    tokenizer: Any = None
    image_data: list[str] | None = None
    processor: Any = None

    def copy(self) -> "ModelRequest":
        return ModelRequest(**{one.name: copy.copy(getattr(self, one.name)) for one in fields(self)})


@dataclass
class ModelResponse:
    """A completion: its tokens, with log-prob and version of each."""

    input_tokens: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    output_versions: list[int] = field(default_factory=list)
    stop_reason: str = "stop"  # or "length"
    tokenizer: Any = None

    @property
    def input_len(self) -> int:
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        return len(self.output_tokens)

    @property
    def end_with_stop(self) -> bool:
        """The last token is end-of-text or padding."""
        return bool(self.output_tokens) and self.output_tokens[-1] in self._stops

    @property
    def output_tokens_without_stop(self) -> list[int]:
        """The tokens before the end-of-text and padding tokens at the end."""
        n = len(self.output_tokens)
        while n and self.output_tokens[n - 1] in self._stops:
            n -= 1
        return self.output_tokens[:n]

    @property
    def _stops(self) -> set[int]:
        return {self.tokenizer.eos_token_id, self.tokenizer.pad_token_id} - {None}
