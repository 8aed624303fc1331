"""Chooses the run that a start resumes, and checks which of its settings have changed."""

import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_bus.config.removed import ignored, saved
from areal_bus.config.sections import Config
from areal_bus.config.stages import settings_by_stage
from areal_bus.core.evaluation import has_stopped_improving, history
from areal_bus.errors import ArealBusError, ConfigError
from areal_bus.storage.atomic_file import read_object
from areal_bus.storage.versioned_dirs import version_of
from launch.plan.settings_text import toml_value
from launch.run import runs

AUTO = "auto"
EARLIER_CONFIG = re.compile(r"config-[0-9]+\.json")
AUTO_WAIT_S = 100.0  # "auto" waits for the end of the job before: a network file system may keep a dead node's lock
LOCATION_KEYS = {"run.folder", "run.name", "run.resume"}  # --resume gives the location of the run
FIXED_KEYS: dict[str, str] = {  # section or key (the longest match decides): why it is fixed; "" when it may change
    "run": "",
    "run.stage": "open prompts keep the limits of the stage that they were admitted in (I5, I8)",
    "run.seed": "the order of the data, the first weights and every sampled token are drawn from it",
    "launch": "",
    "topology": "",
    "bus": "",
    "model": "checkpoints and all versions in the journal are of one model",
    "data": "a uid means the same prompt throughout a run (I4)",
    "data.batch_size": "the backlog of open prompts is counted in batches (I1, I2)",
    "data.total_train_epochs": "",
    "data.drop_last": "",
    "data.max_refill": "one bound judges all refunds of a run (I3)",
    "data.max_prompt_tokens": "",
    "data.long_prompts": "",
    "engine": "",
    "workflow": "the samples of an open group come from one workflow (I8)",
    "rollout": "",
    "rollout.max_head_offpolicyness": "open prompts were admitted under it and must fit again (I1, I2)",
    "rollout.staleness_policy": "open prompts were admitted under its rule, and one rule holds for a whole run (I2)",
    "gconfig": "all samples of an open group have one distribution, and finished ones are kept (I5, I8)",
    "reward": "",
    "reward.function": "the rewards of an open group are compared with each other (I8)",
    "reward.group": "open groups were compared by it, or wait for it (I8)",
    "reward.on_timeout": "one rule judges all verdicts of a run, those of open groups included (I8, I10)",
    "reward.on_error": "one rule judges all verdicts of a run, those of open groups included (I8, I10)",
    "reward.partial_groups": "one rule judges all verdicts of a run, those of open groups included (I8, I10)",
    "actor": "",
    "actor.algorithm": "it sets keys when a run begins; set those keys",
    "actor.lora": "checkpoints hold the adapters that it describes, or whole models without it",
    "actor.lora.dropout": "",
    "actor.optimizer": "checkpoints hold its state",
    "reference": "",
    "reference.path": "checkpoints may hold the reference model that came from it",
    "teacher": "",
    "critic": "",
    "learner": "",
    "learner.warmup": "version 0 was made with it, and a run may restart at version 0",
    "weights": "",
    "checkpoint": "",
    "evaluate": "",
    "watchdog": "",
    "journal": "",
    "watch": "",
    "profile": "",
    "serve": "",
    "journal.dir": "one folder holds the journal of a run",
}


@dataclass(frozen=True, slots=True)
class Change:
    """One setting whose value has changed."""

    key: str
    old: str
    new: str
    reason: str  # why it is fixed; "" when it may change

    def __str__(self) -> str:
        return f"{self.key}: {self.old} -> {self.new}"


class AlreadyFinished(ArealBusError):
    """A start with "auto" waited for a job that has now finished the run. It ends with exit code 0."""


@contextmanager
def exclusive_choice(config: Config, name: str, *, wait_s: float = AUTO_WAIT_S) -> Iterator[None]:
    """Lock the choice of a run with "auto" against a second start. Raises ConfigError after `wait_s`, or unwritable."""
    if config.run.resume != AUTO:
        yield
        return
    try:
        config.run.folder.mkdir(parents=True, exist_ok=True)
        lock = runs.Lock(config.run.folder, wait_s=wait_s, name=f".{name}.lock")
    except OSError as error:
        raise ConfigError(f"run.folder must be a writable folder: {config.run.folder}: {error.strerror}") from None
    except runs.RunInUse as error:
        rule = f'only one start of {name!r} with run.resume = "{AUTO}" may choose its run at a time'
        raise ConfigError(f"{rule}: {error.holder} holds the lock") from None
    try:
        yield
    finally:
        lock.release()


