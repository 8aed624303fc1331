r"""Extracts the final answer from a completion, in time linear in its length.

Tries in this order, each time the last occurrence: an <answer> tag, \boxed{}, the line after "####", the text after
"answer is" or "answer:", the last sentence. Ignores <think> blocks, questions and instructions.
"""

import re
from dataclasses import dataclass

from areal_math.notation import closing_brace

THOUGHT = re.compile(r"<(/?)(?:think|thinking|thought|thoughts|reasoning|reflection|scratchpad)>", re.IGNORECASE)
TAG = re.compile(r"<(/?)(?:answer|final_answer)>", re.IGNORECASE)
BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
BARE_BOX = re.compile(r"[^\s${}\\.,;]+")
BETWEEN = r"(?:[\s$~]|\\[,;:! ]|\\q?quad(?![A-Za-z]))*"
JOINED_BOXES = re.compile(
    BETWEEN
    + r"(?:,|;|\band\b|\bor\b|\\text\s*\{\s*(?:and|or)\s*\}|,\s*(?:and|or)\b)"
    + BETWEEN
    + r"(?:[A-Za-z]\s*=\s*)?[\s$]*"
)
HASHES = "####"
VALUE = re.compile(r"[\d$\\]")
SAYS = re.compile(
    r"\b(?:answer|correct\s+(?:option|choice))\b(?:\s+(?:to|of|for|in|as)\b[^.\n:=?]{0,80}?)?[\s*_]*"
    r"(?:(?:\bis\b|\bare\b|\bwould be\b|\bwill be\b|\bshould be\b|\bmust be\b|[=:→])[\s*_]*:?[*_]*|(?=\n))",
    re.IGNORECASE,
)
WRONG = r"(?:clearly\s+|obviously\s+|definitely\s+)?(?:wrong|incorrect|false|impossible|invalid)\b"
INTERJECTION = r"(?:(?:but|wait|no|oh|hmm+|oops|sorry|actually|hold\s+on|my\s+mistake)\b[\s,.:;!…—–-]*)"
SPACED = r"(?:[\s$*_—–-]|\\[,;:! ]|\\q?quad(?![A-Za-z])|\\(?:text|mbox|mathrm)(?:bf|it|rm)?\s*\{)*"
REJECTED_AFTER = re.compile(  # "\boxed{5} is wrong", "<answer>5</answer> fails", "$\boxed{5}$. This is not the answer."
    r"(?:[\s$*_)\]}]|\\\)|\\\]|</(?:answer|final_answer)>)*[.,;:!?]{0,3}"
    + SPACED
    + rf"(?:\((?=(?:[\w'’]+\s+){{0,3}}{WRONG}\s*[.!]?\)))?"
    + INTERJECTION
    + r"{0,3}"
    r"(?:i\s+(?:\w+\s+)?made\s+an?\s+(?:\w+\s+)?(?:mistake|error)\b"
    r"|(?:(?:but\s+)?(?:this|that|which|it)['’]?s?\s+)?"
    r"(?:(?:(?:is|was|are|would be|seems?)\s+)?" + WRONG + r"|(?:is|was|are)(?:\s+not|n['’]t)\s+(?:the\s+|a\s+)?"
    r"(?:correct|right|answer|solution|valid|possible)\b|fails?\b|can(?:not|['’]t)\s+be\s+(?:the\s+|an?\s+)?(?:correct|right|answer|solution|true)\b|does(?:\s+not|n['’]t)\s+work\b))",
    re.IGNORECASE,
)
REJECTED_BEFORE = re.compile(  # "The answer is not \boxed{5}", "It is wrong to say \boxed{5}"
    r"(?:\bnot|n['’]t|\bnever|\b(?:wrong|incorrect|false)\s+to\s+(?:say|answer|claim|write|conclude))"
    r"(?:\s+(?:be|equal(?:\s+to)?|simply|just))?[\s$*_}]*(?:\\\(|\\\[)?\s*$|(?:\\neq?|≠|=\s*[-−])\s*$",
    re.IGNORECASE,
)
OPERATED_BOX = re.compile(r"\s*(?:\^\s*\{?\s*[-\d]|\\(?:sqrt|cdot|times|div|frac)(?![A-Za-z]))")  # no whole answer
BLANK = " $~\t\r\n"
AROUND = 80  # characters next to an answer that may reject it
TAGGED = re.compile(r"<[A-Za-z/|]")
CALCULATOR = re.compile(r"<<[^<>\n]*>>")
FENCE = re.compile(r"^\s*(?:```|~~~)[A-Za-z]*\s*$")
END_TOKEN = re.compile(r"(?:<\|[a-z_]{1,20}\|>|</s>|<eos>|<end_of_turn>)\Z")
LONGEST_END_TOKEN = 24  # characters
TAIL = 4000  # characters at the end that are searched for the last sentence
DISPLAY_START = re.compile(r"\s*(?:\$\$|\\\[)")
DISPLAY_END = re.compile(r"(?:\$\$|\\\])\s*[.,]?\s*$")
SENTENCE_END = re.compile(r"(?<=[.!?])[\"')*]*\s+(?=[A-Z\\$(\[*\"])|\n\s*\n|\n")
ASKS = re.compile(
    r"[\s*_#>\-\d.()]*(?:what|how|which|who|whom|where|why|when|find|compute|calculate|evaluate|determine|simplify|express|"
    r"solve|give|write|enter|let|if|suppose|assume|given|consider|prove|show|note|round|factor|expand|convert|list|name|"
    r"state|use|add|subtract|multiply|divide|estimate|rationalize|order|count|is|are|do|does|did|can|could|will|would|"
    r"for what|in how|at what|on what|to what|by what|of what|with what|for how|in what|from what|please|here)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Stated:
    """An extracted answer. `plain`: the whole text is the answer, as in a box; else it may be a sentence."""

    text: str
    plain: bool = False


def final_answer(completion: str) -> Stated | None:
    """The final answer of the completion, or None."""
    text = completion
    if TAGGED.search(completion):
        if (after := without_thoughts(completion)) is None:
            return None
        text = in_tag(without_end_tokens(after))
        if is_rejected(completion):
            return None
    if "\\boxed" in text or "\\fbox" in text:
        box = None if is_box_rejected(text) else last_box(text)
        return None if box is None else Stated(box, plain=True)
    if (marked := after_hashes(text)) is not None:
        return Stated(marked, plain=True)
    if (said := after_phrase(text)) is not None:
        return Stated(said)
    sentence = last_sentence(text)
    return None if sentence is None else Stated(sentence)


def without_thoughts(text: str) -> str | None:
    """The text after the last <think> block; None when a block is not closed."""
    thoughts = list(THOUGHT.finditer(text))
    if not thoughts:
        return text
    return text[thoughts[-1].end() :] if thoughts[-1][1] else None


def without_end_tokens(text: str) -> str:
    """The text without the end tokens at its end, in time linear in the text."""
    kept = end = len(text)
    while True:
        while end and text[end - 1].isspace():
            end -= 1
        begin = max(0, end - LONGEST_END_TOKEN)
        found = END_TOKEN.search(text[begin:end])
        if found is None:
            return text[:kept]
        kept = end = begin + found.start()


def in_tag(text: str) -> str:
    """The content of the last <answer> tag, closed or not; without a tag, the text itself."""
    tags = list(TAG.finditer(text))
    opened = next((tag for tag in reversed(tags) if not tag[1]), None)
    if opened is None:
        return text
    closed = next((tag for tag in tags if tag[1] and tag.start() >= opened.end()), None)
    return text[opened.end() : closed.start() if closed else len(text)]


def is_rejected(completion: str) -> bool:
    """Whether the words after the last closing answer tag reject the answer."""
    closed = [tag for tag in TAG.finditer(completion) if tag[1]]
    return bool(closed) and REJECTED_AFTER.match(completion[closed[-1].end() :][:AROUND]) is not None


def is_box_rejected(text: str) -> bool:
    """Whether the words next to the last box reject it, or it is a part of a formula."""
    boxes = boxes_of(text)
    if not boxes:
        return False
    begin, end, _ = boxes[-1]
    after, before = text[end : end + AROUND], text[max(0, begin - AROUND) : begin]
    return any((REJECTED_AFTER.match(after), OPERATED_BOX.match(after), REJECTED_BEFORE.search(before)))


def last_box(text: str) -> str | None:
    r"""The content of the last \boxed{}, or of all boxes that "and", "or" or a comma joins to it.

    None when the last box is cut off or empty.
    """
    boxes = boxes_of(text)
    if not boxes or not boxes[-1][2].strip(BLANK):
        return None
    joined = [boxes[-1][2]]
    for (_, end, content), (start, _, _) in zip(boxes[-2::-1], boxes[:0:-1], strict=False):
        if not JOINED_BOXES.fullmatch(text, end, start):
            break
        joined.append(content)
    return ", ".join(reversed(joined))


def boxes_of(text: str) -> list[tuple[int, int, str]] | None:
    """Start, end and content of the outermost boxes; None when the last one is cut off."""
    boxes, at = [], 0
    while found := BOX.search(text, at):
        start, at = found.span()
        if at < len(text) and text[at] == "{":
            end = closing_brace(text, at + 1)
            if end is None:
                return None
            boxes.append((start, end + 1, text[at + 1 : end]))
            at = end + 1
        elif bare := BARE_BOX.match(text, at):
            boxes.append((start, bare.end(), bare[0]))
            at = bare.end()
    return boxes


def after_hashes(text: str) -> str | None:
    """The rest of the line after the last "####", if it is a value or ends the text (also "", an empty answer);
    headings are ignored.
    """
    _, mark, rest = text.rpartition(HASHES)
    if not mark:
        return None
    if not rest.strip():
        return ""
    line, _, below = rest.strip(" \t").partition("\n")
    line = line.strip().strip("#").strip()
    is_answer = line and (VALUE.search(line) or not below.strip()) and not SAYS.search(line + "\n")
    return line if is_answer and not REJECTED_AFTER.match(below[:AROUND]) else None


def after_phrase(text: str) -> str | None:
    """The clause after the last "answer is" or "answer:"."""
    if not ("nswer" in text or "orrect" in text or "NSWER" in text):
        return None
    said = list(SAYS.finditer(text))
    if not said:
        return None
    rest = CALCULATOR.sub("", text[said[-1].end() :]).lstrip(" \t\r\n*_")
    if display := display_math(rest):
        return display
    clause, *more = re.split(r"\n|(?<=[.;?!])\s+(?=[A-Z\\$(\[*\"])", rest, maxsplit=1)
    if clause.rstrip().endswith("?") or (more and REJECTED_AFTER.match(more[0][:AROUND])):
        return None
    if FENCE.match(clause) and more:
        return more[0].partition("\n")[0].strip()
    return clause.strip()


def display_math(text: str) -> str | None:
    """The displayed formula at the start of `text`, on one or more lines."""
    if not (found := DISPLAY_START.match(text)):
        return None
    closing = "$$" if found[0].endswith("$$") else "\\]"
    end = text.find(closing, found.end())
    return text[found.end() : end].strip() if end >= 0 else None


def last_sentence(text: str) -> str | None:
    """The last sentence, or the displayed formula at the end; None for a question or an instruction."""
    tail = CALCULATOR.sub("", text[-TAIL:]).rstrip()
    lines = tail.split("\n")
    while lines and (not lines[-1].strip() or FENCE.match(lines[-1])):
        lines.pop()
    tail = "\n".join(lines)
    if DISPLAY_END.search(tail):
        return last_display(tail)
    sentence = (SENTENCE_END.split(tail) or [""])[-1].strip()
    return sentence if sentence and not asks(sentence) else None


def last_display(tail: str) -> str | None:
    """The displayed formula at the end, unless it belongs to a question or an instruction."""
    body = DISPLAY_END.sub("", tail)
    start = max(body.rfind("$$"), body.rfind("\\["))
    if start < 0:
        return None
    before = body[:start].strip()
    sentence = (re.split(r"(?<=[.!?])\s+|\n\s*\n", before) or [""])[-1]
    return None if sentence and asks(sentence) else body[start + 2 :].strip()


def asks(sentence: str) -> bool:
    """Whether the sentence is a question or an instruction."""
    return sentence.rstrip("*_\"') ").endswith("?") or bool(ASKS.match(sentence))
