"""Finds the program in a completion: reads Markdown fences line by line, in time linear in the text.

A fence has three or more ` or ~, is closed by one of its kind and length, and may be indented. A closing fence that is
missing, or one too many, changes no other block.
"""

import ast
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

OPENING = re.compile(r"(?P<before>[^`~\n]*)(?P<fence>`{3,}|~{3,})[ \t]*(?P<info>[^`\n]*)")
LANGUAGE = re.compile(r"[\s{.]*([A-Za-z+#_-]*)")
LABEL = re.compile(r"[{.]*[A-Za-z][\w+#.-]*(?:[\s,{:=].*=.*|[}\s]*)")  # python, json, {.py}, py title="x"
WRAPPER = re.compile(
    r"^[ \t]*(?:</?(?:answer|code|pre|python|solution)>|<pre><code[^<>\n]*>|</code></pre>|\[/?PYTHON\])[ \t]*$\n?",
    re.MULTILINE | re.IGNORECASE,
)
OPENING_LINE = re.compile(r"^[^`~\n]*(?:```|~~~)", re.MULTILINE)
DOCUMENTS = ("markdown", "md")
PYTHON = ("python", "py", "cpython", "pypy")
MOST_BLOCKS = 30  # the last ones are looked at
# a program prints or defines; without any of these a block is an example's output: 5, [1, 2], x = 5
DOES = (ast.Call, ast.Await, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


@dataclass(frozen=True, slots=True)
class FencedBlock:
    language: str  # "" without one
    text: str

    @property
    def is_python(self) -> bool:
        return self.language in PYTHON


def program_in(completion: str, *, prompt: str = "", function: str | None = None) -> str:
    """The program: the last block of Python that compiles, alone or as the rest of `prompt`.

    Blocks without a language come after those of Python, then those of another language, then text outside of blocks.
    Without any that compiles: the last block in this order; without a block: the text. `function`: its name, "" for
    one of any name; a block that defines it goes before all others.
    """
    answer = completion.rpartition("</think>")[2]
    text = unwrapped(answer if answer.strip() else completion)
    parts = [part for block in blocks(text) for part in within(block)]
    found = [part for part in parts if isinstance(part, FencedBlock) and part.text.strip()][-MOST_BLOCKS:]
    if not found:
        return next((part for part in parts if isinstance(part, str) and part.strip()), text)
    ranked = sorted(found, key=lambda block: (block.is_python, not block.language))
    outside = [FencedBlock("text", part) for part in parts if isinstance(part, str) and len(parts) > 1][-MOST_BLOCKS:]
    usable = [block.text for block in [*outside, *ranked] if compiles(block, prompt)]
    defining = [code for code in usable if function is not None and defines(code, function)]
    return (defining or usable or [ranked[-1].text])[-1]


def blocks(text: str) -> Iterator[FencedBlock | str]:
    """The fenced blocks, and the text between them."""
    block: list[str] | None = None
    outside: list[str] = []
    fence = language = indent = ""
    for line in text.split("\n"):
        opening = OPENING.fullmatch(line.rstrip())
        if block is None:
            if opening and is_opening(opening):
                yield "\n".join([*outside, opening["before"]])
                outside, block = [], []
                fence, language, indent = opening["fence"], language_of(opening["info"]), opening["before"]
            else:
                outside.append(line)
        elif opening and opening["fence"].startswith(fence) and not (opening["before"].strip() and opening["info"]):
            yield FencedBlock(language, "\n".join([*block, opening["before"].removeprefix(indent)]))
            block = None
            if not opening["before"].strip() and LABEL.fullmatch(opening["info"]):  # the closing fence is missing
                block, fence, language, indent = [], opening["fence"], language_of(opening["info"]), opening["before"]
        else:
            block.append(line.removeprefix(indent if not indent.strip() else ""))
    yield "\n".join(outside) if block is None else FencedBlock(language, "\n".join(block))


def within(block: FencedBlock | str) -> Iterator[FencedBlock | str]:
    """The blocks of a document in a longer fence, or the block itself."""
    if isinstance(block, FencedBlock) and block.language in DOCUMENTS:
        yield from blocks(block.text)
    else:
        yield block


def unwrapped(text: str) -> str:
    """The text without the tags that stand alone in lines around a program: <answer>, <code>, [PYTHON]."""
    return text if OPENING_LINE.search(text) else WRAPPER.sub("", text)


def defines(code: str, function: str) -> bool:
    name = re.escape(function) if function else r"\w+"
    return re.search(rf"^[ \t]*(?:async[ \t]+)?def[ \t]+{name}\b", code, re.MULTILINE) is not None


def is_opening(found: re.Match[str]) -> bool:
    """Whether a fence opens a block: at the start of a line, or behind text and before the label of Python."""
    return not found["before"].strip() or not found["info"] or language_of(found["info"]) in PYTHON


def language_of(info: str) -> str:
    found = LANGUAGE.match(info)
    return found[1].casefold() if found else ""


def compiles(block: FencedBlock, prompt: str) -> bool:
    """Whether the block is a program, alone or as the rest of `prompt`; values (an example's output) are none."""
    tree = parsed(block.text)
    if tree is None:
        return bool(prompt) and block.text[:1] in (" ", "\t", "\n") and parsed(prompt + block.text) is not None
    return any(isinstance(node, DOES) for node in ast.walk(tree))


def parsed(code: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings(action="ignore"):
            return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