def choose_run(config: Config, name: str) -> tuple[Path, runs.Lock] | None:
    """The run to resume, with its lock; None for a new run. `name`: of a new run.

    Raises ConfigError when run.resume names no run, a finished one or one that runs now; AlreadyFinished when "auto"
    has waited for a job that finished the run.
    """
    run = find_run(config, name)
    if run is None:
        return None
    lock = runs.Lock(run, wait_s=AUTO_WAIT_S if config.run.resume == AUTO else 0.0)
    if config.run.resume != AUTO and runs.is_finished(run):
        check_extends(run, config)
        return run, lock
    if not runs.is_finished(run):
        return run, lock
    lock.release()  # the run finished while this start waited
    raise AlreadyFinished(f'run.resume = "{AUTO}": the job before this one has finished {run}: nothing is left to do')


def find_run(config: Config, name: str) -> Path | None:
    """`choose_run` without a lock."""
    wanted = config.run.resume
    if not wanted:
        return None
    if wanted == AUTO:
        named = (run for run in runs.runs_named(config.run.folder, name) if is_named(run, name))
        return next((run.resolve() for run in named if not runs.is_finished(run)), None)
    run = Path(wanted).resolve()
    if not (run / runs.CONFIG).is_file():
        why = runs.why_no_run(wanted, config.run.folder)
        raise ConfigError(f"--resume takes the folder of a run, or {AUTO}: {why}")
    if runs.is_finished(run):
        check_extends(run, config)
    return run


def check_extends(run: Path, new: Config) -> None:
    """Raises ConfigError unless a finished run has a checkpoint, and more to do with the new settings."""
    done, old = runs.n_updates(run), saved_config(run)
    wanted, how = what_ended(run, old, new)
    if not wanted and new.run.total_train_steps > done and runs.checkpoints(run):
        return
    if not runs.checkpoints(run):
        raise ConfigError(f"no checkpoint in {run}: a finished run is extended from its last one; start a new run")
    if new.run.total_train_steps <= done:
        more = f"run.total_train_steps={2 * done}"
        wanted, how = f"{f'{wanted} and ' if wanted else ''}run.total_train_steps", f"{how} --set {more}".strip()
    remedy = f"raise {wanted} (--resume {shlex.quote(str(run))} {how})"
    other = f'start a new run from its model (model.path = "{run / "model"}")'
    rule = "a finished run continues only with more to do"
    raise ConfigError(f"{rule}: {run} has finished at version {done}; {remedy}, or {other}")


def what_ended(run: Path, old: Config, new: Config) -> tuple[str, str]:
    """What else ended the run and would end it again, with the option that continues it; "" for nothing."""
    key, patience = "evaluate.early_stop_patience", new.evaluate.early_stop_patience
    if stopped_early(run, old):
        if not stopped_early(run, new):
            return "", ""
        at = f"it stopped early, as {new.evaluate.metric} did not improve in {patience} evaluations; 0: never"
        return f"{key} ({at})", f"--set {key}=0"
    epochs, was = new.data.total_train_epochs, old.data.total_train_epochs
    if runs.n_updates(run) >= old.run.total_train_steps or was is None or epochs is None or epochs > was:
        return "", ""
    return f"data.total_train_epochs (its data ended: it was {was})", f"--set data.total_train_epochs={was + 1}"


def stopped_early(run: Path, config: Config) -> bool:
    """Whether the evaluations of a finished run end it early with these settings."""
    rule, figures = config.evaluate, read_object(run / runs.SUMMARY).get("evaluations", {})
    values = history(rule.metric_set, rule.metric, figures)
    return has_stopped_improving(values, patience=rule.early_stop_patience)


def is_named(run: Path, name: str) -> bool:
    """Whether the run was started with this name; its folder's name may have a number added."""
    config, origin = read_object(run / runs.CONFIG), read_object(run / runs.ORIGIN)
    return (config.get("run", {}).get("name") or Path(origin.get("config", "")).stem) == name


