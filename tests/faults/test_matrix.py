"""docs/faults.md has all rows; each row has a test of its number in the files that the row names."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROWS = range(1, 49)


def rows_tested() -> dict[int, set[str]]:
    """Row -> the files of tests/faults that have a test named after it."""
    found: dict[int, set[str]] = {}
    for path in (ROOT / "tests" / "faults").glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and (match := re.match(r"test_row_(\d\d)_", node.name)):
                found.setdefault(int(match[1]), set()).add(path.stem)
    return found


def rows_listed() -> dict[int, str]:
    """Row -> the last cell of its line in the page."""
    page = (ROOT / "docs" / "faults.md").read_text()
    lines = re.findall(r"^\| (\d+) \|.*\| ([^|]*) \|$", page, re.MULTILINE)
    return {int(number): cell for number, cell in lines}


def test_every_row_of_the_matrix_has_a_test_named_after_it() -> None:
    assert sorted(rows_tested()) == list(ROWS)


def test_the_page_has_every_row_and_names_the_files_that_test_it() -> None:
    listed, tested = rows_listed(), rows_tested()
    assert sorted(listed) == list(ROWS)
    for number, cell in listed.items():
        named = set(re.findall(r"`(test_\w+)`", cell))
        assert named == tested[number], number
        for path in re.findall(r"`(tests/\w+\.py)`", cell):
            assert (ROOT / path).is_file()
