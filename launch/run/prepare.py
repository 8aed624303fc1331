"""Checks model, data, prompts, reward and workflow before a run starts, then creates the run's folder.

A subprocess (`python -m launch.run.prepare`, JSON in and out), so that no user's module is imported here.
"""

import hashlib
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from actors.data.fields import SOURCE, UNREAD
from actors.data.loading import RowWithOrigin, check_demonstrations, rows_with_origins, sets_with_origins
from actors.data.source import LoaderSource
from actors.endpoint.external_agents import ACCESS, AgentAccess
from actors.models.scratch import write_scratch_folder
from actors.runtime.user_code import add_user_folder, load_function
from actors.workflows.loading import check_workflow
from areal_bus.config.algorithms import is_users
from areal_bus.config.learner import LearnerConfig
from areal_bus.config.names.trackers import check_trackers
from areal_bus.config.names.workflows import EXTERNAL
from areal_bus.config.sections import Config
from areal_bus.errors import ArealBusError, ConfigError
from areal_bus.process import standard_streams
from areal_bus.process.isolation import CHILD
from areal_bus.process.parent_death import die_with_parent
from areal_bus.storage.atomic_file import read_object, write_atomic
from launch.checks.model_checks import (
    check_frozen_models,
    check_lora,
    check_model,
    check_packages,
    check_token_ids,
    check_tokenizer,
)
from launch.checks.row_checks import check_prompts, seen_note, unknown_notes, why_unread
from launch.checks.trial import check_reward, is_tried, is_users_reward, trials
from launch.memory.loads import stage_lines
from launch.memory.shape import find_shape
from launch.plan.environment import actor_environment
from launch.run import runs
from launch.run.job_id import slurm_job
from launch.run.resume import check_changes, next_start, resume_lines


@dataclass(frozen=True, slots=True)
class Prepared:
    """The run's folder, the model that it starts from, and lines to print."""

    run_folder: str
    model_folder: str
    resumed: bool = False
    notes: tuple[str, ...] = ()


def prepare(config: Config, config_file: Path, run: Path | None = None) -> Prepared:
    """Check, then create the run's folder or reuse that of the resumed `run`. Raises ConfigError."""
    folder = config_file.resolve().parent
    add_user_folder(folder)
    found = [] if run is None else check_changes(run, config)
    check_trackers(config.journal.tracker)
    model = check_model(config, folder)
    check_lora(config, model)
    check_packages(config)
    check_frozen_models(config, folder, model)
    rows, problems = load_all_rows(config, folder)
    if config.learner.warmup.steps:
        check_demonstrations(rows)
    samples = rows + problems + loader_samples(config, folder)
    check_functions(config, folder, samples, model)
    shape = find_shape(config, folder)
    if shape is not None:
        check_token_ids(config, shape.vocabulary)
    check_tokenizer(config, model)
    row_notes = check_sampling(config, samples, model)
    row_notes += [*unknown_notes(config, samples, model), *seen_note(rows, problems)]
    data = fingerprint(rows)
    if config.journal.dir:
        check_journal_folder(config.journal.dir)
    if run is not None:
        check_same_data(run, data)
    notes = [] if run is None else resume_lines(run, found)
    notes += stage_lines(config, shape, config.data.max_prompt_tokens) + row_notes
    resumed = run is not None
    if run is None:
        run = runs.make_run_folder(config.run.folder, runs.run_name(config, config_file))
        shutil.copyfile(config_file, run / "config.toml")
        if config.model.scratch is not None:
            write_scratch_folder(run / "scratch-model", config.model.scratch)
    else:
        archive_last_start(run)
        if run.parent == config.run.folder.resolve():
            runs.point_latest(run.parent, run.name)
    name = runs.run_name(config, config_file)
    start = 1 + max(map(runs.n_started, [run, *runs.runs_named(config.run.folder, name)]))
    places = {"config": str(config_file.resolve()), "folder": str(folder), "working_folder": str(Path.cwd())}
    first = read_object(run / runs.ORIGIN).get("date") or date.today().isoformat()
    origin: dict[str, Any] = {**places, "date": first, "start": start, **slurm_job(os.environ)}
    write_atomic(run / runs.ORIGIN, json.dumps(origin | data, indent=2) + "\n")
    write_atomic(run / runs.CONFIG, config.model_dump_json(indent=2) + "\n")
    if config.workflow.agent.function == EXTERNAL:
        access = AgentAccess.make(run)
        notes.append(f"agents open episodes at {access.base_url}/episodes with the key {access.key} ({run / ACCESS})")
    model = model or str(run / "scratch-model")
    return Prepared(str(run), model, resumed, tuple(notes))


