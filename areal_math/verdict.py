r"""Whether a completion's final answer equals the row's mathematically.

In a worked row answer, the part after "####" (GSM8K) or in the last \boxed{} counts. No completion can raise an error
or take long: length, digits, exponents and nesting are limited before any computation. Plain numbers take microseconds.
"""

import re
from decimal import Decimal
from functools import lru_cache

from areal_math.comparison import equal
from areal_math.expressions import Unreadable
from areal_math.extraction import HASHES, Stated, final_answer, last_box
from areal_math.formulas import LONGEST
from areal_math.kinds import Answer, Ratio, Several, Words
from areal_math.notation import clean, squeezed
from areal_math.plain_numbers import read_number
from areal_math.reading import NOT_WORDS, SPACE, read, words
from areal_math.sentences import BOUNDED, CUT, DENIAL, value_in, values_in

LETTER = re.compile(r"\(?([A-J])\)?")
SHORT_WORD = re.compile(r"[A-Z][a-z]{1,2}|yes|no|odd|all|one|two|six|ten|max|min")  # words, not products of symbols
SPELT = re.compile(r"\$?\\(?:text\w*|mbox|mathrm)\s*\{\s*[A-Za-z]{2,}\s*\}\$?")  # letters in their order, no product
ANSWERING = re.compile(r"\b(?:is|are)\s+(?:an?\s+|the\s+)?(.+)$")
COPIED = 3  # characters: a shorter formula may occur in the prompt by chance
FORMULA = re.compile(r"[A-Za-z+*/^(\\]")
# multiple choice
CHOICE = re.compile(r"(?:(?:option|choice|answer)\s*)?\(?\s*([A-J])\s*\)?", re.IGNORECASE)
ANOTHER = re.compile(r"\([A-J]\)|(?<![A-Za-z])[A-J](?:\)|[.:]\s)|(?:^|\s)(?:or|and)\s")
LABEL = re.compile(
    r"(?:(?:option|choice|answer)\s+)?(?:\(([A-Ja-j])\)|([A-J])(?:\)|[.:](?=\s)))\s*(.*)$", re.DOTALL | re.IGNORECASE
)


def gold_part(answer: object) -> str:
    r"""The final answer of the row: after "####", or in the last \boxed{}, or the whole text."""
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
        raise ValueError(f"the answer of a row must be text or a number: it is a {type(answer).__name__}")
    text = str(answer)
    if HASHES in text:
        return text.rpartition(HASHES)[2].strip()
    if r"\boxed" in text and (box := last_box(text)) is not None:
        return box.strip()
    return text.strip()


def is_right(completion: str, gold: str, prompt: str = "") -> bool:
    """Whether the completion's final answer is `gold`. Raises ValueError when `gold` cannot be parsed."""
    expected = reference(gold)
    stated = final_answer(completion)
    if stated is None:
        return False
    if expected.number is not None and (number := read_number(stated.text)) is not None:
        return number == expected.number
    if len(stated.text) > 4 * LONGEST:
        return False
    try:
        return matches(expected, stated) and not copied(expected, stated, prompt)
    except (Unreadable, ArithmeticError, RecursionError):
        return False


class Reference:
    """The row's parsed answer, cached for the samples of its group."""

    def __init__(self, gold: str) -> None:
        self.text = squeezed(clean(gold))
        if not self.text or len(self.text) > LONGEST:
            raise ValueError(
                f"the answer of a row must be readable as mathematics, from 1 to {LONGEST} characters: {gold[:200]!r}"
            )
        self.number: Decimal | None = read_number(gold.lstrip("$"))
        self.answer: Answer = read(gold)
        is_word = isinstance(self.answer, Words) or SHORT_WORD.fullmatch(self.text) or SPELT.fullmatch(gold.strip())
        self.word = words(clean(gold)) if is_word else None
        letter = LETTER.fullmatch(words_only(gold))
        self.letter = letter[1] if letter else None


def words_only(text: str) -> str:
    return re.sub(r"\\text\s*|[{}$\s]|\\(?=\()|\\[,;! ]", "", clean(text))


@lru_cache(maxsize=64)
def reference(gold: str) -> Reference:
    return Reference(gold)


def matches(expected: Reference, stated: Stated) -> bool:
    if expected.letter is not None:
        return chosen(stated) == expected.letter
    if squeezed(clean(stated.text)) == expected.text:
        return True
    if expected.word or SPELT.fullmatch(stated.text.strip()):
        return (expected.word or words(expected.text)) in (words(clean(stated.text)), said_words(stated))
    return equal(expected.answer, given_answer(stated))


def given_answer(stated: Stated) -> Answer:
    """Parse the text; if it is only words, parse the clause before "because", or the one value of the sentence."""
    if BOUNDED.search(stated.text):
        raise Unreadable("a bound is no value")
    whole = read(stated.text)
    if not isinstance(whole, Words) and not stated.plain and DENIAL.search(stated.text):
        raise Unreadable("a value that the text denies")
    if not isinstance(whole, Words) or stated.plain:
        return whole
    clause = CUT.sub("", stated.text)
    if clause != stated.text and not isinstance(answer := read(clause), Words):
        return answer
    if value := value_in(stated.text):
        return read(value)
    several = values_in(stated.text)
    listed = read(several) if several else whole
    return listed if isinstance(listed, Several | Ratio) else whole


def said_words(stated: Stated) -> str:
    """The predicate of "... is an ellipse."."""
    found = None if stated.plain else ANSWERING.search(stated.text)
    return words(clean(found[1])) if found else ""


def chosen(stated: Stated) -> str | None:
    """The chosen letter of a multiple choice."""
    if not stated.plain and DENIAL.search(stated.text):
        return None
    letter = choice_of(clean(stated.text))
    if letter is None and not stated.plain:
        named = set(re.findall(r"\(([A-J])\)", stated.text)) or set(
            re.findall(r"\b(?:option|choice|is)\s+([A-J])\b", stated.text)
        )
        letter = named.pop() if len(named) == 1 else None
    return letter


def copied(expected: Reference, stated: Stated, prompt: str) -> bool:
    """Whether the answer copies a formula of the prompt instead of computing: it differs from the row's notation."""
    given = squeezed(clean(stated.text))
    if given == expected.text or len(given) < COPIED or not FORMULA.search(given) or not prompt:
        return False
    return given in squeezed(clean(prompt))


def choice_of(text: str) -> str | None:
    """The chosen letter: A, (A), A), A. because, (A) 5 cm. None when the text names none or several."""
    plain = SPACE.sub(" ", NOT_WORDS.sub("", text)).strip().rstrip(".,;:").strip()
    if found := CHOICE.fullmatch(plain):
        return found[1].upper() if found[1].isupper() or "(" in plain else None
    found = LABEL.match(plain)
    if found and not ANOTHER.search(found[3]):
        return (found[1] or found[2]).upper()
    return None
