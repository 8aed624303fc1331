"""Reads the rows of a local file: JSON lines, JSON, CSV, Parquet, or a folder saved by the `datasets` library."""

import csv
import importlib
import io
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from areal_bus.errors import ConfigError
from areal_bus.process.commands import install_command

Found = Iterator[tuple[str, Any]]  # (where, value): FILE:LINE or FILE[ROW]
SAVED = ("dataset_info.json", "dataset_dict.json")  # one of them is in a folder of save_to_disk


def read_file(path: Path, *, split: str) -> Found:
    """(where, value) of each row. Raises ConfigError at the first one that cannot be read."""
    if path.is_dir():
        return read_saved(path, split=split)
    return READERS.get(path.suffix.lower(), read_lines)(path)


def is_saved(folder: Path) -> bool:
    """Whether `datasets` has saved a data set there."""
    return any((folder / name).is_file() for name in SAVED)


def read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig" if file.suffix.lower() == ".csv" else "utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data must be readable UTF-8 text: {file}: {error}") from error


def read_lines(file: Path) -> Found:
    """Each line that is not blank is one JSON value."""
    for number, line in enumerate(read_text(file).split("\n"), start=1):  # not splitlines: U+2028 may be in a string
        if line.strip():
            try:
                yield f"{file}:{number}", json.loads(line)
            except ValueError as error:
                raise ConfigError(f"each line of data must be one JSON object: {file}:{number}: {error}") from error


def read_json(file: Path) -> Found:
    """One list of objects."""
    try:
        found = json.loads(read_text(file))
    except ValueError as error:
        raise ConfigError(
            f"a .json file must hold one list of rows: {file}: {error}; JSON lines have the suffix .jsonl"
        ) from error
    if not isinstance(found, list):
        raise ConfigError(f"a .json file must hold one list of rows: {file} holds a {type(found).__name__}")
    for number, row in enumerate(found):
        yield f"{file}[{number}]", row


def read_csv(file: Path) -> Found:
    """The first line names the fields; all values are text."""
    reader = csv.DictReader(io.StringIO(read_text(file), newline=""), strict=True)
    try:
        for row in reader:
            where = f"{file}:{reader.line_num}"
            if None in row or None in row.values():
                n = len(reader.fieldnames or ())
                raise ConfigError(f"each line of a .csv file must have its {n} fields: {where} has more or fewer")
            yield where, row
    except csv.Error as error:
        raise ConfigError(f"a .csv file must be valid: {file}:{reader.line_num}: {error}") from error


def read_parquet(file: Path) -> Found:
    """Rows of all row groups."""
    parquet = needed("pyarrow.parquet", file)
    try:
        batches = parquet.ParquetFile(file).iter_batches()
        rows = (row for batch in batches for row in batch.to_pylist())
        for number, row in enumerate(rows):
            yield f"{file}[{number}]", row
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        raise ConfigError(f"a .parquet file must be valid: {file}: {str(error).splitlines()[0]}") from error


def read_saved(folder: Path, *, split: str) -> Found:
    """A folder of Dataset.save_to_disk, or of a DatasetDict with this split."""
    try:
        found: Any = needed("datasets", folder).load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} must be a folder of save_to_disk: {str(error).splitlines()[0]}") from error
    if isinstance(found, dict):
        if split not in found:
            raise ConfigError(f"{folder} has the splits {', '.join(found)}: data.split is {split!r}")
        found = found[split]
    for number, row in enumerate(found):
        yield f"{folder}[{number}]", row


def needed(module: str, path: Path) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{path} needs the package {module.partition('.')[0]}: run {install_command('hf')}, or give a JSON-lines "
            "file"
        ) from error


READERS: Mapping[str, Callable[[Path], Found]] = {".json": read_json, ".csv": read_csv, ".parquet": read_parquet}
