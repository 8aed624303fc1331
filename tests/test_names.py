"""Names of our files and modules in the strings of tests that CI does not run: each must exist.

A renamed file fails here, not only in the test that needs a real server, a GPU or hours.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.structure import PACKAGES

ROOT = Path(__file__).resolve().parents[1]
OURS = (*PACKAGES, "tests")
FILES = {path.name for folder in OURS for path in (ROOT / folder).rglob("*.py")}
RARE = re.compile(r"pytest\.mark\.(sglang|vllm|gpu|soak)\b")
MODULE = re.compile(rf"({'|'.join(OURS)})(\.[a-z]\w*)+")


def strings(source: str) -> Iterator[str]:
    """Strings and bytes of a source, without those that name a new file: `folder / "own.py"`."""
    tree = ast.parse(source)
    made = {id(node.right) for node in ast.walk(tree) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in made:
            text = node.value.decode(errors="replace") if isinstance(node.value, bytes) else node.value
            if isinstance(text, str):
                yield text


def exists(text: str) -> bool:
    """Whether the file or module that a string names is there; true for a string that names none."""
    if MODULE.fullmatch(text):
        path = ROOT / text.replace(".", "/")
        return path.is_dir() or path.with_suffix(".py").is_file()
    if re.fullmatch(r"configs/[\w/-]+\.toml", text):
        return (ROOT / text).is_file()
    return not re.fullmatch(r"[\w/]+\.py", text) or Path(text).name in FILES


def unknown(source: str) -> list[str]:
    return [text for text in strings(source) if not exists(text)]


def test_names_in_tests_that_ci_does_not_run_exist() -> None:
    rare = [path for path in (ROOT / "tests").rglob("*.py") if RARE.search(path.read_text(encoding="utf-8"))]
    helpers = [path for folder in ("servers", "support") for path in (ROOT / "tests" / folder).rglob("*.py")]
    assert len(rare) > 10
    found = {path.name: unknown(path.read_text(encoding="utf-8")) for path in [*rare, *helpers]}
    assert {name: texts for name, texts in found.items() if texts} == {}


def test_a_renamed_file_or_module_is_found_in_strings() -> None:
    assert unknown('words = [word for word in line if word.endswith(b"keeper.py")]') == ["keeper.py"]
    assert unknown('run("-m", "tools.audits", "configs/tinny.toml")') == ["tools.audits", "configs/tinny.toml"]
    assert unknown('(tmp_path / "own.py").write_text("x"); run("tools.audit", "server_process.py")') == []
