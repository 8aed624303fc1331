"""Bench `parity`: one step on the same completions, then whole runs of ours at eta 0 and 1 and of TRL's GRPOTrainer.

Every finished run is a JSON line of runs/benchmarks/parity/TASK.jsonl (with --quick in parity-quick) and is not
repeated; remove the file to start over. Sides take turns within each seed, in an order that rotates.
"""

import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.harness import pace, worker_process
from benchmarks.harness.protocol import Figures
from benchmarks.jobs.demo import ROOT
from benchmarks.parity import ours
from benchmarks.parity.curves import draw
from benchmarks.parity.setting import SPELL, SUMS, Task
from tools.report.facts.seeds import Difference, Mean, mean_over, paired

FOLDER = ROOT / "runs" / "benchmarks"
SIDES = ("ours-0", "trl", "ours-1")  # the number is eta
MARGIN = 0.1  # of the mean reward of a run: a larger difference counts
QUICK = replace(SPELL, updates=8)

RunLine = dict[str, Any]


class Parity:
    about = "one step and whole runs beside TRL's GRPOTrainer: reward, held-out score, 95 % intervals (resumes)"

    def measure(self, *, quiet: bool) -> Figures:
        """All runs that the files do not have. Raises ConfigError without the peers, SmolLM2 or mpirun."""
        place = FOLDER / pace.of("parity", "parity-quick")
        figures: Figures = {"bench": "parity", "margin": MARGIN, "folder": str(place)}
        for task in pace.of((SPELL, SUMS), (QUICK,)):
            seeds = range(1, 1 + pace.of(task.seeds, 2))
            ours.write_rows(task, place / task.name, seeds)
            model = ours.start_model(task, place / task.name, quiet=quiet)
            step = one_step(task, place, model)
            lines = list(all_runs(task, place, model, seeds, quiet=quiet))
            draw({side: of_side(lines, side) for side in SIDES}, task.batch, place / f"{task.name}.svg")
            figures[task.name] = {"step": step, **summary(lines)}
        return figures


def one_step(task: Task, place: Path, model: Path) -> dict[str, float]:
    """Differences of one update on the same completions; kept in a file."""
    file = place / f"{task.name}-step.json"
    if not file.is_file():
        rows = str(place / task.name / "train-1.jsonl")
        with tempfile.TemporaryDirectory(prefix="parity-") as folder:
            gradient = f"{folder}/gradient.pt"
            same = {"name": task.name, "folder": str(model), "rows": rows, "gradient": gradient}
            with worker_process.peer("parity.trl") as theirs:
                batch = theirs.ask("step", out=folder, **same)
            with worker_process.ours("parity.step") as mine:
                file.write_text(json.dumps(mine.ask("compare", batch=batch, **same)) + "\n", encoding="utf-8")
    found: dict[str, float] = json.loads(file.read_text(encoding="utf-8"))
    return found


def all_runs(task: Task, place: Path, model: Path, seeds: range, *, quiet: bool) -> Iterator[RunLine]:
    """Every run, made or read, in turn. A line of other settings does not count."""
    file, setting = place / f"{task.name}.jsonl", asdict(task)
    known = {(line["side"], line["seed"]): line for line in read_lines(file) if line["setting"] == setting}
    order = [(SIDES[(i + seed) % len(SIDES)], seed) for seed in seeds for i in range(len(SIDES))]
    missing = [one for one in order if one not in known]
    began = time.monotonic()
    with ExitStack() as stack:
        theirs = stack.enter_context(worker_process.peer("parity.trl")) if missing else None
        for number, (side, seed) in enumerate(missing, start=1):
            pace.say(number, len(missing), f"{task.name}: {side}, seed {seed}: run", time.monotonic() - began)
            line: RunLine = {"side": side, "seed": seed, "setting": setting}
            if side == "trl" and theirs is not None:
                files = {"rows": str(place / task.name / f"train-{seed}.jsonl")}
                files |= {"held_out": str(place / task.name / "held-out.jsonl"), "out": str(place / "trl")}
                line |= theirs.ask("train", name=task.name, folder=str(model), seed=seed, n=task.updates, **files)
            else:
                eta = int(side.rpartition("-")[2])
                line |= ours.train(task, place / task.name, model, seed=seed, eta=eta, quiet=quiet)
            known[side, seed] = line
            with file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(line) + "\n")
    yield from (known[one] for one in order)


def read_lines(file: Path) -> list[RunLine]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []


def of_side(lines: Sequence[RunLine], side: str) -> list[RunLine]:
    return [line for line in lines if line["side"] == side]


def summary(lines: Sequence[RunLine]) -> Figures:
    """Each side's figures, and of ours the differences from TRL paired by seed."""
    found: Figures = {"seeds": len({line["seed"] for line in lines})}
    for side in SIDES:
        mine = of_side(lines, side)
        found[side] = {
            "area": shown(mean_over([area(line) for line in mine])),
            "held_out": shown(mean_over([line["after"] for line in mine])),
            "seconds": shown(mean_over([line["updates"][-1]["s"] for line in mine])),
            "length_last": round(fmean(line["updates"][-1]["length"] for line in mine), 2),
        }
        found[side] |= {"held_out_before": next((x for line in mine if (x := line["before"]) is not None), None)}
    for side in SIDES:
        if side != "trl":
            found[f"{side} minus trl"] = difference(lines, side)
    return found


def area(line: RunLine) -> float:
    """Mean reward over all updates: the area under the curve over samples, divided by its width."""
    return fmean(update["reward"] for update in line["updates"])


def difference(lines: Sequence[RunLine], side: str) -> dict[str, Any]:
    """Of area and held-out score, mean and 95 % interval (Student's t), and whether the areas are equal."""

    def of(name: str) -> Mapping[int, float]:
        return {line["seed"]: area(line) for line in of_side(lines, name)}

    def score(name: str) -> Mapping[int, float]:
        return {line["seed"]: line["after"] for line in of_side(lines, name)}

    areas = paired(of(side), of("trl"))
    return {
        "area": interval(areas),
        "held_out": interval(paired(score(side), score("trl"))),
        "verdict": verdict(areas),
    }


def verdict(areas: Difference | None) -> str:
    """Equal: the interval contains 0 and is within the margin on both sides."""
    if areas is None or areas.low is None or areas.high is None:
        return "one seed only"
    if not areas.low <= 0 <= areas.high:
        return areas.verdict
    return "equal" if max(-areas.low, areas.high) <= MARGIN else "not decided: the interval is wider than the margin"


def shown(mean: Mean | None) -> list[float]:
    """[mean, standard error]; the mean alone for one seed."""
    return [] if mean is None else [round(value, 4) for value in (mean.value, mean.se) if value is not None]


def interval(one: Difference | None) -> list[float]:
    """[mean, low, high]."""
    return [] if one is None else [round(value, 4) for value in (one.mean, one.low, one.high) if value is not None]
