"""Which page has which generated parts."""

from collections.abc import Callable, Mapping
from pathlib import Path

from areal_bus.core.members.membership import MEMBER_STATES
from areal_bus.core.parts.ledger import PROMPT_STATES
from areal_convert.areal import AREAL
from areal_convert.trl import TRL
from areal_convert.verl import VERL
from benchmarks.gpu import page as gpu
from tests.generated_docs import algorithms, converted_keys, settings, states
from tests.structure import as_table, measure

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
BEGIN, END = "<!-- generated: {} -->", "<!-- end of {} -->"
Parts = Mapping[str, Callable[[], str]]

PAGES: Mapping[str, Parts] = {
    "algorithms.md": {
        "algorithms": algorithms.algorithms,
        "parts": algorithms.parts,
        "combinations": algorithms.combinations,
    },
    "from-verl.md": {"keys": lambda: converted_keys.list_of(VERL)},
    "from-trl.md": {"keys": lambda: converted_keys.list_of(TRL)},
    "from-areal.md": {"keys": lambda: converted_keys.list_of(AREAL)},
    "glossary.md": {
        "prompt states": lambda: states.rows(PROMPT_STATES),
        "member states": lambda: states.rows(MEMBER_STATES),
    },
    "gpu.md": {"bounds": gpu.bounds, "results": gpu.page},
    "architecture.md": {"figures": lambda: as_table(measure(ROOT))},
}


def generated() -> dict[str, str]:
    """The text of each page that is generated in whole or in part."""
    texts = {name: with_parts((DOCS / name).read_text(encoding="utf-8"), parts) for name, parts in PAGES.items()}
    return texts | {"config.md": settings.page()}


def with_parts(text: str, parts: Parts) -> str:
    """The page with its generated parts as the code gives them now. Raises ValueError for missing marks."""
    for name, part in parts.items():
        begin, end = BEGIN.format(name), END.format(name)
        before, found, rest = text.partition(begin)
        if not found or end not in rest:
            raise ValueError(f"missing marks {begin} ... {end}")
        text = f"{before}{begin}\n\n{part()}\n\n{end}{rest.partition(end)[2]}"
    return text
