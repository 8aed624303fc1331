"""Loads rows of a generated task, an environment, a file (files.py) or a data set: "question" and "answer" as text."""

import importlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from string import Formatter
from typing import Any, NamedTuple

from actors.data.fields import MESSAGES, MISSING, REPLACED, SOURCE, UNREAD, last_user, lookup, plain_row, read_messages
from actors.data.files import is_saved, read_file, rows_of_tables
from actors.data.tasks import READERS, Problems, Row, adapt, make_problems
from actors.environments.environment_code import EnvironmentCode
from actors.environments.problems import environment_problems
from areal_bus.config.data import DataConfig, SourceConfig
from areal_bus.config.names.named_tasks import evaluation_split
from areal_bus.config.names.workflows import environment_of
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError
from areal_bus.messages import MAX_ROW_BYTES
from areal_bus.process.commands import install_command

DEFAULT_SUBSETS = {"openai/gsm8k": "main", "gsm8k": "main"}  # for data sets without a default subset


class RowWithOrigin(NamedTuple):
    """A row and its origin, for error texts."""

    where: str  # FILE:LINE, "DATASET SPLIT[ROW]", or the generated task's row
    row: Row


def load_rows(config: Config, config_folder: str | Path) -> list[Row]:
    """The training rows. Raises ConfigError when there are none, or one is malformed."""
    return [row for _, row in rows_with_origins(config, config_folder)]


def load_problems(config: Config, config_folder: str | Path) -> list[Row]:
    """evaluate.path (a Hugging Face id: evaluation_split), else the held-out rows, else []. Raises as load_rows."""
    return [row for _, row in problems_with_origins(config, config_folder)]


def rows_with_origins(config: Config, config_folder: str | Path) -> list[RowWithOrigin]:
    """The rows of load_rows with their origins, source after source. Those of a loader are not known before."""
    return [row for name, own in config.data.parts for row in rows_of_source(config, own, config_folder, name=name)]


def rows_of_source(config: Config, data: DataConfig, config_folder: str | Path, *, name: str) -> list[RowWithOrigin]:
    if data.function:
        return []
    if data.is_generated:
        rows = task_with_origins(problems_of(config, data, config_folder).train, f"data.task = {data.task!r}, row")
    else:
        rows = read_with_origins(data.path, data, config_folder, split=data.split)
    return named(rows[: data.limit], name)


def named(rows: list[RowWithOrigin], name: str) -> list[RowWithOrigin]:
    """The rows with the name of their source. Raises ConfigError for a row that has that field."""
    return [RowWithOrigin(where, named_row(row, name, where)) for where, row in rows]


def named_row(row: Row, name: str, where: str) -> Row:
    if not name:
        return row
    if SOURCE in row:
        raise ConfigError(f"a row of [[data.source]] may not have the field {SOURCE}, which is set here: {where}")
    return {**row, SOURCE: name}


def problems_with_origins(config: Config, config_folder: str | Path) -> list[RowWithOrigin]:
    data = config.data
    if config.evaluate.path:
        rows = read_with_origins(
            config.evaluate.path, data, config_folder, split=evaluation_split(config.evaluate.path)
        )
    elif data.is_generated:
        rows = held_out(config, data, config_folder)
    else:
        return []
    return rows[: config.evaluate.limit]


def held_out(config: Config, data: DataConfig, config_folder: str | Path) -> list[RowWithOrigin]:
    """The held-out problems of a generated task."""
    rows = problems_of(config, data, config_folder).held_out
    return task_with_origins(rows, f"data.task = {data.task!r}, held-out row")


def problems_of(config: Config, data: DataConfig, config_folder: str | Path) -> Problems:
    """The rows of a generated task, or of the run's environment. Raises ConfigError."""
    if name := environment_of(data.task):
        code = EnvironmentCode.of(config, name, config_folder)
        return Problems(*environment_problems(code, data.held_out, seed=config.run.seed))
    return make_problems(data, seed=config.run.seed)


