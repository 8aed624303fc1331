r"""Reward "math": 1 when the completion's final answer equals the row's, as mathematics, else 0.

The row's answer may be worked out: what counts of it follows "####" (GSM8K) or stands in its last \boxed{}. Plain
numbers in a clear place are compared here, in microseconds; everything else goes to math-verify, whose verdict the
short cut must share. math-verify runs without its own time limits, which are signals and do not stop what it hangs
in: the deadline of the worker process does (10^{10^{10}} is a timeout).
"""

import logging
import re
from collections.abc import Mapping
from decimal import Decimal
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

from actors.rewards.plain_numbers import DIGITS, read_number
from actors.rewards.protocol import Score

# math-verify warns once that nothing limits its time: here the worker's deadline does.
logging.getLogger("math_verify").setLevel(logging.ERROR)

MARK = "####"
LONGEST = 15  # digits the short cut judges: math-verify compares floats
CLOSE = Decimal("0.01")  # numbers that differ by less are math-verify's to judge (it rounds)

NUMBER = rf"-?(?![0-9]{{{LONGEST + 1}}}|0[0-9]){DIGITS}"
# What the short cut reads, each anchored at the end of the text so that nothing can follow it:
# a number alone; a number after a word or "=", with only words after it; a number in the only \boxed{}.
ALONE = re.compile(rf"\s*\$?({NUMBER})\.?\s*")
AFTER_WORDS = re.compile(rf"(?:[A-Za-z][,:]?|=)\s+\$?({NUMBER})(?:[.!,]?(?:\s+[A-Za-z][A-Za-z.,!']*)*\s*)$")
WINDOW = 80  # characters before the last digit in which a number and what it follows begin
BOXED = re.compile(rf"(?:^|[\s:]|[\s:]\$)\\boxed\{{\s*({NUMBER})\s*\}}(?:\.|\$\.?)?\s*$")


def score(prompt: str, completion: str, row: Mapping[str, Any]) -> Score:
    """1.0 or 0.0, and `correct` the same. Raises ValueError when the row's own answer is no mathematics."""
    right = is_right(final_part(completion), gold_part(row["answer"]))
    return Score(float(right), correct=right)


def final_part(completion: str) -> str:
    """What of a completion is judged: all, or what follows its last "####"."""
    return completion.rpartition(MARK)[2]


def gold_part(answer: str) -> str:
    r"""The final answer of a worked one: after "####", or the content of the last \boxed{}, or all of it."""
    if MARK in answer:
        return answer.rpartition(MARK)[2].strip()
    _, box, content = answer.rpartition(r"\boxed{")
    return (content[: closing_brace(content)] if box else answer).strip()


def closing_brace(content: str) -> int:
    """Where the brace closes that was open before `content`; its length when none does."""
    depth = 1
    for i, character in enumerate(content):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return i
    return len(content)


def is_right(text: str, gold: str) -> bool:
    expected, given = read_number(gold.lstrip("$")), short_cut(text)
    if expected is not None and given is not None:
        if expected == given:
            return True
        if abs(expected - given) >= CLOSE:
            return False
    return library_says_right(text, gold)


def short_cut(text: str) -> Decimal | None:
    """The plain number that math-verify, too, would take for the answer in `text`; None when that is not certain."""
    found = ALONE.fullmatch(text)
    if not found:
        n_boxes = text.count(r"\boxed")
        if n_boxes == 1 and "hope" not in text:
            found = BOXED.search(text, max(text.index(r"\boxed") - 2, 0))
        elif not n_boxes and "\\" not in text:
            found = _after_words(text)
    return read_number(found[1]) if found else None


def _after_words(text: str) -> re.Match[str] | None:
    """A number after which only words come, unless something else in the text would be preferred or change it."""
    last = max(map(text.rfind, "0123456789"))
    found = AFTER_WORDS.search(text, max(last - WINDOW, 0)) if last >= 0 else None
    if found:
        folded = text.casefold()  # it prefers what follows the word "answer", and reads "percent" as a factor
        if "answer" in folded or "percent" in folded or "pct" in folded:
            return None
    return found


def library_says_right(text: str, gold: str) -> bool:
    """math-verify's verdict, without time limit."""
    answer = parse(text, parsing_timeout=None, raise_on_error=True)
    return bool(verify(_reference(gold), answer, timeout_seconds=None, raise_on_error=True))


@lru_cache(maxsize=64)  # the samples of a group are judged by one answer
def _reference(gold: str) -> Any:
    """The row's answer as math-verify reads it."""
    number = read_number(gold.lstrip("$"))
    reference = parse(
        str(number) if number is not None else rf"\boxed{{{gold}}}", parsing_timeout=None, raise_on_error=True
    )
    if not reference:
        raise ValueError(f"the answer of a row must be readable as mathematics: {gold[:200]!r}")
    return reference


library_says_right(r"\boxed{1}", "1")  # compiles its patterns now, so that no score pays for it
