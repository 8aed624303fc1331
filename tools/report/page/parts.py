"""The parts of a page as page.html.j2 lays them out, and the page as one HTML file that loads nothing."""

import base64
import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from areal_bus.errors import ConfigError
from tools import terminal
from tools.report.verdict.remarks import Remark


@dataclass(frozen=True, slots=True)
class Card:
    """One chart with its heading."""

    title: str
    chart: Markup
    figure: str = ""  # the newest value
    legend: Sequence[tuple[str, str]] = ()  # (name, colour class)
    note: str = ""


@dataclass(frozen=True, slots=True)
class PageTable:
    """Rows of text. Columns in `right` are numbers."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    right: frozenset[int] = frozenset()
    is_folded: bool = False  # closed at first


class Text(NamedTuple):
    """A text of a model, an environment or a row."""

    title: str
    text: str
    kind: str = ""  # "given", "sampled"


@dataclass(frozen=True, slots=True)
class SampleCard:
    """One sample to read."""

    heading: str
    facts: str
    trajectories: Sequence[tuple[str, Sequence[Text]]] = ()  # (title, texts of its turns); "" if there is one
    texts: Sequence[Text] = ()  # beside the conversation
    mark: str = ""  # right, wrong
    link: str = ""  # to the page of this sample
    summary: str = ""  # the conversation is folded under it


@dataclass(slots=True)
class Section:
    """One part of a page under a heading. An empty one says why."""

    key: str  # anchor
    title: str
    intro: str = ""
    cards: list[Card] = field(default_factory=list)
    tables: list[PageTable] = field(default_factory=list)
    samples: list[tuple[str, list[SampleCard]]] = field(default_factory=list)  # (title, samples)
    remarks: Sequence[Remark] = ()
    links: list[tuple[str, str]] = field(default_factory=list)  # (path below the run's folder, text)
    note: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """A whole page."""

    title: str
    subtitle: str
    answers: Sequence[tuple[str, Remark]]  # question, answer
    advice: Sequence[str]
    figures: Sequence[tuple[str, str]]  # name, value
    sections: Sequence[Section]
    first: Sequence[Card] = ()  # charts that the first screen shows
    form: Sequence[tuple[str, str, str]] = ()  # (name, value, hint) of filters that a server answers; no hint: hidden
    pages: Sequence[tuple[str, "Page"]] = ()  # further pages by path, which this one links to


N_COLOURS = 12  # .c0 to .c11 in page.css
N_GREYS = 6  # .w0 to .w5

WORK = {"generate": 0, "backward": 0, "score": 0, "decide": 0, "swap": 1, "snapshot": 1, "push": 1, "wait_push_s": 1,
        "optimizer": 2, "prox": 4, "checkpoint": 5, "warmup": 6, "load": 7, "start": 8, "bus": 3, "update_s": 0,
        "reference": 9, "serve": 10}  # fmt: skip
WAITS = {"idle": 0, "wait": 0, "wait_batch": 0, "wait_sampling_s": 0, "idle:prompt": 1, "idle:weights": 2,
         "idle:episode": 3, "wait_reward_s": 2}  # fmt: skip


def of_label(label: str) -> str:
    """The class that a label prefers. Unknown ones get one by their name, always the same."""
    if label in WAITS:
        return f"w{WAITS[label]}"
    return f"c{WORK[label] if label in WORK else sum(label.encode()) % N_COLOURS}"


def of_labels(labels: Iterable[str]) -> dict[str, str]:
    """The class of each label of one card: where two prefer the same one, the later gets the next that is free."""
    chosen: dict[str, str] = {}
    for label in dict.fromkeys(labels):
        kind, first = of_label(label)[0], int(of_label(label)[1:])
        n = N_GREYS if kind == "w" else N_COLOURS
        tried = [f"{kind}{(first + i) % n}" for i in range(n)]
        chosen[label] = next((one for one in tried if one not in chosen.values()), tried[0])
    return chosen


def of_place(place: int) -> str:
    """The class of the n-th line of a chart."""
    return f"c{place % N_COLOURS}"


def write(page: Page, path: Path) -> int:
    """Write the file at once, so that a reader never sees half of it. Raises ConfigError when it cannot be written."""
    for name, further in page.pages:
        _write_file(render(further), path.parent / name, makes_folder=True)
    body = render(page)
    _write_file(body, path)
    print(f"{path}: {len(body) / 2**20:.2f} MiB; open it in a browser")
    for question, answer in page.answers:
        print(terminal.quote(f"{question} {answer.sentence}", indent="  ", width=terminal.width()))
    return 0


def _write_file(body: bytes, path: Path, *, makes_folder: bool = False) -> None:
    temporary = path.with_name(f".{path.name}.new")
    try:
        if makes_folder:
            path.parent.mkdir(exist_ok=True)
        temporary.write_bytes(body)
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(f"the report must be writable: {path}: {error.strerror or error}") from None


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
    return text.encode(errors="backslashreplace")  # lone surrogates of a command line or a query


def digest(source: str) -> str:
    """The hash by which a content security policy allows one inline source."""
    return f"sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}"


def printable(text: str) -> str:
    """A text of a model or a peer, without characters that control the page or hide others."""
    return "".join(c if c.isprintable() or c in KEPT else c.encode("unicode_escape").decode() for c in str(text))
