"""The tests of a row, in the published forms of the data sets.

Private tests of LiveCodeBench are published as JSON text, pickled as one string, compressed by zlib, in base64. Nothing
is unpickled. A pickle of one string consists of six kinds of instructions; any other instruction is refused, so no file
can name a class or call a function.
"""

import ast
import base64
import binascii
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

Row = Mapping[str, Any]
LISTS = ("tests", "official_tests", "input_output", "public_test_cases", "private_test_cases")


@dataclass(frozen=True, slots=True)
class StdinTest:
    """A program reads `given` and must print `expected`."""

    given: str
    expected: str
    checker: str = ""  # program that compares the output, where several are right


@dataclass(frozen=True, slots=True)
class FunctionTests:
    """Tests that call functions of the program; `spec` is for test_program.py."""

    spec: dict[str, Any]
    n: int
    prompt: str = ""  # code that the completion continues
    name: str = ""  # of the function


def read_tests(row: Row) -> list[StdinTest] | FunctionTests:
    """Raises ValueError for a row without tests, or with tests that are no JSON or of another form."""
    if "test" in row and "entry_point" in row:
        name, prompt = str(row["entry_point"]), str(row.get("prompt", ""))
        spec = {"kind": "check", "name": name, "prompt": closed(prompt), "test": str(row["test"])}
        return FunctionTests(spec, 1, prompt, name)
    if "plus_input" in row and "canonical_solution" in row:
        return _reference_tests(row)
    if "test_list" in row:
        return _mbpp_tests(row)
    if row.get("interaction_format") or row.get("input_mode") == "file":
        raise ValueError("the reward code runs programs on standard input: this row is interactive, or reads a file")
    tests = [test for key in LISTS if row.get(key)
             for test in _listed(key, row[key])]  # fmt: skip
    tests += [test for key in ("public_tests", "private_tests", "generated_tests") if row.get(key)
              for test in _pairs(key, row[key])]  # fmt: skip
    if not tests:
        raise ValueError(
            "missing tests in a row for the reward code: test with entry_point, test_list, plus_input, tests, "
            f"input_output, public_tests or public_test_cases; it has {', '.join(sorted(row)) or 'nothing'}"
        )
    return _by_kind(tests, row)


def _mbpp_tests(row: Row) -> FunctionTests:
    """Assert statements; the text `test` of EvalPlus has more inputs, and counts as one test."""
    setup = "\n".join([str(row.get("test_setup_code") or ""), *map(str, row.get("test_imports") or [])])
    if str(row.get("test") or "").strip():
        return FunctionTests({"kind": "script", "setup": setup, "test": str(row["test"])}, 1)
    asserts = [str(text) for text in [*row["test_list"], *(row.get("challenge_test_list") or [])]]
    if not asserts:
        raise ValueError("test_list must have at least one assert statement")
    return FunctionTests({"kind": "asserts", "setup": setup, "asserts": asserts}, len(asserts))


def closed(prompt: str) -> str:
    """A prompt of code that may end with the head of a function: with a body, so that it compiles."""
    try:
        ast.parse(prompt)
    except SyntaxError:
        return f"{prompt.rstrip()}\n    pass\n"
    return prompt


def _reference_tests(row: Row) -> FunctionTests:
    inputs = [*row["base_input"], *row["plus_input"]]
    name = str(row["entry_point"])
    reference = str(row["canonical_solution"])
    spec = {"kind": "reference", "name": name, "reference": reference, "inputs": inputs, "atol": row.get("atol") or 0}
    spec["assertion"] = str(row.get("assertion") or "")
    return FunctionTests(spec, len(inputs), name=name)


Listed = tuple[str, Any, Any]  # name of the function or "", input, output


def _listed(key: str, value: Any) -> Iterator[Listed]:
    """A list of {input, output}, or {inputs, outputs, fn_name}, also as JSON text."""
    found = _parsed(key, value)
    if isinstance(found, dict):
        name = str(found.get("fn_name") or "")
        inputs, outputs = found.get("inputs"), found.get("outputs")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise ValueError(f"{key} must have inputs and outputs of the same length")
        yield from ((name, given, expected) for given, expected in zip(inputs, outputs, strict=True))
    elif isinstance(found, list):
        for test in found:
            if not isinstance(test, dict) or "input" not in test or "output" not in test:
                raise ValueError(f"{key} must be a list of tests with input and output")
            yield ("*" if test.get("testtype") == "functional" else "", test["input"], test["output"])
    else:
        raise ValueError(f"{key} must be a list of tests, or inputs and outputs: it is a {type(found).__name__}")


