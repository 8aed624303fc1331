"""Scores a completion by its tests: finds the program, runs it in the sandbox, compares outside.

The program is found by reading Markdown fences line by line, in time linear in the text. A fence has three or more ` or
~, is closed by one of its kind and length, and may be indented. A closing fence that is missing, or one too many,
changes no other block.
"""

import ast
import importlib
import json
import math
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, Literal

from actors.rewards import sandbox
from actors.rewards.protocol import Score
from actors.rewards.sandbox import Level, Outcome, SandboxLimits
from areal_bus.errors import ConfigError
from areal_code.row_tests import FunctionTests, StdinTest, closed, read_tests

OPENING = re.compile(r"(?P<before>[^`~\n]*)(?P<fence>`{3,}|~{3,})[ \t]*(?P<info>[^`\n]*)")
LISTED = re.compile(r"[ \t]*(?:[-*+]|\d{1,3}[.)])[ \t]+")
LANGUAGE = re.compile(r"[\s{.]*([A-Za-z+#_-]*)")
LABEL = re.compile(r"[{.]*[A-Za-z][\w+#.-]*(?:[\s,{:=].*=.*|[}\s]*)")  # python, json, {.py}, py title="x"
TAGS = "answer|code|pre|python|solution"
WRAPPER = re.compile(
    rf"^[ \t]*(?:(?:<(?:{TAGS})(?:\s[^<>\n]*)?>|\[PYTHON\])[ \t]*)+\n?"
    rf"|(?P<closing>(?:(?:</(?:{TAGS})>|\[/PYTHON\])[ \t]*)+)(?P<end>$\n?)?",  # at the end of a line
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
                fence, language, indent = opening["fence"], language_of(opening["info"]), margin(opening["before"])
            else:
                outside.append(line)
        elif opening and opening["fence"].startswith(fence) and not (opening["before"].strip() and opening["info"]):
            yield FencedBlock(language, "\n".join([*block, opening["before"].removeprefix(indent)]))
            block = None
            if not opening["before"].strip() and LABEL.fullmatch(opening["info"]):  # the closing fence is missing
                block, fence, language = [], opening["fence"], language_of(opening["info"])
                indent = margin(opening["before"])
        else:
            block.append(line.removeprefix(indent if line.startswith(indent) else indent.rstrip()))
    yield "\n".join(outside) if block is None else FencedBlock(language, "\n".join(block))


def margin(before: str) -> str:
    """What begins each line of a block whose fence comes after `before`: spaces, or a quotation's mark."""
    if LISTED.fullmatch(before):
        return " " * len(before)
    return "" if before.strip(" \t>") else before


def within(block: FencedBlock | str) -> Iterator[FencedBlock | str]:
    """The blocks of a document in a longer fence, or the block itself."""
    if isinstance(block, FencedBlock) and block.language in DOCUMENTS:
        yield from blocks(block.text)
    else:
        yield block


def unwrapped(text: str) -> str:
    """The text without the tags around a program: <answer>, <code>, [PYTHON]."""
    if OPENING_LINE.search(text):
        return text
    return WRAPPER.sub(lambda tags: "" if tags["closing"] is None or tags["end"] is not None else tags[0], text)


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


CONTAINED = {"solution_server": ("plain_values",), "test_program": ("plain_values", "small_numpy"), "checker": ()}
HERE = Path(__file__).parent
LARGEST_FILE = 64 << 20  # bytes, of a checker
NUMBER = re.compile(r"\d+(?:\.\d+)?")
DECIMAL = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,9})?", re.ASCII)  # as printed: not 1_0, not nan
CLOSE = 1e-6  # of a printed number with decimals
NEAR_ZERO = 1e-8
FOLDER = "areal_code"

ProgramRunner = Callable[[str, bytes, SandboxLimits], Outcome]


@dataclass(frozen=True, slots=True)
class CodeOptions:
    """[reward.code] and what goes with it."""

    test_s: float = 6.0
    memory_mib: int = 1024
    score_s: float = 8.0  # for all tests of a completion
    sandbox: Literal["auto", "required"] = "auto"
    on_server: bool = False  # programs run on a sandbox server, reward.url