def archive_last_start(run: Path) -> None:
    """Rename settings and summary of the last start by its number."""
    last = next_start(run) - 1
    shutil.copyfile(run / runs.CONFIG, run / f"config-{last}.json")
    if (run / runs.SUMMARY).exists():
        (run / runs.SUMMARY).replace(run / f"summary-{last}.json")


def fingerprint(rows: Sequence[RowWithOrigin]) -> dict[str, Any]:
    """Number and SHA-256 of the training rows, in order."""
    digest = hashlib.sha256()
    for placed in rows:
        row = {name: value for name, value in placed.row.items() if name != UNREAD}  # it names the file's place
        digest.update(json.dumps(row, sort_keys=True).encode() + b"\n")
    found: dict[str, Any] = {"rows": len(rows), "rows_sha256": digest.hexdigest()}
    by_source = Counter(placed.row[SOURCE] for placed in rows if SOURCE in placed.row)
    return found | ({"rows_by_source": dict(by_source)} if by_source else {})


def check_same_data(run: Path, data: dict[str, Any]) -> None:
    """Raises ConfigError unless the rows are those of the run's first start (I4)."""
    before = read_object(run / runs.ORIGIN)
    if "rows_sha256" in before and before["rows_sha256"] != data["rows_sha256"]:
        was, now = (f"{rows['rows']} rows (SHA-256 {rows['rows_sha256'][:12]})" for rows in (before, data))
        raise ConfigError(
            f"a run keeps its rows, because its uids count them: {run} began with {was}, now it has {now}"
        )


def load_all_rows(config: Config, folder: Path) -> tuple[list[RowWithOrigin], list[RowWithOrigin]]:
    """Training rows and evaluation problems. Raises ConfigError."""
    sets = sets_with_origins(config, folder)
    return rows_with_origins(config, folder), [row for rows in sets.values() for row in rows]


def loader_samples(config: Config, folder: Path) -> list[RowWithOrigin]:
    """The first rows of each loader. Raises ConfigError when it fails, or does not continue at its state."""
    found = []
    for name, own in config.data.parts:
        if not own.function:
            continue
        source = LoaderSource(config, folder, name=name)
        try:
            texts = source.first_rows()
        finally:
            source.close()
        where = f"data.function = {own.function!r}, row"
        found += [RowWithOrigin(f"{where} {number}", json.loads(text)) for number, text in enumerate(texts)]
    return found


def check_sampling(config: Config, rows: Sequence[RowWithOrigin], model: str) -> list[str]:
    """Check the prompts if the built-in workflow renders them, and give notes on them. Raises ConfigError."""
    own = config.workflows
    plain = [row for row in rows if own.get(str(row.row.get(SOURCE, "")), config.workflow.function) == "single_turn"]
    return check_prompts(config, plain, model) if plain else []


