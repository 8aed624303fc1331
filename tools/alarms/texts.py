"""Figures of sampled texts: how much of a text repeats itself, and which template it follows. Pure.

A text of a few words (a character model's, or one in a language without spaces) is compared by characters.
"""

import re
from collections.abc import Sequence

TAIL = 512  # units at the end of a text that are looked at: a loop lasts until the limit
LEAST_WORDS = 8  # of a text that is compared by words
WORDS_IN_GRAM, CHARACTERS_IN_GRAM = 4, 3
LEAST_GRAMS = 4
OPENING = 8  # words of a template
SHORT = 4  # a text of fewer words is its own template
_NUMBER = re.compile(r"\d+")


def repeated_share(text: str) -> float:
    """Share of the n-grams of the text's end that occurred in it before; 0 for a very short text."""
    words = text.split()
    if len(words) >= LEAST_WORDS:
        return _repeated(words[-TAIL:], WORDS_IN_GRAM)
    return _repeated("".join(words)[-TAIL:], CHARACTERS_IN_GRAM)


def _repeated(units: Sequence[str], n: int) -> float:
    grams = [tuple(units[i : i + n]) for i in range(len(units) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if len(grams) >= LEAST_GRAMS else 0.0


def template_of(prompt: str, completion: str) -> str:
    """The opening of a completion, with # for numbers and * for words of its prompt; a short one as it is."""
    words = completion.casefold().split()
    if len(words) < SHORT:
        return " ".join(words)
    given = set(prompt.casefold().split())
    return " ".join("*" if word in given else _NUMBER.sub("#", word) for word in words[:OPENING])
