"""Episodes to read: the card of one with its trajectories and turns, and pages of one or several."""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from areal_bus.core.parts.split import count
from areal_bus.errors import ConfigError
from tools import prompt
from tools.episodes import facts_of, further_texts, heading_of, right_or_wrong, trajectories_of
from tools.report.facts.curves import CurveBin
from tools.report.page.charts import PlotLine, line_chart
from tools.report.page.parts import Card, Page, PageTable, SampleCard, Section, Text, render, write
from tools.run import Line, Run
from tools.samples import (
    N_ON_PAGE,
    VERDICTS,
    Wanted,
    interleave_groups,
    mark_undone,
    range_of,
    select,
    summary,
)
from tools.surviving_history import Spans

MAX_TEXT = 3000  # characters of a text in a list
MAX_TURNS = 12  # in a list
FILTERS = {"uid": "0", "sample": "0", "step": "0", "evaluation": "NAME", "text": "any words", "reward": "0.5:1",
           "tokens": "100:", "verdict": "right, wrong, none"}  # fmt: skip


def card(sample: Line, *, is_whole: bool = False, facts: Sequence[str] = (), link: str = "") -> SampleCard:
    """The card of a logged sample, short or whole. `facts` come first; `link` leads to its own page."""
    found = trajectories_of(sample)
    n_turns, cut = sum(len(one.turns) for one in found), (lambda text: text) if is_whole else shortened
    shown = range(n_turns) if is_whole else {*range(MAX_TURNS // 2), *range(n_turns - MAX_TURNS // 2, n_turns)}
    tree = []
    for one in found:
        texts = []
        for turn in one.turns:
            if turn.number - 1 in shown:
                which = f"turn {turn.number}: " if n_turns > 1 else ""
                texts.append(Text(which + turn.given_title, cut(turn.given), "given"))
                texts.append(Text(which + turn.sampled_title, cut(turn.sampled), "sampled"))
        if len(one.turns) > len(texts) // 2:
            texts.append(
                Text(f"{count(len(one.turns) - len(texts) // 2, 'turn')} left out: see the page of this episode", "")
            )
        tree.append((one.title if len(found) > 1 or one.role else "", texts))
    told = "; ".join([*facts, *facts_of(sample)])
    beside = [Text(title, cut(text)) for title, text in further_texts(sample)]
    turns = f"{n_turns} turns{f' in {len(found)} trajectories' if len(found) > 1 else ''}"
    folded = "" if is_whole or n_turns == 1 else turns
    return SampleCard(heading_of(sample), told, tree, beside, right_or_wrong(sample), link, folded)


def shortened(text: str) -> str:
    """Begin and end of a long text."""
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


def episodes_page(
    run: str,
    title: str,
    samples: Sequence[Line],
    *,
    life: PageTable | None = None,
    query: Mapping[str, str] | None = None,
) -> Page:
    """The page of these samples; one is shown whole. `life`: of their prompt. `query`: of a server, with its token."""
    section = Section("episodes", title.replace("\n", "; "))
    cards = [
        card(sample, is_whole=len(samples) == 1, link=query_link(sample, query["token"]) if query else "")
        for sample in samples
    ]
    section.samples += [("", cards)] if cards else []
    section.cards += versions_cards(samples[0]) if len(samples) == 1 else []
    sections = [section, *([Section("life", "Life of the prompt", tables=[life])] if life else [])]
    form = [] if query is None else [("token", query["token"], "")]
    form += [(name, (query or {}).get(name, ""), hint) for name, hint in FILTERS.items()] if form else []
    return Page(f"Episodes of {run}", "", (), (), (), sections, form=form)


def versions_cards(sample: Line) -> list[Card]:
    """A chart of the versions of each turn, trained and masked; none for fewer than three turns."""
    turns = sorted((turn for one in trajectories_of(sample) for turn in one.turns), key=lambda turn: turn.number)
    points = [
        PlotLine(name, colour, [bin_of(turn.number, spans) for turn in turns if (spans := getattr(turn, name))])
        for name, colour in (("masked", "w1"), ("trained", "c0"))
    ]
    lines = [line for line in points if line.bins]
    if len(turns) < 3 or not lines:
        return []
    chart = line_chart(lines, "Versions that sampled each turn", x_label="turn")
    note = f"The batch was taken at version {sample['version']}." if "version" in sample else ""
    return [Card("Versions by turn", chart, "", [(line.name, line.colour) for line in lines], note)]


def bin_of(turn: int, spans: Spans) -> CurveBin:
    return CurveBin(float(turn), float(spans[-1][0]), float(spans[0][0]), float(spans[-1][0]))


def samples_page(where: Run, query: Mapping[str, str]) -> bytes:
    """The page that a server answers: samples that the filters of `query` select, or the life of a prompt in flight."""
    try:
        wanted = wanted_of(query)
    except (ValueError, argparse.ArgumentTypeError) as error:
        return render(episodes_page(where.name, f"invalid filter: {error}", [], query=query))
    life = None if wanted.uid is None else life_of(where, wanted.uid, wanted.evaluation or "")
    try:
        found, title = select(mark_undone(where), wanted)
    except ConfigError as error:
        title = "No sample of this prompt is logged yet." if life else str(error)
        return render(episodes_page(where.name, title, [], life=life, query=query))
    shown = found if wanted.uid is not None else interleave_groups(found[-N_ON_PAGE:])
    return render(episodes_page(where.name, f"{title}; {summary(found, len(shown))}", shown, life=life, query=query))


def wanted_of(query: Mapping[str, str]) -> Wanted:
    """The filters of a query; empty ones have no effect. Raises ValueError."""
    kinds: dict[str, Callable[[str], Any]] = {
        "step": int,
        "uid": int,
        "sample": int,
        "reward": range_of,
        "tokens": range_of,
    }
    given = {name: value.strip() for name, value in query.items() if name in FILTERS and value.strip()}
    if given.get("verdict", "none") not in VERDICTS:
        raise ValueError(f"unknown verdict {given['verdict']!r}: it is one of {', '.join(VERDICTS)}")
    return Wanted(**{name: kinds.get(name, str)(value) for name, value in given.items()})


def life_of(where: Run, uid: int, evaluation: str = "") -> PageTable | None:
    """What happened to the prompt so far, also one whose samples are in flight; None for an unknown one."""
    rows = prompt.rows_of(list(prompt.life(where, uid, evaluation)), uid)
    return PageTable(["seconds", "from", "what"], rows, right=frozenset({0})) if rows else None


def write_page(where: Run, title: str, samples: Sequence[Line], uid: int | None, path: Path) -> int:
    """Write the page of `areal-bus samples --html`. Raises ConfigError when it cannot be written."""
    life = None if uid is None else life_of(where, uid, samples[0]["evaluation"])
    return write(episodes_page(where.name, title, samples, life=life), path)


def link_of(sample: Line) -> str:
    """The page of a sample, beside the report."""
    return f"episodes/{int(sample['uid'])}-{int(sample['sample'])}-{int(sample['attempt'])}.html"


def query_link(sample: Line, token: str) -> str:
    named = f"&evaluation={quote(sample['evaluation'])}" if sample["evaluation"] else ""
    return f"samples?token={quote(token)}&uid={int(sample['uid'])}&sample={int(sample['sample'])}{named}"


def pages_of(run: str, samples: Iterable[Line]) -> list[tuple[str, Page]]:
    """A page for each sample, by the path that `link_of` gives."""
    return [(name, episodes_page(run, "Episode", [one])) for name, one in {link_of(s): s for s in samples}.items()]
