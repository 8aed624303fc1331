"""The parts of a page, as page.html.j2 lays them out."""

from collections.abc import Iterable, Sequence
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
    first: Sequence[Card] = ()  # charts that the first screen shows


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
