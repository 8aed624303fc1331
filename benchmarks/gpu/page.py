"""docs/gpu.md from the figures of the bench `gpu`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import GIVEN, PARTS, Size
from benchmarks.gpu.shapes import SHAPES, card_of, decode_bound, training_flops

RESULTS = Path(__file__).with_name("results.json")  # of a run on a card, copied here
FULL = Size("cuda", is_quick=False)
LENGTH, CONTEXT, BYTES = FULL.length, GIVEN + FULL.n_new / 2, 2
NOT_YET = "Not yet run on a GPU."


def page(results: Mapping[str, Any] | None = None) -> str:
    """The generated part of the page. `results`: those of RESULTS if it exists."""
    if results is None:
        results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    about = {name: (function.__doc__ or "").split("\n")[0] for name, (function, _) in PARTS.items()}
    if not results:
        return "\n".join(
            [NOT_YET, "", *(f"- `{name}`: {first} {PARTS[name][1]:.0f} s." for name, first in about.items())]
        )
    lines = []
    for name, first in about.items():
        budget_s = PARTS[name][1]
        lines += [f"### {name}", "", f"{first} Budget: {budget_s:.0f} s.", "", *table(results.get(name)), ""]
    return "\n".join(lines).rstrip()


def bounds() -> str:
    """What a card could do at best, by the formulas of shapes.py."""
    lives = (1, 64, 256)
    heads = ["card", "shape", "training tokens/s at 35 % MFU", *(f"decode bound at {n} live samples" for n in lives)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in ("H100", "H200"):
        card = card_of(name, (0.0, 0.0))
        for shape in ("0.5b", "1.5b"):
            training = 0.35 * card.flops / training_flops(SHAPES[shape], LENGTH)
            decoding = (decode_bound(SHAPES[shape], card, n, CONTEXT, BYTES) for n in lives)
            lines.append(f"| {name} | {shape} | {' | '.join(f'{rate:,.0f}' for rate in (training, *decoding))} |")
    return "\n".join(lines)


def table(part: Mapping[str, Any] | None) -> list[str]:
    if not part or not part["rows"]:
        return [NOT_YET if not part else f"No figure: {part['end']}."]
    columns = list(dict.fromkeys(key for row in part["rows"] for key in row))
    rows = [[cell(row.get(key, "")) for key in columns] for row in part["rows"]]
    lines = [" | ".join(columns), " | ".join("---" for _ in columns), *(" | ".join(row) for row in rows)]
    note = [] if part["end"] == "whole" else ["", f"Ended by: {part['end']}."]
    return [*(f"| {line} |" for line in lines), *note]


def cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
