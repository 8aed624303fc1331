"""The parts of a page, as page.html.j2 lays them out."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

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


@dataclass(frozen=True, slots=True)
class SampleCard:
    """One sample to read."""

    heading: str
    facts: str
    texts: Sequence[tuple[str, str]]  # (title, text)


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