def check_journal_folder(path: str) -> None:
    """Check the folder on this node; processes on other nodes check their own. Raises ConfigError."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(f"journal.dir must be a writable folder: {path}: {error.strerror}") from None


def check_rewards(config: Config, folder: Path, rows: Sequence[RowWithOrigin], model: str) -> None:
    """Load the reward function of each source with the fields of its rows, and call it once. Raises ConfigError."""
    functions = {source.label: source.reward or config.reward.function for source in config.data.source}
    by_source: dict[str, list[RowWithOrigin]] = {name: [] for name in functions}
    for placed in rows:
        by_source.setdefault(placed.row.get(SOURCE, "") if functions else "", []).append(placed)
    for name, own in by_source.items():
        reward = config.reward.model_copy(update={"function": functions.get(name, config.reward.function)})
        # fields that every row has; the rows of a loader are not known
        fields = set.intersection(*(set(placed.row) for placed in own)) - {UNREAD} if own else None
        samples = trials(config, own, model) if is_tried(config) else iter(())
        scored = samples if is_users_reward(reward) else ()
        try:
            check_reward(config.model_copy(update={"reward": reward}), folder, fields, trials=scored)
        except ConfigError as error:
            raise ConfigError(f"{error}{why_unread(str(error), own)}") from error
        next(samples, None)  # the workflow alone, where no reward has asked for a sample


def check_functions(config: Config, folder: Path, rows: Sequence[RowWithOrigin], model: str) -> None:
    """Import the user's functions, check their signatures, and call reward and workflow once. Raises ConfigError."""
    check_workflow(config)
    check_rewards(config, folder, rows, model)
    if is_users(config.rollout.engine):
        check_opener(config.rollout.engine)
    actor = config.actor
    if any(map(is_users, (actor.advantage, actor.loss, actor.correction, actor.aggregation))):
        from actors.learner.algorithms.registry import find_algorithm  # imports torch

        find_algorithm(actor)
    if config.learner.loop != LearnerConfig().loop:
        from actors.learner.loop import find_loop  # imports torch

        find_loop(config.learner.loop)


def check_opener(name: str) -> None:
    """Import the function that opens a user's engine, and check that it can be called so. Raises ConfigError."""
    opener = load_function("rollout.engine", name)
    try:
        inspect.signature(opener).bind("context", "config", "tokenizer")
    except TypeError as error:
        what = f"rollout.engine {name!r} ({opener.__name__}{inspect.signature(opener)})"
        raise ConfigError(f"{what} is called with (context, config, tokenizer): {error}") from None


def prepare_in_subprocess(config: Config, config_file: Path, run: Path | None = None) -> Prepared:
    """Run `prepare` in a subprocess. Raises its ConfigError."""
    settings = config.model_dump(mode="json")
    question = {"config": settings, "file": str(config_file), "run": str(run) if run else None, "parent": os.getpid()}
    words, inner = [*CHILD, "launch.run.prepare"], actor_environment(os.environ, gpus=(), cpu=True)
    done = subprocess.run(words, input=json.dumps(question).encode(), stdout=subprocess.PIPE, env=inner, check=False)
    try:
        answer = json.loads(done.stdout.decode(errors="replace").splitlines()[-1])  # a user's module prints anything
    except (IndexError, ValueError):
        raise ArealBusError(f"the check of the settings must end with a result: exit code {done.returncode}") from None
    if "error" in answer:
        raise ConfigError(answer["error"])
    if "refused" in answer:
        raise ArealBusError(answer["refused"])
    return Prepared(**answer | {"notes": tuple(answer["notes"])})


def main() -> None:
    standard_streams.secure()
    question = json.loads(sys.stdin.read())
    die_with_parent(question["parent"])
    config = Config.model_validate_json(json.dumps(question["config"]))
    run = Path(question["run"]) if question["run"] else None
    try:
        answer = asdict(prepare(config, Path(question["file"]), run))
    except ConfigError as error:
        answer = {"error": str(error)}
    except OSError as error:
        answer = {"refused": runs.why_refused(error)}
    except Exception as error:  # noqa: BLE001  the ranks of the job wait for the answer
        answer = {"refused": runs.why_failed(error, Path(config.run.folder))}
    print(f"\n{json.dumps(answer)}", flush=True)  # on a new line: the user's module may have printed half a line


if __name__ == "__main__":
    main()