def load_sets(config: Config, config_folder: str | Path) -> dict[str, list[Row]]:
    """The problems of each set that is evaluated, by name; "": those of `load_problems`. Raises ConfigError."""
    return {name: [row for _, row in rows] for name, rows in sets_with_origins(config, config_folder).items()}


def sets_with_origins(config: Config, config_folder: str | Path) -> dict[str, list[RowWithOrigin]]:
    if not config.evaluate.is_on:
        return {}
    main = problems_with_origins(config, config_folder)
    found = {"": main} if main else {}
    for source in config.data.source:
        if source.label in config.data.evaluated:
            found[source.label] = problems_of_source(config, source, config_folder)[: config.evaluate.limit]
    for problems in config.evaluate.sets:
        data = config.data
        if problems.task:
            data = data.model_copy(update={"task": problems.task, "question_key": "question", "answer_key": "answer"})
        rows = read_with_origins(problems.path, data, config_folder, split=evaluation_split(problems.path))
        found[problems.name] = rows[: problems.limit]
    return found


def problems_of_source(config: Config, source: SourceConfig, config_folder: str | Path) -> list[RowWithOrigin]:
    """evaluate_path of a [[data.source]], else the held-out problems of its generated task."""
    own = config.data.of(source.label)
    if source.evaluate_path:
        rows = read_with_origins(source.evaluate_path, own, config_folder, split=evaluation_split(source.evaluate_path))
        return named(rows, source.label)
    return named(held_out(config, own, config_folder), source.label)


def task_with_origins(rows: Iterable[Row], name: str) -> list[RowWithOrigin]:
    """Generated rows with their origins. Raises ConfigError for one that no message holds."""
    found = [RowWithOrigin(f"{name} {number}", row) for number, row in enumerate(rows)]
    for where, row in found:
        check_size(row, where)
    return found


def check_size(row: Row, where: str, most_bytes: int = MAX_ROW_BYTES) -> None:
    """Raises ConfigError for a row that is too large as JSON, which is sent with each prompt."""
    n_bytes = len(json.dumps(row, ensure_ascii=False).encode(errors="replace"))
    if n_bytes > most_bytes:
        raise ConfigError(f"row too large: {where} has {n_bytes} bytes as JSON; {most_bytes} are allowed")


def read_rows(path: str, data: DataConfig, config_folder: str | Path, *, split: str) -> list[Row]:
    """All rows of a local file or of a Hugging Face data set ("owner/name" or "owner/name:subset")."""
    return [row for _, row in read_with_origins(path, data, config_folder, split=split)]


def read_with_origins(path: str, data: DataConfig, config_folder: str | Path, *, split: str) -> list[RowWithOrigin]:
    file = find_file(path, config_folder)
    raw = read_file(file, split=split) if file else read_hub(path, split=split)
    rows = [RowWithOrigin(where, complete_row(row, data, where)) for where, row in raw]
    if not rows:
        raise ConfigError(f"no rows in {file or path}: data must have at least one row")
    return rows


def find_file(path: str, config_folder: str | Path) -> Path | None:
    """The file at `path`, relative to the config's folder or the working directory; None for a Hugging Face id."""
    places = [Path(config_folder) / path, Path.cwd() / path]
    for place in places:
        if place.is_file():
            return place
        if place.is_dir() and is_saved(place):
            return place
        if place.is_dir():
            raise ConfigError(
                f"data must be a file (.jsonl, .json, .csv, .tsv, .parquet, .arrow), a folder of datasets.save_to_disk "
                f"or a Hugging Face id: {place} is another folder"
            )
    if Path(path).suffix or path.startswith(("/", ".", "~")) or path.count("/") > 1:
        tried = " and ".join(dict.fromkeys(str(place) for place in places))
        raise ConfigError(f"the data file must exist: {path!r} was not found as {tried}")
    return None


