"""The reward "format": 1 for a completion of the wanted form, else 0. It does not judge the answer."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from actors.rewards.protocol import Score

BOX = "\\boxed{"
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace opens and closes nothing
FENCE = "```"


@dataclass(frozen=True, slots=True)
class FormatOptions:
    """[reward.format]. `pattern`, a regular expression for the whole completion, replaces the template."""

    template: str = "think_answer"
    pattern: str = ""


def think_answer(text: str) -> bool:
    """<think>...</think> <answer>...</answer>, each tag once, both with content, and nothing else."""
    found = pieces(text, "<think>", "</think>", "<answer>", "</answer>")
    return found is not None and [bool(piece) for piece in found] == [False, True, False, True, False]


def think(text: str) -> bool:
    """Thoughts, one </think>, an answer. The opening <think> may be in the prompt."""
    found = pieces(text.removeprefix("<think>"), "</think>")
    return found is not None and all(found) and "<think>" not in "".join(found)


def boxed(text: str) -> bool:
    r"""The last \boxed{...} is complete and not empty."""
    _, found, rest = text.rpartition(BOX)
    depth = 1 if found else 0
    for brace in BRACE.finditer(rest):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return bool(rest[: brace.start()].strip())
    return False


def code(text: str) -> bool:
    """One complete ``` block that is not empty."""
    found = text.split(FENCE)
    return len(found) == 3 and bool(found[1].partition("\n")[2].strip())


TEMPLATES: dict[str, Callable[[str], bool]] = {
    "think_answer": think_answer,
    "think": think,
    "boxed": boxed,
    "code": code,
}
_options = FormatOptions()


def configure(options: FormatOptions) -> None:
    global _options
    _options = options


def score(prompt: str, completion: str, row: Mapping[str, Any]) -> Score:
    text = completion.strip()
    if _options.pattern:
        return Score(float(re.fullmatch(_options.pattern, text, re.DOTALL) is not None))
    return Score(float(TEMPLATES[_options.template](text)))


def pieces(text: str, *tags: str) -> list[str] | None:
    """The texts before, between and after the tags, stripped; None unless each tag occurs once and in this order."""
    if any(text.count(tag) != 1 for tag in tags):
        return None
    found = []
    for tag in tags:
        before, is_there, text = text.partition(tag)
        if not is_there:
            return None
        found.append(before.strip())
    return [*found, text.strip()]
