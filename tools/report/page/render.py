"""Turns a page into one HTML file that loads nothing: style and script are inside, and a policy forbids the rest."""

import base64
import hashlib
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from tools.report.page.parts import Page

HERE = Path(__file__).parent
KEPT = "\n\t"  # control characters that a text keeps


def render(page: Page) -> bytes:
    """The page in UTF-8. Texts are escaped; unprintable characters are shown as escape sequences."""
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    environment.filters["safe_text"] = printable
    style, script = (HERE / "page.css").read_text(encoding="utf-8"), (HERE / "page.js").read_text(encoding="utf-8")
    policy = f"default-src 'none'; style-src '{digest(style)}'; script-src '{digest(script)}'; base-uri 'none'"
    text = environment.get_template("page.html.j2").render(
        page=page, style=Markup(style), script=Markup(script), policy=policy
    )
    return text.encode()


def digest(source: str) -> str:
    """The hash by which a content security policy allows one inline source."""
    return f"sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}"


def printable(text: str) -> str:
    """A text of a model or a peer, without characters that control the page or hide others."""
    return "".join(c if c.isprintable() or c in KEPT else c.encode("unicode_escape").decode() for c in str(text))