def changed_settings(old: Config, new: Config) -> list[Change]:
    before, after = flatten(old.model_dump(mode="json")), flatten(new.model_dump(mode="json"))
    return [
        Change(key, toml_value(before.get(key)), toml_value(after.get(key)), reason_fixed(key))
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key) and key not in LOCATION_KEYS
    ]


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def reason_fixed(key: str) -> str:
    while key not in FIXED_KEYS:
        key, dot, _ = key.rpartition(".")
        if not dot:
            return "no test shows that a run can continue with another value"
    return FIXED_KEYS[key]


def check_changes(run: Path, new: Config) -> list[Change]:
    """The changed settings. Raises ConfigError that lists the fixed ones among them."""
    old = saved_config(run)
    found = changed_settings(old, new)
    reached = max((version_of(path) for path in runs.checkpoints(run)), default=0)
    may_change = {"run.stage"} if is_later(old, new, reached) else set()
    fixed = [change for change in found if change.reason and change.key not in may_change]
    if fixed:
        listed = "; ".join(f"{change} ({change.reason})" for change in fixed)
        raise ConfigError(f"a resumed run keeps the values of these settings: {run}: {listed}; {what_to_do(new)}")
    if new.run.total_train_steps < reached:
        rule = "run.total_train_steps must not be below the version of a checkpoint"
        raise ConfigError(f"{rule}: it is {new.run.total_train_steps}, and {run} has one of version {reached}")
    return found


def is_later(old: Config, new: Config, reached: int) -> bool:
    """Whether the stages of both differ only after version `reached`, that of the newest checkpoint."""
    before, after = (
        {start: (s.gconfig.n_samples, s.gconfig.max_new_tokens) for start, s in settings_by_stage(c).items()}
        for c in (old, new)
    )
    moments = [start for start in (*before, *after) if start <= reached]
    return all(at(before, moment) == at(after, moment) for moment in moments)


def at(limits: dict[int, tuple[int, int]], version: int) -> tuple[int, int]:
    """The limits of the last stage that has begun."""
    return limits[max(start for start in limits if start <= version)]


def what_to_do(config: Config) -> str:
    other = ' with another run.name (or run.resume = "")' if config.run.resume == AUTO else ""
    return f"set them back, or start a new run{other}"


def saved_config(run: Path) -> Config:
    """The settings of the run's last start. Raises ConfigError when this version cannot read them."""
    try:
        return saved((run / runs.CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[:2]
        raise ConfigError(f"invalid settings in {run / runs.CONFIG}, of another version: {' '.join(first)}") from None


def next_start(run: Path) -> int:
    """Number of the next start of a run that exists: each earlier start but the last has a file config-N.json."""
    return 2 + len([path for path in run.glob("config-*.json") if EARLIER_CONFIG.fullmatch(path.name)])


def resume_lines(run: Path, found: list[Change]) -> list[str]:
    n = f"{len(found)} changed setting{'s' if len(found) != 1 else ''}" + (":" if found else "")
    folders = [path.name for path in runs.checkpoints(run)]
    kept = f"checkpoints {', '.join(folders)}" if folders else "no checkpoint yet: from version 0"
    ended = f", which had finished at version {runs.n_updates(run)}" if runs.is_finished(run) else ""
    what = f"{'extends' if ended else 'resumes'} {run}{ended}"
    notes = [*map(str, found), *ignored(read_object(run / runs.CONFIG))]
    return [f"{what} (start {next_start(run)}; {kept}), with {n}", *(f"  {note}" for note in notes)]


def preview_resume(config: Config, file: Path) -> list[str]:
    """For --dry-run: the lines of a resumed run, without locking it."""
    name = runs.run_name(config, file)
    run = find_run(config, name)
    if run is None:
        return [new_run_line(config, name)] if config.run.resume else []
    runs.check_free(run)
    return resume_lines(run, check_changes(run, config))


def new_run_line(config: Config, name: str) -> str:
    return f'run.resume = "{AUTO}": {config.run.folder} has no unfinished run of {name!r}: a new run starts'
