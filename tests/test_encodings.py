"""Every text file is read and written as UTF-8, whatever the locale. Ruff's PLW1514 sees only some of the calls."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.structure import PACKAGES

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
N_POSITIONAL = {"read_text": 0, "write_text": 1}  # arguments before `encoding`
STARTS = {"run", "Popen", "check_output"}
BINARY = {("os", "open"), ("gzip", "open"), ("tarfile", "open"), ("zipfile", "open"), ("webbrowser", "open")}


def calls_without_encoding(source: str) -> list[str]:
    """ "LINE: NAME" of each call that would use the encoding of the locale."""
    return [f"{call.lineno}: {name}" for call, name in calls(ast.parse(source)) if uses_locale(call, name)]


def calls(tree: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute):
                yield node, node.func.attr
            elif isinstance(node.func, ast.Name):
                yield node, node.func.id


def uses_locale(call: ast.Call, name: str) -> bool:
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if "encoding" in keywords:
        return False
    if name in N_POSITIONAL:
        return len(call.args) <= N_POSITIONAL[name]
    if name in STARTS:
        return "text" in keywords or "universal_newlines" in keywords
    if name not in ("open", "fdopen"):
        return False
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    if isinstance(owner, ast.Name) and (owner.id, name) in BINARY:
        return False
    after_path = owner is None or name == "fdopen"
    mode = keywords.get("mode", call.args[after_path] if len(call.args) > after_path else None)
    if owner is not None and name == "open" and call.args and not isinstance(call.args[0], ast.Constant):
        return False  # a method of ours, such as Listener.open(endpoint)
    return mode is None or (isinstance(mode, ast.Constant) and "b" not in mode.value)


def test_sources_name_the_encoding_of_every_text_file() -> None:
    found = {str(path.relative_to(ROOT)): calls_without_encoding(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert len(found) > 600
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        "(run / FILE).read_text()",
        "path.write_text(text)",
        "open(path)",
        "path.open('w')",
        "os.fdopen(one, 'w')",
        "subprocess.run(words, text=True)",
    ],
)
def test_a_call_without_an_encoding_is_found(source: str) -> None:
    assert len(calls_without_encoding(source)) == 1


@pytest.mark.parametrize(
    "source", ["path.open('rb')", "os.open(path, flags)", "open(path, 'wb')", "bus.open(endpoint)"]
)
def test_a_call_without_text_needs_no_encoding(source: str) -> None:
    assert calls_without_encoding(source) == []
