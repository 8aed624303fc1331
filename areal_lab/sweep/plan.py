"""Reads a sweep file and makes its jobs: every cell of every block, once for each seed.

A cell is one value on each axis. An axis is a config key with values ([grid]) or a name with named sets of keys
([variants.NAME]). A block is a separate grid that inherits the keys at the top of the file.
"""

import hashlib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from areal_bus.config import loader
from areal_bus.errors import ConfigError
from areal_lab.settings import LabConfig, load

Setting = bool | int | float | str | list[Any] | dict[str, Any]
Keys = dict[str, Setting]  # config key -> value
MAX_NAME = 120  # characters of a job's folder
SEED = "run.seed"
METRICS = ("avg_at_k", "maj_at_k", "pass_at_k", "accuracy", "reward")  # of an evaluation; "reward:NAME" for a part


class Block(BaseModel):
    """A grid: `set` for all cells, axes in `grid` and `variants`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    config: Path | None = None
    seeds: int | list[int] | None = None
    set: Keys = {}
    grid: dict[str, list[Setting]] = {}
    variants: dict[str, dict[str, Keys]] = {}
    labels: dict[str, str] = {}


class SweepFile(BaseModel):
    """A whole sweep file."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    config: Path
    seeds: int | list[int] = 5
    out: Path | None = None
    ranks: int = Field(4, ge=1)
    metric: str = "avg_at_k"
    x: str = ""
    baseline: dict[str, Setting] = {}
    set: Keys = {}
    grid: dict[str, list[Setting]] = {}
    variants: dict[str, dict[str, Keys]] = {}
    labels: dict[str, str] = {}
    block: list[Block] = []


@dataclass(frozen=True, slots=True)
class Job:
    """One run: a cell with a seed."""

    config: Path
    cell: Mapping[str, str]  # axis -> value, as text
    keys: Mapping[str, Setting]  # all settings over the config file
    seed: int
    digest: str  # of everything that decides the result

    @property
    def name(self) -> str:
        """Name of its folder, as run.name allows it."""
        of = [f"{axis.rpartition('.')[2]}-{value}" for axis, value in [*self.cell.items(), ("seed", self.seed)]]
        text = re.sub(r"[^A-Za-z0-9._-]+", "-", ".".join(of))
        return f"{text[:MAX_NAME]}-{self.digest[:8]}"

    @property
    def options(self) -> list[str]:
        """As `--set` options."""
        return [f"{key}={as_toml(value)}" for key, value in self.keys.items()]

    def load(self) -> LabConfig:
        """Raises ConfigError for settings that no run accepts."""
        try:
            return load(self.config, self.options)
        except ConfigError as error:
            cell = ", ".join(f"{axis} = {value}" for axis, value in self.cell.items())
            raise ConfigError(f"cell ({cell}): {error}") from None


def as_toml(value: Setting) -> str:
    """A value as on a command line."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {as_toml_item(item)}" for key, item in value.items()) + "}"
    return as_toml_item(value)


def as_toml_item(value: Any) -> str:
    return json.dumps(value)


def read_sweep(path: Path) -> SweepFile:
    """Raises ConfigError for a file that is no sweep."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        found = SweepFile.model_validate(tree)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        if (where, first["type"]) == ("config", "missing"):
            raise ConfigError(f'{path} is no sweep: it needs config = "FILE.toml", from which all jobs start') from None
        raise ConfigError(f"{path}: {where}: {first['msg']}") from None
    if not (found.grid or found.variants or found.block):
        raise ConfigError(f"{path} has no axis: add [grid] with config keys and lists, or [variants.NAME]")
    return found


def jobs_of(sweep: SweepFile, path: Path) -> list[Job]:
    """All jobs, seeds outermost: a sweep that is cut short has few seeds of all cells. A job that two blocks name is
    run once. Raises ConfigError for a cell that no run accepts, and for names that fit no cell.
    """
    found: dict[str, Job] = {}
    for block in sweep.block or [Block()]:
        for job in _block_jobs(sweep, block, path.parent):
            found.setdefault(job.digest, job)
    jobs = sorted(found.values(), key=lambda job: job.seed)
    _check_names(sweep, jobs)
    for cell in {tuple(job.cell.items()): job for job in reversed(jobs)}.values():
        if not cell.load().evaluate.after:
            raise ConfigError(f"the score of a job is that of its last evaluation: set evaluate.after = true ({path})")
    return jobs


