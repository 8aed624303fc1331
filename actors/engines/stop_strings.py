"""Finds stop strings in the text of sampled tokens, one token after another."""

from collections.abc import Sequence
from typing import Any

from actors.engines.protocol import SamplingControls

MARGIN = 16  # tokens and characters around a stop string: the text of the first ones depends on those before them


class StopStrings:
    """The stop strings of one completion. A string may begin and end within a token, and special tokens are text."""

    def __init__(self, tokenizer: Any, controls: SamplingControls) -> None:
        """`tokenizer`: a fast one of transformers."""
        self._backend = tokenizer.backend_tokenizer
        self._stops, self._n_least = controls.stop, controls.min_new_tokens
        self._n_window = max(map(len, controls.stop)) + MARGIN
        self._first = self._n_read = 0  # tokens: the first one of the window, and those read
        self._text = ""  # of the window

    def end(self, ids: Sequence[int]) -> int | None:
        """Tokens up to the end of a stop string (after min_new_tokens), or None; `ids` extend those of before."""
        for n in range(self._n_read + 1, len(ids) + 1):
            before, self._n_read = self._text, n
            self._text = text = self._decode(ids)
            n_same = _n_same(before, text)
            if n > self._n_least and any(text.find(x, max(0, n_same - len(x) + 1)) >= 0 for x in self._stops):
                return n
            if len(text) > 2 * self._n_window and n - self._first > 2 * self._n_window:
                self._shorten(ids)
        return None

    def _decode(self, ids: Sequence[int]) -> str:
        """The text of the window. A further token may change its end: the bytes of a character come one by one."""
        return str(self._backend.decode(list(ids[self._first : self._n_read]), skip_special_tokens=False))

    def _shorten(self, ids: Sequence[int]) -> None:
        """Begin the window later, at a token from which on its text can still hold a whole stop string."""
        kept = self._first
        self._first = self._n_read - self._n_window
        text = self._decode(ids)
        if len(text) >= self._n_window:
            self._text = text
        else:
            self._first = kept


def _n_same(one: str, other: str) -> int:
    """Number of characters that both texts begin with."""
    if other.startswith(one):
        return len(one)
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def before_stop(text: str, stops: Sequence[str]) -> str:
    """The text up to the first stop string."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(found)] if found else text


def cannot_stop(tokenizer: Any) -> str:
    """Why stop strings cannot be found with this tokenizer; empty: they can."""
    if getattr(tokenizer, "backend_tokenizer", None) is not None:
        return ""
    return "stop strings need a fast tokenizer (a tokenizer.json): set stop token ids"
