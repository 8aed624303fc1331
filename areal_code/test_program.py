"""The program in the sandbox that runs the tests. It calls the model's code in another process, through two pipes.

It prints a line a test to standard error: "pass", "fail" with the reason, or "skip" where the reference solution has no
result within its limits. A line "broken" means that the tests themselves do not run. The model's code cannot reach this
process: only plain values come from it.
"""

import ast
import builtins
import json
import math
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TextIO

from areal_code.plain_values import decode, encode
from areal_code.small_numpy import install

REASON_CHARACTERS = 200
PLAIN = (int, float, complex, str, bytes, list, tuple, set, frozenset, dict, type(None))
REFERENCE_S = 0.5  # CPU seconds of the reference solution for one input
REFERENCES_S = 4.0  # and for all inputs of a row
LARGEST_RESULT = 4 << 20  # characters of an encoded result of the reference solution
LATE_S = 1.0  # the other process ends a call itself after call_s

Spec = dict[str, Any]
Test = Callable[[], object]  # raises when it fails


class NoReference(Exception):
    """The reference solution has no result for an input within its limits."""


class SolutionFailed(Exception):
    """The model's code gave no value."""


class Solution:
    """The functions of the model's code."""

    def __init__(self, call_s: float) -> None:
        self._answers = os.dup(0)
        self._calls = os.fdopen(os.dup(1), "w", encoding="utf-8")
        self._call_s = call_s
        self._buffer = b""

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments: self.call(name, arguments)

    def call(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """Raises SolutionFailed."""
        try:
            self._calls.write(json.dumps([name, encode(arguments)]) + "\n")
            self._calls.flush()
            answer = json.loads(self._line())
            if "error" in answer:
                raise SolutionFailed(answer["error"])
            return decode(answer["value"])
        except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
            raise SolutionFailed(f"{type(error).__name__}: {error}") from None

    def _line(self) -> bytes:
        while b"\n" not in self._buffer:
            wait_s = self._call_s + LATE_S
            if not select.select([self._answers], [], [], wait_s)[0]:
                raise OSError("no answer in time")
            data = os.read(self._answers, 1 << 16)
            if not data:
                raise OSError("the program has ended")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


def main(text: str) -> None:
    """`text`: the tests as JSON (areal_code/row_tests.py)."""
    spec: Spec = json.loads(text)
    solution = Solution(spec["call_s"])
    results = sys.stderr
    nowhere = os.open(os.devnull, os.O_RDWR)
    for file in (0, 1):
        os.dup2(nowhere, file)
    sys.set_int_max_str_digits(0)
    install()
    tests = KINDS[spec["kind"]](spec, solution)
    while True:
        try:
            test = next(tests)
        except StopIteration:
            return
        except Exception as error:  # noqa: BLE001  the text of a data set raises anything
            say(results, f"broken {type(error).__name__}: {error}")
            return
        try:
            test()
        except NoReference:
            say(results, "skip")
        except Exception as error:  # noqa: BLE001
            say(results, f"fail {type(error).__name__}: {error}")
        else:
            say(results, "pass")


def say(results: TextIO, text: str) -> None:
    print(" ".join(text.split())[:REASON_CHARACTERS], file=results, flush=True)


def check_tests(spec: Spec, solution: Solution) -> Iterator[Test]:
    """HumanEval: `check(candidate)`; helper functions of the prompt may be used in it."""
    names: dict[str, Any] = {"__name__": "tests"}
    run_text(spec["prompt"], names)
    names[spec["name"]] = solution[spec["name"]]
    run_text(spec["test"], names)
    check = names["check"]
    yield lambda: check(solution[spec["name"]])


def assert_tests(spec: Spec, solution: Solution) -> Iterator[Test]:
    """MBPP: assert statements. A name that neither they nor the setup define is a function of the model's code."""
    names: dict[str, Any] = {"__name__": "tests"}
    run_text(spec["setup"], names)
    for text in spec["asserts"]:
        used = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
        ours = {name: solution[name] for name in used if name not in names and not hasattr(builtins, name)}
        yield lambda text=text, ours=ours: run_text(text, {**names, **ours})  # type: ignore[misc]


def script_test(spec: Spec, solution: Solution) -> Iterator[Test]:
    """MBPP+ as a program: names that it uses but does not define are functions of the model's code."""
    names: dict[str, Any] = {"__name__": "tests"}
    run_text(spec["setup"], names)
    tree = ast.parse(spec["test"])
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    for name in used - defined(tree) - names.keys():
        if not hasattr(builtins, name):
            names[name] = solution[name]
    yield lambda: run_text(spec["test"], names)


def defined(tree: ast.AST) -> set[str]:
    """The names that a program binds anywhere."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
    return found


def call_tests(spec: Spec, solution: Solution) -> Iterator[Test]:
    """Arguments and the expected result."""
    for arguments, expected in spec["calls"]:
        yield lambda a=arguments, e=expected: must_equal(solution.call(spec["name"], tuple(a)), e, 0.0)  # type: ignore[misc]


def wrapped_call_tests(spec: Spec, solution: Solution) -> Iterator[Test]:
    """APPS, TACO: each expected result may stand in a list of one, so that it or its item is right."""
    for arguments, expected in spec["calls"]:
        yield partial(must_equal_one, solution, spec["name"], arguments, expected)


def must_equal_one(solution: Solution, name: str, arguments: list[Any], expected: list[Any]) -> None:
    value = solution.call(name, tuple(arguments))
    if not equal(value, expected, 0.0):
        must_equal(value, expected[0], 0.0)


def reference_tests(spec: Spec, solution: Solution) -> Iterator[Test]:
    """MBPP+ (EvalPlus): arguments; the expected result is that of the reference solution."""
    names: dict[str, Any] = {"__name__": "reference"}
    run_text(spec["reference"], names)
    kinds = kinds_by_depth(spec["assertion"], spec["name"])
    read = complex_numbers if takes_complex(names[spec["name"]], spec["inputs"], kinds) else as_it_is
    began = time.process_time()
    for arguments in spec["inputs"]:
        text = json.dumps(arguments)
        try:
            left_s = began + REFERENCES_S - time.process_time()
            expected = limited_reference(names[spec["name"]], as_kinds(read(json.loads(text)), kinds), left_s)
        except NoReference as error:
            yield partial(must_skip, error)
            continue
        yield lambda t=text, e=expected: must_equal(  # type: ignore[misc]
            solution.call(spec["name"], tuple(as_kinds(read(json.loads(t)), kinds))), e, spec["atol"]
        )


def limited_reference(function: Callable[..., Any], arguments: list[Any], left_s: float) -> Any:
    """The result of the reference solution. Raises NoReference if it takes too long or is too large to be compared."""
    if left_s <= 0:
        raise NoReference("no time is left for the result")
    signal.signal(signal.SIGPROF, end_reference)
    signal.setitimer(signal.ITIMER_PROF, min(REFERENCE_S, left_s))
    try:
        expected = function(*arguments)
        if len(encode(expected)) > LARGEST_RESULT:
            raise NoReference("the result is too large")
    except MemoryError:
        raise NoReference("the result takes too much memory") from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return expected


def end_reference(number: int, frame: Any) -> None:
    raise NoReference(f"the result takes more than {REFERENCE_S:g} s, or those of a row {REFERENCES_S:g} s")


def must_skip(error: NoReference) -> None:
    raise error


KINDS: dict[str, Callable[[Spec, Solution], Iterator[Test]]] = {
    "check": check_tests,
    "script": script_test,
    "asserts": assert_tests,
    "calls": call_tests,
    "wrapped_calls": wrapped_call_tests,
    "reference": reference_tests,
}


def takes_complex(function: Callable[..., Any], inputs: list[Any], kinds: list[list[type]]) -> bool:
    """Whether the reference works on complex numbers, which JSON holds as text ("1j")."""
    texts = (
        arguments for arguments in inputs if any(isinstance(x, str) and x.strip("()")[-1:] == "j" for x in arguments)
    )
    first = next(texts, None)
    if first is None:
        return False
    try:
        function(*as_kinds(first, kinds))
    except TypeError:
        return True
    return False


def complex_numbers(arguments: list[Any]) -> list[Any]:
    return [complex(item) if isinstance(item, str) else item for item in arguments]


def as_it_is(arguments: list[Any]) -> list[Any]:
    return arguments


def kinds_by_depth(text: str, name: str) -> list[list[type]]:
    """For each argument of the first call of `name`: the kind of sequence at each depth; [] if no literals."""
    try:
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
        first = next(call for call in calls if isinstance(call.func, ast.Name) and call.func.id == name)
        return [depth_kinds(ast.literal_eval(argument)) for argument in first.args]
    except (SyntaxError, ValueError, StopIteration):
        return []


def depth_kinds(value: Any) -> list[type]:
    """Sequence types from the outermost to the innermost, along the first nested sequence."""
    if not isinstance(value, list | tuple | set):
        return []
    nested = next((item for item in value if isinstance(item, list | tuple)), None)
    return [type(value), *depth_kinds(nested)]


def as_kinds(arguments: list[Any], kinds: list[list[type]]) -> list[Any]:
    """The arguments with these kinds of sequences."""
    if len(arguments) != len(kinds):
        return arguments
    return [converted(value, of) for value, of in zip(arguments, kinds, strict=True)]


def converted(value: Any, kinds: list[type]) -> Any:
    if not isinstance(value, list) or not kinds:
        return value
    return kinds[0](converted(item, kinds[1:] or kinds) for item in value)  # deeper than the assertions: the last kind


def run_text(text: str, names: dict[str, Any]) -> None:
    exec(compile(text, "tests.py", "exec"), names)


def must_equal(value: Any, expected: Any, atol: float) -> None:
    if not equal(value, expected, atol):
        raise AssertionError(f"{value!r} is not {expected!r}")


def equal(value: Any, expected: Any, atol: float) -> bool:
    """Equal by value; lists equal tuples, floats may differ by `atol`; an expected object equals everything true."""
    if not isinstance(expected, PLAIN):
        return bool(value)
    if isinstance(expected, list | tuple):
        is_like = isinstance(value, list | tuple) and len(value) == len(expected)
        return is_like and all(equal(a, b, atol) for a, b in zip(value, expected, strict=True))
    if isinstance(expected, dict):
        is_like = isinstance(value, dict) and value.keys() == expected.keys()
        return is_like and all(equal(value[key], item, atol) for key, item in expected.items())
    if isinstance(expected, float) and isinstance(value, int | float) and not isinstance(value, bool):
        return math.isclose(value, expected, rel_tol=1e-6, abs_tol=atol) or (value != value and expected != expected)
    return bool(type(value) is type(expected) or isinstance(value, int | float)) and bool(value == expected)
