"""Finds stop strings in the text of sampled tokens, one token after another."""

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from actors.engines.protocol import SamplingControls


class StopStrings:
    """The stop strings of one completion. A string may begin and end within a token, and special tokens are text."""

    def __init__(self, tokenizer: Any, controls: SamplingControls) -> None:
        """`tokenizer`: a fast one of transformers."""
        self._backend = tokenizer.backend_tokenizer
        self._stops, self._n_least = controls.stop, controls.min_new_tokens
        self._n_kept = max(map(len, controls.stop)) - 1  # characters that may begin a stop string
        self._stream = DecodeStream(skip_special_tokens=False)
        self._tail = ""  # last characters of the text
        self._n_read = 0  # tokens

    def end(self, ids: Sequence[int]) -> int | None:
        """Number of tokens up to the one that completes a stop string, its own included; None without one.

        `ids`: the completion so far; it must begin with those of the call before. A string that is complete within the
        first min_new_tokens tokens does not count.
        """
        for token in ids[self._n_read :]:
            self._n_read += 1
            text = self._tail + (self._stream.step(self._backend, token) or "")
            n_before = len(self._tail)
            self._tail = text[-self._n_kept :] if self._n_kept else ""
            if self._n_read > self._n_least and any(_ends_after(text, stop, n_before) for stop in self._stops):
                return self._n_read
        return None


def _ends_after(text: str, stop: str, n: int) -> bool:
    """Whether the text holds the string with its end after the first n characters."""
    return text.find(stop, max(0, n - len(stop) + 1)) >= 0


def before_stop(text: str, stops: Sequence[str]) -> str:
    """The text up to the first stop string."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(found)] if found else text


def cannot_stop(tokenizer: Any) -> str:
    """Why stop strings cannot be found with this tokenizer; empty: they can."""
    if getattr(tokenizer, "backend_tokenizer", None) is not None:
        return ""
    return "stop strings need a fast tokenizer (a tokenizer.json): set stop token ids"