def with_seeds(sweep: SweepFile, seeds: int) -> SweepFile:
    """The sweep with these seeds in all blocks."""
    blocks = [block.model_copy(update={"seeds": None}) for block in sweep.block]
    return sweep.model_copy(update={"seeds": seeds, "block": blocks})


def plot_axis(sweep: SweepFile) -> str:
    """The axis of the plot; "" without one."""
    return sweep.x or next((axis for grid in (sweep.grid, *(b.grid for b in sweep.block)) for axis in grid), "")


def _check_names(sweep: SweepFile, jobs: Sequence[Job]) -> None:
    """Raises ConfigError for a metric, axis or value that is not there: the table would only lack a column."""
    if sweep.metric not in METRICS and not sweep.metric.startswith("reward:"):
        raise ConfigError(f"metric is one of {', '.join(METRICS)} or reward:NAME: it is {sweep.metric!r}")
    values: dict[str, dict[str, None]] = {}  # axis -> its values, in order
    for job in jobs:
        for axis, value in job.cell.items():
            values.setdefault(axis, {})[value] = None
    for name, axes in (("baseline", [*sweep.baseline]), ("x", [sweep.x] if sweep.x else [])):
        for axis in axes:
            if axis not in values:
                raise ConfigError(f"{name} must name an axis: {axis!r} is none of {', '.join(values)}")
    for axis, wanted in sweep.baseline.items():
        if as_toml(wanted) not in values[axis]:
            known = ", ".join(values[axis])
            raise ConfigError(f"baseline must be a value of {axis}: {as_toml(wanted)} is none of {known}")


def _block_jobs(sweep: SweepFile, block: Block, folder: Path) -> Iterator[Job]:
    config = folder / (block.config or sweep.config)
    points: dict[str, list[tuple[str, Keys]]] = {
        key: [(as_toml(value), {key: value}) for value in values] for key, values in (sweep.grid | block.grid).items()
    }
    points |= {axis: list(variants.items()) for axis, variants in (sweep.variants | block.variants).items()}
    if empty := [axis for axis, values in points.items() if not values]:
        raise ConfigError(f"missing values of the axis {empty[0]}: an axis needs at least one")
    labels: list[tuple[str, str, Keys]] = [(axis, value, {}) for axis, value in (sweep.labels | block.labels).items()]
    for chosen in product(*[[(axis, name, keys) for name, keys in values] for axis, values in points.items()]):
        cell = {axis: name for axis, name, _ in [*labels, *chosen]}
        keys: Keys = sweep.set | block.set
        for _, _, of_value in chosen:
            keys = keys | of_value
        if SEED in keys:
            raise ConfigError(f"a sweep has its seeds in `seeds`: remove {SEED} from [set], [grid] and [variants]")
        for seed in seeds_of(sweep.seeds if block.seeds is None else block.seeds):
            yield _job(config, cell, keys | {SEED: seed}, seed, _settings(sweep))


def seeds_of(seeds: int | list[int]) -> list[int]:
    """A number n means seeds 1 to n. Raises ConfigError when there is none."""
    found = list(range(1, seeds + 1)) if isinstance(seeds, int) else seeds
    if not found:
        raise ConfigError(f"missing seeds of a sweep: seeds = {seeds}")
    return found


def _settings(sweep: SweepFile) -> Keys:
    """What else decides the result of a job, where it is not the default."""
    default = SweepFile.model_fields
    own: Keys = {"metric": sweep.metric, "ranks": sweep.ranks}
    return {name: value for name, value in own.items() if value != default[name].default}


def _job(config: Path, cell: Mapping[str, str], keys: Keys, seed: int, settings: Keys) -> Job:
    try:
        text = json.dumps(loader.read_file(config), sort_keys=True, default=str)
    except OSError as error:
        raise ConfigError(f"{config} cannot be read: {error.strerror}") from None
    what = json.dumps([text, dict(cell), keys, *([settings] if settings else [])], sort_keys=True)
    return Job(config, cell, keys, seed, hashlib.sha256(what.encode()).hexdigest())
