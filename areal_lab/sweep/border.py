"""Fits how much of the score is left at a lag and a learning rate: share = 1 / (1 + (lag * lr / x) ** p).

`share` is the mean score of a cell over that of lag 0 at the same learning rate, paired by seed. x, in versions times
learning rate, is where half of the score is left. Where the claim "the loss grows with lag times learning rate" holds,
one x and p fit all learning rates. The interval comes from seeds drawn with replacement (bootstrap).

python -m areal_lab.sweep.border runs.csv --algorithm rloo-naive
"""

import argparse
import csv
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from pathlib import Path
from statistics import fmean

from areal_bus.errors import ConfigError
from tools import terminal

XS = [exp(log(1e-6) + i * log(1e6) / 400) for i in range(401)]  # 1e-6 to 1
POWERS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)
RESAMPLES = 400

Scores = Mapping[tuple[float, float], Mapping[int, float]]  # (lag, lr) -> seed -> score


@dataclass(frozen=True, slots=True)
class Fit:
    """The best x and p, and the root mean square error of the share over cells."""

    x: float
    power: float
    error: float

    def share(self, product: float) -> float:
        """Of the score at this lag times learning rate."""
        return 1 / (1 + float((product / self.x) ** self.power))


def read_scores(path: Path, algorithm: str, where: Mapping[str, str] | None = None) -> Scores:
    """Scores of the rows with these values in these columns. Raises ConfigError without a table, for one without the
    columns or such rows, and for two rows of one lag, learning rate and seed.
    """
    where = where or {}
    if not path.is_file():
        raise ConfigError(f"RUNS.CSV must be a file, the runs.csv of a sweep over lag and lr: there is no {path}")
    found: dict[tuple[float, float], dict[int, float]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            missing = {"exact_lag", "lr", "algorithm", "seed", "score", *where} - row.keys()
            if missing:
                raise ConfigError(f"{path} must be the runs.csv of a sweep over lag and lr: it lacks {sorted(missing)}")
            if row["algorithm"] == algorithm and row["score"] and all(row[name] == x for name, x in where.items()):
                cell = found.setdefault((float(row["exact_lag"]), float(row["lr"])), {})
                if int(row["seed"]) in cell:
                    raise ConfigError(
                        f"{path} has two runs of lag {row['exact_lag']}, lr {row['lr']} and seed {row['seed']}: choose "
                        "by a column, for example --where task=reverse --where family=llama"
                    )
                cell[int(row["seed"])] = float(row["score"])
    if not found:
        rows = "".join(f", {name} = {value}" for name, value in where.items())
        raise ConfigError(f"{path} has no run of algorithm = {algorithm}{rows}")
    return found


def chosen(each: Iterable[str]) -> dict[str, str]:
    """Column -> value of the options --where. Raises ConfigError for one without a column or "="."""
    found = dict[str, str]()
    for text in each:
        column, equals, value = text.partition("=")
        if not (column and equals):
            raise ConfigError(f"--where must be COLUMN=VALUE, as in task=reverse: it is {text!r}")
        found[column] = value
    return found


def shares(scores: Scores, seeds: Sequence[int]) -> list[tuple[float, float]]:
    """(lag * lr, share) of the cells with a lag. Both means are over the seeds that the cell and its lag 0 have."""
    made = []
    for (lag, lr), cell in scores.items():
        none = scores.get((0.0, lr), {})
        common = [seed for seed in seeds if seed in cell and seed in none]
        if lag and common and (base := fmean(none[seed] for seed in common)) > 0:
            made.append((lag * lr, fmean(cell[seed] for seed in common) / base))
    return made


def fit(points: Iterable[tuple[float, float]]) -> Fit:
    """Least squares over a grid of x and p. Raises ConfigError without points."""
    points = list(points)
    if not points:
        raise ConfigError("a fit needs cells with a lag and the cell of lag 0 at the same learning rate")
    fits = (Fit(x, power, 0.0) for x in XS for power in POWERS)
    best = min(fits, key=lambda one: squares(one, points))
    return Fit(best.x, best.power, sqrt(squares(best, points) / len(points)))


def squares(one: Fit, points: Sequence[tuple[float, float]]) -> float:
    return sum((share - one.share(product)) ** 2 for product, share in points)


def interval(scores: Scores, *, seed: int = 1) -> tuple[float, float]:
    """95 % bootstrap interval of x over the seeds that all cells have. Raises ConfigError without two of them."""
    seeds = sorted(set.intersection(*(set(cell) for cell in scores.values())))
    if len(seeds) < 2:
        raise ConfigError(f"an interval needs two seeds that all cells have: there are {len(seeds)}")
    draw = random.Random(seed)
    found = sorted(fit(shares(scores, draw.choices(seeds, k=len(seeds)))).x for _ in range(RESAMPLES))
    return found[int(0.025 * RESAMPLES)], found[int(0.975 * RESAMPLES) - 1]


def main() -> int:
    p = argparse.ArgumentParser("python -m areal_lab.sweep.border", description=(__doc__ or "").partition("\n")[0])
    p.add_argument("table", type=Path, metavar="RUNS.CSV", help="runs.csv of a sweep with exact_lag, lr and algorithm")
    p.add_argument("--algorithm", required=True, metavar="NAME", help="value of the column algorithm")
    p.add_argument("--lr", type=float, action="append", metavar="X", help="only this learning rate (may repeat)")
    p.add_argument("--where", action="append", default=[], metavar="COLUMN=VALUE", help="only these rows (may repeat)")
    args = p.parse_args()
    scores = read_scores(args.table, args.algorithm, chosen(args.where))
    if args.lr:
        scores = {(lag, lr): cell for (lag, lr), cell in scores.items() if lr in args.lr}
    points = shares(scores, sorted({seed for cell in scores.values() for seed in cell}))
    found = fit(points)
    low, high = interval(scores)
    print(f"half of the score is left at lag * lr = {found.x:.2e} [{low:.2e}, {high:.2e}], power {found.power:g}")
    print(f"root mean square error of the share: {found.error:.3f} over {len(points)} cells")
    return 0


if __name__ == "__main__":
    terminal.end(main)