_options = CodeOptions()


def configure(options: CodeOptions) -> None:
    """Set the options of this process. Raises ConfigError where the sandbox that they require does not run."""
    global _options
    if options.sandbox == "required" and not options.on_server and sandbox.find_level() != "bubblewrap":
        raise ConfigError(
            'reward.sandbox = "required" needs bubblewrap, which does not run here: install it (apt-get install '
            'bubblewrap) and allow namespaces, or set reward.sandbox = "auto" for the weaker level'
        )
    _options = options


def score(prompt: str, completion: str, row: Mapping[str, Any]) -> Score:
    """1 if all tests pass, else 0."""
    passed = run_tests(completion, row, needs_all=True)
    return Score(float(all(passed)), all(passed))


def score_share(prompt: str, completion: str, row: Mapping[str, Any]) -> Score:
    """The share of the tests that pass. Correct: all of them."""
    passed = run_tests(completion, row)
    return Score(sum(passed) / len(passed), all(passed))


def run_tests(
    completion: str,
    row: Mapping[str, Any],
    options: CodeOptions | None = None,
    *,
    needs_all: bool = False,
    level: Level | None = None,
) -> list[bool]:
    """Whether each test passes; with `needs_all` none is run after a failure on standard input. `level`: the strongest.

    An exception is no verdict on the completion: ValueError for tests that cannot be read, RuntimeError for tests that
    do not run, OSError when the sandbox does not start.
    """
    options = options or _options
    tests = read_tests(row)
    limits = SandboxLimits(
        wall_s=options.score_s,
        cpu_s=max(1, int(options.score_s) + 1),
        memory_bytes=options.memory_mib << 20,
        all_memory_bytes=2 * options.memory_mib << 20,
    )
    if isinstance(tests, list):
        return _run_stdin(program_in(completion), tests, limits, options, needs_all=needs_all, level=level)
    if options.on_server:
        raise ValueError("unknown form of tests for a sandbox server: reward.url runs those of standard input only")
    return _run_functions(program_of(completion, tests), tests, limits, options, level)


def program_of(completion: str, tests: FunctionTests) -> str:
    """The code, after the code of the prompt; a completion that does not define the function continues the prompt."""
    code = program_in(completion, prompt=tests.prompt, function=tests.name)
    if not tests.prompt or defines(code, tests.name):
        return f"{closed(tests.prompt)}\n{code}" if tests.prompt else code
    return tests.prompt + code


def _run_stdin(
    code: str,
    tests: list[StdinTest],
    limits: SandboxLimits,
    options: CodeOptions,
    *,
    needs_all: bool,
    level: Level | None,
) -> list[bool]:
    """One run a test; tests that no time is left for fail."""
    began = time.monotonic()
    passed: list[bool] = []
    for test in tests:
        left = began + options.score_s - time.monotonic()
        if left <= 0 or (needs_all and not all(passed)):
            passed.append(False)
            continue
        own = replace(limits, wall_s=min(options.test_s, left), output_bytes=most_printed(test, limits))
        run = program_runner(options, level)
        outcome = run(code, test.given.encode(), own)
        ended = outcome.end == "exit" and outcome.exit_code == 0
        check = Check(test, replace(limits, wall_s=options.test_s), began + options.score_s, run)
        passed.append(ended and check.is_right(outcome.stdout.decode(errors="replace")))
    return passed


def program_runner(options: CodeOptions, level: Level | None) -> ProgramRunner:
    """Runs programs in the sandbox of this host, or on the sandbox server."""
    if options.on_server:
        return importlib.import_module("actors.rewards.by_url").run_program  # type: ignore[no-any-return]
    return partial(sandbox.run, level=level)


def most_printed(test: StdinTest, limits: SandboxLimits) -> int:
    return max(limits.output_bytes, 2 * len(test.expected))


