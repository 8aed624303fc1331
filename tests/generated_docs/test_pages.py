"""The generated parts of docs/ are those that the code gives now."""

import pytest

from tests.generated_docs.pages import DOCS, generated, with_parts


def test_the_generated_parts_of_the_docs_are_up_to_date() -> None:
    stale = [name for name, text in generated().items() if (DOCS / name).read_text(encoding="utf-8") != text]
    assert not stale, f"run python -m tests.generated_docs: {', '.join(stale)}"


def test_a_page_without_its_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="missing marks <!-- generated: keys -->"):
        with_parts("text", {"keys": str})
    page = "<!-- generated: keys -->old<!-- end of keys --> after"
    assert with_parts(page, {"keys": lambda: "new"}) == "<!-- generated: keys -->\n\nnew\n\n<!-- end of keys --> after"
