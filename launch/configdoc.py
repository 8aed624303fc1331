"""Writes docs/config.md from the types: `python -m launch.configdoc`."""

from pathlib import Path

from launch.explain import page

DOC = Path(__file__).resolve().parents[1] / "docs" / "config.md"

if __name__ == "__main__":
    DOC.write_text(page(), encoding="utf-8")
    print(f"wrote {DOC}")
