"""Text of a model, of user code or of a peer: valid Unicode, bounded in length, without control characters. Pure."""

import json
import re
from typing import Any

ERROR = 2000  # characters of an error, a reason or a warning, in a message, a log line or a journal line
NOTE = 200  # characters of an actor's note, or of the name of an error's type
SURROGATE = re.compile("[\ud800-\udfff]")  # half of a pair, which UTF-8 cannot hold


class _Escapes(dict[int, str]):
    """Code point -> itself, or its escape; filled as they occur."""

    def __missing__(self, code: int) -> str:
        c = chr(code)
        self[code] = c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode()
        return self[code]


_escapes = _Escapes()


def valid(text: str) -> str:
    """The text with U+FFFD in place of each lone surrogate, so that it can be encoded."""
    return text if text.isascii() else SURROGATE.sub("\ufffd", text)


def valid_json(value: Any) -> Any:
    """A JSON value whose texts, its names too, are `valid`."""
    text = json.dumps(value, ensure_ascii=False)
    return json.loads(valid(text)) if SURROGATE.search(text) else value


def cut(text: str, n: int = ERROR) -> str:
    """At most n characters; a longer text ends with "..."."""
    return text if len(text) <= n else f"{text[: n - 3]}..."


def printable(text: str) -> str:
    """The text with escapes for control characters and lone surrogates (terminal-safe). Line breaks stay."""
    return text if text.isprintable() else text.translate(_escapes)


def text_of(error: BaseException, n: int = ERROR) -> str:
    """The text of any error, cut and valid; an error of user code may have none, or one that raises."""
    try:
        return valid(cut(str(error).strip(), n))
    except (Exception, SystemExit) as broken:  # noqa: BLE001  user code raises any error
        return f"(its text raises {type(broken).__name__})"


def described(error: BaseException, n: int = ERROR) -> str:
    """Type and text of any error."""
    return f"{valid(cut(type(error).__name__, NOTE))}: {text_of(error, n)}".rstrip(": ")