@dataclass(frozen=True, slots=True)
class Check:
    """Compares what a program printed."""

    test: StdinTest
    limits: SandboxLimits
    end: float  # time.monotonic() at which the tests of the completion end
    run: ProgramRunner

    def is_right(self, printed: str) -> bool:
        """Whether the output is the expected one, or the row's checker accepts it.

        A checker without a verdict on it may have failed because of the output, which is then wrong. Raises
        RuntimeError if it has none on the expected output either.
        """
        if same_output(printed, self.test.expected):
            return True
        if not self.test.checker:
            return False
        verdict = self.verdict(printed)
        reason = self.verdict(self.test.expected) if isinstance(verdict, str) else None
        if isinstance(reason, str) and time.monotonic() < self.end:
            raise RuntimeError(f"the checker of the row does not run: {reason}")
        return verdict is True

    def verdict(self, printed: str) -> bool | str:
        """That of the checker; why it has none. Its last line is 1 for a right output, else another number."""
        if (left := self.end - time.monotonic()) <= 0:
            return "no time is left"
        files = {"input.txt": self.test.given, "correct_output.txt": self.test.expected, "output.txt": printed}
        own = replace(
            self.limits,
            wall_s=min(self.limits.wall_s, left),
            file_bytes=LARGEST_FILE,
            disk_bytes=3 * LARGEST_FILE,
        )
        program = standalone("checker", self.test.checker)
        outcome = self.run(program, json.dumps(files).encode(), own)
        last = outcome.stdout.decode(errors="replace").strip().rpartition("\n")[2].strip()
        if outcome.end != "exit" or outcome.exit_code or not NUMBER.fullmatch(last):
            return outcome.stderr.decode(errors="replace").strip().rpartition("\n")[2] or outcome.end
        return float(last) == 1.0


def same_output(printed: str, expected: str) -> bool:
    """Equal lines without the space at their ends; else equal words, numbers by value (1.0 is 1).

    Where the expected number has a decimal point or an exponent, CLOSE is the relative tolerance and NEAR_ZERO the
    absolute one.
    """
    if _lines(printed) == _lines(expected):
        return True
    a, b = printed.split(), expected.split()
    return len(a) == len(b) and all(x == y or _same_number(x, y) for x, y in zip(a, b, strict=True))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _same_number(printed: str, expected: str) -> bool:
    if not (DECIMAL.fullmatch(printed) and DECIMAL.fullmatch(expected)):
        return False
    if Decimal(printed) == Decimal(expected):
        return True
    a, b = float(printed), float(expected)
    return (
        not expected.lstrip("+-").isdecimal()
        and math.isfinite(b)
        and math.isclose(a, b, rel_tol=CLOSE, abs_tol=NEAR_ZERO)
    )


def _run_functions(
    code: str, tests: FunctionTests, limits: SandboxLimits, options: CodeOptions, level: Level | None
) -> list[bool]:
    solution = standalone("solution_server", code, options.test_s)
    tester = standalone("test_program", json.dumps({**tests.spec, "call_s": options.test_s}))
    outcome = sandbox.run_connected(tester, solution, limits, level=level)
    results = outcome.stderr.decode(errors="replace").splitlines()
    if broken := next((line for line in results if line.startswith("broken ")), None):
        raise RuntimeError(f"the tests of the row do not run: {broken.removeprefix('broken ')}")
    passed = [line == "pass" for line in results if line == "pass" or line.startswith("fail ")]
    n = tests.n - results.count("skip")
    if not n:
        raise RuntimeError("the tests of the row do not run: its reference solution has no result within its limits")
    if outcome.end == "exit" and len(passed) != n:
        raise RuntimeError(
            f"the tests of the row ended early: {' '.join(results[-3:]) or f'exit code {outcome.exit_code}'}"
        )
    return [*passed, *[False] * (n - len(passed))]  # no time was left for the others


def standalone(module: str, *arguments: object) -> str:
    """The text of a program of this folder that contains the modules that it imports from here."""
    modules = {f"{FOLDER}.{name}": (HERE / f"{name}.py").read_text(encoding="utf-8") for name in CONTAINED[module]}
    return (
        f"import sys, types\nfor name, text in {modules!r}.items():\n"
        "    sys.modules[name] = types.ModuleType(name)\n    exec(text, sys.modules[name].__dict__)\n"
        f"{(HERE / f'{module}.py').read_text(encoding='utf-8')}\nmain({', '.join(map(repr, arguments))})\n"
    )
