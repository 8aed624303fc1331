"""Which run a start goes on with, and what of its settings may be others than before; starts and writes nothing."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_bus.config.sections import Config
from areal_bus.errors import ArealBusError, ConfigError
from launch.runs import (
    CONFIG,
    ORIGIN,
    Lock,
    Running,
    check_free,
    checkpoints,
    is_finished,
    n_done,
    named,
    no_run,
    read_object,
)
from launch.settings_help import toml_value

AUTO = "auto"
WAIT_S = 100.0  # that "auto" waits for the end of a job before it: a network file system may keep a dead node's lock
WHERE = {"run.folder", "run.name", "run.resume"}  # where the run is, which --resume says
FIXED: dict[str, str] = {  # section or key, the longest that fits decides: why it stays, or "" where it may change
    "run": "",
    "run.seed": "the order of the data, the first weights and every sampled token are drawn from it",
    "launch": "",
    "topology": "",
    "bus": "",
    "model": "checkpoints and all versions in the journal are of one model",
    "data": "a uid stands for the same prompt throughout a run (I4)",
    "data.batch_size": "the backlog of prompts that are open is counted in batches (I1, I2)",
    "data.total_train_epochs": "",
    "data.drop_last": "",
    "data.max_refill": "one bound judges all refunds of a run (I3)",
    "data.max_prompt_tokens": "",
    "engine": "",
    "workflow": "the samples of an open group come from one workflow (I8)",
    "rollout": "",
    "rollout.max_head_offpolicyness": "open prompts were admitted under it and have to fit again (I1, I2)",
    "rollout.staleness_policy": "open prompts were admitted under its rule, and one rule holds for a whole run (I2)",
    "gconfig": "the samples of an open group are drawn alike, and those that are there stay (I5, I8)",
    "reward": "",
    "reward.function": "the rewards of an open group are compared with each other (I8)",
    "reward.on_timeout": "one rule judges all verdicts of a run, those of open groups included (I8, I10)",
    "reward.on_error": "one rule judges all verdicts of a run, those of open groups included (I8, I10)",
    "reward.partial_groups": "one rule judges all verdicts of a run, those of open groups included (I8, I10)",
    "actor": "",
    "learner": "",
    "learner.warmup": "version 0 was made with it, and a run may have to go back there",
    "weights": "",
    "checkpoint": "",
    "evaluate": "",
    "watchdog": "",
    "journal": "",
    "journal.dir": "the history of a run lies in one folder",
}


@dataclass(frozen=True, slots=True)
class Change:
    """One setting that is not what it was."""

    key: str
    old: str
    new: str
    reason: str  # why it must stay; "" when it may change

    def __str__(self) -> str:
        return f"{self.key}: {self.old} -> {self.new}"


class NothingLeft(ArealBusError):
    """A start with "auto" waited for a job that has now finished the run: end well, for the work is done."""


@contextmanager
def one_by_one(config: Config, name: str) -> Iterator[None]:
    """Starts with "auto" choose one after the other, so that a second one sees the run that the first has begun.

    Raises ConfigError when the one before needs longer than WAIT_S, or where no run can be.
    """
    if config.run.resume != AUTO:
        yield
        return
    try:
        config.run.folder.mkdir(parents=True, exist_ok=True)
        lock = Lock(config.run.folder, wait_s=WAIT_S, name=f".{name}.lock")
    except OSError as error:
        raise ConfigError(
            f"run.folder must be a folder that can be written: {config.run.folder}: {error.strerror}"
        ) from None
    except Running as error:
        raise ConfigError(
            f'starts of {name!r} with run.resume = "{AUTO}" choose their run one by one: {error.holder} still does'
        ) from None
    try:
        yield
    finally:
        lock.release()


def choose_run(config: Config, name: str) -> tuple[Path, Lock] | None:
    """The run to go on with, locked; None for a new one. `name` is what a new run would be called.

    Raises ConfigError when the run that is named is none, is finished or runs now; NothingLeft when "auto" has waited
    for the end of the very job that it would have begun.
    """
    run = find(config, name)
    if run is None:
        return None
    lock = Lock(run, wait_s=WAIT_S if config.run.resume == AUTO else 0.0)
    if config.run.resume != AUTO and is_finished(run):
        check_extends(run, config)
        return run, lock
    if not is_finished(run):
        return run, lock
    lock.release()  # it has finished while this start waited
    raise NothingLeft(f'run.resume = "{AUTO}": {run} has been finished by the job before this one: nothing is left')


def find(config: Config, name: str) -> Path | None:
    """As `choose_run`, without a lock."""
    wanted = config.run.resume
    if not wanted:
        return None
    if wanted == AUTO:
        unfinished = (run for run in named(config.run.folder, name) if is_of(run, name) and not is_finished(run))
        run = next(unfinished, None)
        return run.resolve() if run is not None else None
    run = Path(wanted).resolve()
    if not (run / CONFIG).is_file():
        raise ConfigError(f"--resume takes the folder of a run, or {AUTO}: {no_run(wanted, config.run.folder)}")
    if is_finished(run):
        check_extends(run, config)
    return run


def check_extends(run: Path, new: Config) -> None:
    """Raises ConfigError unless a finished run has more to do with these settings, and a checkpoint to go on from."""
    done, old = n_done(run), saved(run)
    epochs, was = new.data.total_train_epochs, old.data.total_train_epochs
    has_more_data = was is not None and (epochs is None or epochs > was)
    wanted = "run.total_train_steps"
    if done < old.run.total_train_steps and not has_more_data:
        wanted = f"data.total_train_epochs (its data ended: it was {was}) and {wanted}"
    elif new.run.total_train_steps > done and checkpoints(run):
        return
    elif not checkpoints(run):
        raise ConfigError(f"a finished run goes on from its last checkpoint: {run} has none; start a new one")
    raise ConfigError(
        f"a finished run goes on only when it has more to do: {run} has finished at version {done}; raise {wanted} "
        f"(--resume {run} --set run.total_train_steps={2 * done}), or start a new one, from its model if you like "
        f'(model.path = "{run / "model"}")'
    )


def is_of(run: Path, name: str) -> bool:
    """Whether `name` is what this run was called, before a number was added."""
    config, origin = read_object(run / CONFIG), read_object(run / ORIGIN)
    return (config.get("run", {}).get("name") or Path(origin.get("config", "")).stem) == name


def compare(old: Config, new: Config) -> list[Change]:
    """Every setting that differs, in order."""
    before, after = flat(old.model_dump(mode="json")), flat(new.model_dump(mode="json"))
    return [
        Change(key, toml_value(before.get(key)), toml_value(after.get(key)), reason_to_stay(key))
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key) and key not in WHERE
    ]


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def reason_to_stay(key: str) -> str:
    while key not in FIXED:
        key, dot, _ = key.rpartition(".")
        if not dot:
            return "nobody has shown that a run can go on with another one"
    return FIXED[key]


def changes(run: Path, new: Config) -> list[Change]:
    """What the run goes on with that it did not begin with. Raises ConfigError that names each that must stay."""
    found = compare(saved(run), new)
    stay = [change for change in found if change.reason]
    if stay:
        listed = "; ".join(f"{change} ({change.reason})" for change in stay)
        raise ConfigError(f"{run} cannot be resumed with other values of these settings: {listed}; {way_out(new)}")
    reached = max((int(path.name.removeprefix("step-")) for path in checkpoints(run)), default=0)
    if new.run.total_train_steps < reached:
        raise ConfigError(
            f"run.total_train_steps must not be below the version of a checkpoint: it is {new.run.total_train_steps}, "
            f"and {run} has one of version {reached}"
        )
    return found


def way_out(config: Config) -> str:
    if config.run.resume == AUTO:
        return 'set them back, or start a new run with another run.name (or run.resume = "")'
    return "set them back, or start a new run"


def saved(run: Path) -> Config:
    """The settings that the run's last life had. Raises ConfigError when this version cannot read them."""
    try:
        return Config.model_validate_json((run / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[:2]
        raise ConfigError(f"{run / CONFIG} must hold settings of this version: {' '.join(first)}") from None


def next_life(run: Path) -> int:
    """1 for a new run; the settings of each life that has ended were put aside when the next began."""
    return 2 + len(list(run.glob("config-*.json")))


def announce(run: Path, found: list[Change]) -> list[str]:
    """What people are told before a run goes on."""
    n = f"{len(found)} changed setting{'s' if len(found) != 1 else ''}" + (":" if found else "")
    folders = [path.name for path in checkpoints(run)]
    kept = f"checkpoints {', '.join(folders)}" if folders else "no checkpoint yet, so from version 0"
    what = f"extends {run}, which had finished at version {n_done(run)}" if is_finished(run) else f"resumes {run}"
    return [f"{what} (life {next_life(run)}; {kept}), with {n}", *(f"  {change}" for change in found)]


def preview(config: Config, file: Path) -> list[str]:
    """For --dry-run: what `choose_run` and `changes` come to."""
    name = config.run.name or file.stem
    run = find(config, name)
    if run is None:
        return [nothing(config, name)] if config.run.resume else []
    check_free(run)
    return announce(run, changes(run, config))


def nothing(config: Config, name: str) -> str:
    return f'run.resume = "{AUTO}": {config.run.folder} has no unfinished run of {name!r}, so a new one starts'
