"""Multiple choice: finds the letter that a text chooses."""

import re

from actors.rewards.mathematics.reading import NOT_WORDS, SPACE

CHOICE = re.compile(r"(?:(?:option|choice|answer)\s*)?\(?\s*([A-J])\s*\)?", re.IGNORECASE)
ANOTHER = re.compile(r"\([A-J]\)|(?<![A-Za-z])[A-J](?:\)|[.:]\s)|(?:^|\s)(?:or|and)\s")
LABEL = re.compile(
    r"(?:(?:option|choice|answer)\s+)?(?:\(([A-Ja-j])\)|([A-J])(?:\)|[.:](?=\s)))\s*(.*)$", re.DOTALL | re.IGNORECASE
)


def choice_of(text: str) -> str | None:
    """The chosen letter: A, (A), A), A. because, (A) 5 cm. None when the text names none or several."""
    plain = SPACE.sub(" ", NOT_WORDS.sub("", text)).strip().rstrip(".,;:").strip()
    if found := CHOICE.fullmatch(plain):
        return found[1].upper() if found[1].isupper() or "(" in plain else None
    found = LABEL.match(plain)
    if found and not ANOTHER.search(found[3]):
        return (found[1] or found[2]).upper()
    return None
