"""Bench `code`: canonical solutions a second that one worker scores, at both levels of the sandbox.

`per_core_s` counts CPU time of the worker and of all processes of the sandbox, so other load changes it little;
`per_s` is the wall clock.
"""

import json
from pathlib import Path
from typing import Any

from areal_bus.errors import ConfigError
from benchmarks.harness import pace, worker_process
from benchmarks.harness.protocol import Figures

DATA = worker_process.ROOT.parent / "shared" / "data"
FILES = {"humaneval": DATA / "humaneval" / "HumanEval.jsonl", "mbppplus": DATA / "mbppplus" / "test.jsonl"}
ROWS = 40  # of each file, evenly over it


class CodeBench:
    about = "canonical solutions a second in the sandbox and at the level rlimits: HumanEval and MBPP+, one worker"

    def measure(self, *, quiet: bool) -> Figures:
        """Raises ConfigError without the files beside the checkout."""
        found: Figures = {"bench": "code", "rows": pace.of(ROWS, 6)}
        sets = {name: spaced(rows_of(file)) for name, file in FILES.items()}
        with worker_process.ours("code.ours") as side:
            for level in side.ask("levels"):
                for number, (name, rows) in enumerate(sets.items(), start=1):
                    pace.say(number, len(sets), f"{level}, set")
                    found |= figures(f"{name}_{level}", len(rows), side.ask("solutions", rows=rows, level=level))
        return found


def rows_of(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        raise ConfigError(f"the bench code needs the published file {file}: docs/tasks.md says where to get it")
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def spaced(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """ROWS of them at equal distances, fewer in a quick bench."""
    n = min(pace.of(ROWS, 6), len(rows))
    return [rows[i * len(rows) // n] for i in range(n)]


def figures(name: str, n: int, taken: dict[str, Any]) -> Figures:
    return {
        f"{name}_passed": f"{taken['passed']} of {n}",
        f"{name}_per_core_s": round(n / taken["cpu_s"], 2),
        f"{name}_cpu_ms": round(1000 * taken["cpu_s"] / n),
        f"{name}_per_s": round(n / taken["wall_s"], 2),
    }
