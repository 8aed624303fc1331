"""Writes a page as one HTML file that loads nothing: style and script are inline. Prints its answers."""

import base64
import hashlib
import os
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from areal_bus.errors import ConfigError
from tools import terminal
from tools.report.page.parts import Page


def write(page: Page, path: Path) -> int:
    """Write the file at once, so that a reader never sees half of it. Raises ConfigError when it cannot be written."""
    body, temporary = render(page), path.with_name(f".{path.name}.new")
    try:
        temporary.write_bytes(body)
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(f"the report must be writable: {path}: {error.strerror or error}") from None
    print(f"{path}: {len(body) / 2**20:.2f} MiB; open it in a browser")
    for question, answer in page.answers:
        print(terminal.quote(f"{question} {answer.sentence}", indent="  ", width=terminal.width()))
    return 0


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
