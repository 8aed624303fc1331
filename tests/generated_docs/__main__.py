"""Rewrites the generated parts of docs/: `python -m tests.generated_docs`."""

from tests.generated_docs.pages import DOCS, generated


def main() -> None:
    for name, text in generated().items():
        (DOCS / name).write_text(text, encoding="utf-8")
        print(f"wrote docs/{name}")


if __name__ == "__main__":
    main()