def _pairs(key: str, value: Any) -> Iterator[Listed]:
    """CodeContests: {input: [...], output: [...]}."""
    found = _parsed(key, value)
    if not isinstance(found, dict) or not {"input", "output"} <= found.keys():
        raise ValueError(f"{key} must have lists input and output")
    yield from (("", given, expected) for given, expected in zip(found["input"], found["output"], strict=True))


def _parsed(key: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return _parsed_text(value, packed=key == "private_test_cases")
    except ValueError as error:
        raise ValueError(f"{key} must be JSON: {error}") from None


@lru_cache(maxsize=4)  # the samples of a group have the same tests
def _parsed_text(text: str, *, packed: bool) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        if not packed or text.lstrip()[:1] in ("[", "{"):
            raise
    return json.loads(unpacked(text))


def _by_kind(tests: Sequence[Listed], row: Row) -> list[StdinTest] | FunctionTests:
    functional = [test for test in tests if test[0]]
    if not functional:
        checker = str(row.get("generated_checker") or "")
        return [StdinTest(_text(given), _text(expected), checker) for _, given, expected in tests]
    name = functional[0][0] if functional[0][0] != "*" else _function_name(row)
    calls = [(_arguments(given), _expected(expected)) for _, given, expected in functional]
    if functional[0][0] != "*" and all(isinstance(expected, list) and len(expected) == 1 for _, expected in calls):
        return FunctionTests({"kind": "wrapped_calls", "name": name, "calls": calls}, len(calls), name=name)
    return FunctionTests({"kind": "calls", "name": name, "calls": calls}, len(calls), name=name)


def _text(value: Any) -> str:
    """Standard input or output: text, or a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _function_name(row: Row) -> str:
    """LiveCodeBench: in its metadata, else the method of the starter code."""
    metadata = _parsed("metadata", row.get("metadata") or {})
    found = re.search(r"def\s+(\w+)\s*\(", str(row.get("starter_code") or ""))
    name = metadata.get("func_name") if isinstance(metadata, dict) else None
    if not name and not found:
        raise ValueError("functional tests need the name of the function: metadata.func_name or starter_code")
    return str(name or (found[1] if found else ""))


def _arguments(given: Any) -> list[Any]:
    """A list of arguments, or text with one JSON value a line."""
    if isinstance(given, str):
        return [json.loads(line) for line in given.splitlines() if line.strip()]
    return list(given) if isinstance(given, list) else [given]


def _expected(expected: Any) -> Any:
    return json.loads(expected) if isinstance(expected, str) else expected


LARGEST: Final = 512 << 20  # bytes, decompressed
STOP: Final = ord(".")
# instruction -> bytes of its argument
SKIPPED: Final = {0x80: 1, 0x95: 8, 0x94: 0, ord("q"): 1, ord("r"): 4}  # protocol, frame, and notes for later use
TEXT: Final = {0x8C: 1, ord("X"): 4, 0x8D: 8}  # bytes of the length, before UTF-8 text


def unpacked(text: str) -> str:
    """The JSON text. Raises ValueError for another form."""
    try:
        packed = base64.b64decode(text, validate=True)
        inflate = zlib.decompressobj()
        pickled = inflate.decompress(packed, LARGEST)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"neither JSON nor base64 of zlib: {error}") from None
    if inflate.unconsumed_tail or not inflate.eof:
        raise ValueError(f"compressed tests are incomplete, or larger than {LARGEST >> 20} MiB")
    texts = list(strings(pickled))
    if len(texts) != 1:
        raise ValueError(f"compressed tests hold {len(texts)} pickled strings, and must hold one")
    return texts[0].decode()


def strings(pickled: bytes) -> Iterator[bytes]:
    """The strings of a pickle that holds strings only. Raises ValueError for any other instruction."""
    at = 0
    while at < len(pickled):
        code, at = pickled[at], at + 1
        if code == STOP:
            return
        if code in SKIPPED:
            at += SKIPPED[code]
            continue
        if code not in TEXT:
            raise ValueError(f"compressed tests must be one pickled string: instruction {code:#04x} is not allowed")
        begin = at + TEXT[code]
        end = begin + int.from_bytes(pickled[at:begin], "little")
        if end > len(pickled):
            break
        yield pickled[begin:end]
        at = end
    raise ValueError("compressed tests must be a complete pickle: the end is missing")