def read_hub(path: str, *, split: str) -> Iterator[tuple[str, Any]]:
    """(where, row) of each row of a Hugging Face data set; needs the `datasets` library."""
    name, _, subset = path.partition(":")
    subset = subset or DEFAULT_SUBSETS.get(name, "")
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise ConfigError(
            f"{path!r} is not a file, and a Hugging Face data set needs the datasets library: run "
            f"{install_command('hf')}, or give the path of a local file"
        ) from error
    try:
        rows: Iterable[Any] = rows_of_tables(datasets.load_dataset(name, subset or None, split=split))
    except Exception as error:  # many types: unknown data set, subset or split, no network, no permission
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"cannot load split {split!r} of the Hugging Face data set {path!r}: {reason}") from error
    for number, row in enumerate(rows):
        yield f"{path} {split}[{number}]", row


def complete_row(row: Any, data: DataConfig, where: str, *, most_bytes: int | None = MAX_ROW_BYTES) -> Row:
    """The row with "question" (of a chat: last user message) and "answer" as text. `most_bytes`: of JSON; None: any."""
    if not isinstance(row, dict):
        raise ConfigError(f"invalid line of data: {where} is a {type(row).__name__}; each line must be one JSON object")
    row, unread = plain_row(row)
    check_read(unread, data, where)
    if data.task in READERS:
        row = adapt(data.task, row, where)
    question = take_question(row, data.question_key, where)
    answer = take_text(row, data.answer_key, "data.answer_key", where)
    completed = {**row, "question": question, "answer": answer}
    if isinstance(row.get("question"), list):
        completed[MESSAGES] = row["question"]
    own = {name: row[name] for name in ("question", "answer") if name in row and row[name] != completed[name]}
    if own:
        completed[REPLACED] = own
    if left_out := {name: f"{where} has {why}" for name, why in unread.items() if name not in row}:
        completed[UNREAD] = left_out
    if most_bytes is not None:
        check_size(completed, where, most_bytes)
    return completed


def check_read(unread: Mapping[str, str], data: DataConfig, where: str) -> None:
    """Raises ConfigError where a column that the prompt or the answer needs cannot be read."""
    try:
        in_prompt = [name for _, name, _, _ in Formatter().parse(data.prompt) if name]
    except ValueError:  # reported where prompts are made
        in_prompt = []
    for key in (data.question_key, data.answer_key, "demonstration", *in_prompt):
        if reason := unread.get(key) or unread.get(key.partition(".")[0]):
            raise ConfigError(f"unreadable value in column {key!r}: {where} has {reason}; change it in the file")


def take_question(row: Row, key: str, where: str) -> str:
    value = lookup(row, key)
    if not isinstance(value, list):
        return take_text(row, key, "data.question_key", where)
    try:
        messages = read_messages(value)
    except ValueError as error:
        raise ConfigError(f"{error}: field {key!r} of {where} has {shorten(value)}") from None
    return str(messages[last_user(messages)]["content"])


def take_text(row: Row, key: str, setting: str, where: str) -> str:
    value = lookup(row, key)
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if value is not MISSING:
        raise ConfigError(f"field {key!r} of a row must be text or a number, not empty: {where} has {shorten(value)}")
    raise ConfigError(
        f"each row of data must have the field {key!r}: {where} has only {', '.join(map(repr, row)) or 'none'}; "
        f"set {setting} to the right field (a nested field is written as extra_info.answer)"
    )


def shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def check_demonstrations(rows: Sequence[RowWithOrigin]) -> None:
    """Raises ConfigError when no row has a demonstration, or for the first that is not a text."""
    given = [placed for placed in rows if placed.row.get("demonstration")]
    if not given:
        raise ConfigError(
            f"learner.warmup needs rows with a text in the field demonstration: none of the {len(rows)} rows has one; "
            "add it, or set learner.warmup.steps = 0"
        )
    for placed in given:
        if not isinstance(placed.row["demonstration"], str):
            kind = type(placed.row["demonstration"]).__name__
            raise ConfigError(f"the field demonstration must be a text: in {placed.where} it is of type {kind}")
