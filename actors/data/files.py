"""Reads the rows of a local file: JSON lines, JSON, CSV (also .gz, .bz2, .xz), Parquet, Arrow, `datasets` folder."""

import bz2
import csv
import gzip
import importlib
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from areal_bus.errors import ConfigError
from areal_bus.process.commands import install_command

Found = Iterator[tuple[str, Any]]  # (where, value): FILE:LINE or FILE[ROW]
OPENERS: Mapping[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
QUOTED = re.compile('"[^"]*"')
LONGEST_FIELD = 1 << 30  # characters of a table's field
MOST_DIGITS = 4000  # of an integer
SAVED = ("dataset_info.json", "dataset_dict.json")  # one of them is in a folder of save_to_disk


def read_file(path: Path, *, split: str) -> Found:
    """(where, value) of each row. Raises ConfigError at the first one that cannot be read."""
    if path.is_dir():
        return read_saved(path, split=split)
    return READERS.get(suffix_of(path), read_lines)(path)


def suffix_of(path: Path) -> str:
    """The suffix, without that of a compressed file: .jsonl of rows.jsonl.gz."""
    name = path.with_suffix("") if path.suffix.lower() in OPENERS else path
    return name.suffix.lower()


def is_saved(folder: Path) -> bool:
    """Whether `datasets` has saved a data set there."""
    return any((folder / name).is_file() for name in SAVED)


def read_text(file: Path) -> str:
    """The text of a file that may be compressed, without a byte-order mark."""
    opener: Callable[..., Any] = OPENERS.get(file.suffix.lower(), open)
    try:
        with opener(file, "rt", encoding="utf-8-sig", newline="") as opened:
            return str(opened.read())
    except (OSError, EOFError, zlib.error, lzma.LZMAError, UnicodeDecodeError) as error:
        raise ConfigError(f"unreadable data file: {file}: {error}; it must be UTF-8 text") from error


def read_json_text(text: str) -> Any:
    """The value of JSON text; an integer of more digits than Python reads is text. Raises ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("too many levels of lists and objects") from None
    except json.JSONDecodeError:
        raise
    except ValueError:
        return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < MOST_DIGITS else digits)


def read_lines(file: Path) -> Found:
    """Each line that is not blank is one JSON value."""
    for number, line in enumerate(read_text(file).split("\n"), start=1):  # not splitlines: U+2028 may be in a string
        if line.strip():
            try:
                yield f"{file}:{number}", read_json_text(line)
            except ValueError as error:
                raise ConfigError(f"each line of data must be one JSON object: {file}:{number}: {error}") from error


def read_json(file: Path) -> Found:
    try:
        found = read_json_text(read_text(file))
    except ValueError as error:
        raise ConfigError(
            f"a .json file must hold one list of rows: {file}: {error}; JSON lines have the suffix .jsonl"
        ) from error
    if not isinstance(found, list):
        raise ConfigError(f"a .json file must hold one list of rows: {file} holds a {type(found).__name__}")
    for number, row in enumerate(found):
        yield f"{file}[{number}]", row


def read_csv(file: Path) -> Found:
    """The first line names the fields, which commas separate, else semicolons, tabs or bars; all values are text."""
    text = read_text(file)
    header = QUOTED.sub("", text.lstrip("\r\n").partition("\n")[0])
    delimiter = next((mark for mark in (",", ";", "\t", "|") if mark in header), ",")
    return read_table(file, text, "\t" if suffix_of(file) == ".tsv" else delimiter)


def read_table(file: Path, text: str, delimiter: str) -> Found:
    csv.field_size_limit(LONGEST_FIELD)
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True, delimiter=delimiter)
    try:
        names = list(reader.fieldnames or ())
        check_names(names, file)
        for row in reader:
            where = f"{file}:{reader.line_num}"
            if None in row or None in row.values():
                raise ConfigError(f"wrong number of fields: {where} must have {len(names)}, as the first line")
            yield where, row
    except csv.Error as error:
        raise ConfigError(f"invalid table: {file}:{reader.line_num}: {error}") from error


def check_names(names: list[str], file: Path) -> None:
    """Raises ConfigError for two columns of one name: a row would have only the last."""
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"duplicate column {twice[0]!r}: {file}: each column of a table has a name of its own")


def read_parquet(file: Path) -> Found:
    """Rows of all row groups."""
    parquet = needed("pyarrow.parquet", file)
    try:
        opened = parquet.ParquetFile(file)
        check_names(opened.schema_arrow.names, file)
        rows = (row for batch in opened.iter_batches() for row in rows_of_table(batch))
        for number, row in enumerate(rows):
            yield f"{file}[{number}]", row
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        raise ConfigError(f"a .parquet file must be valid: {file}: {str(error).splitlines()[0]}") from error


def read_arrow(file: Path) -> Found:
    """An Arrow file, or an Arrow stream as the `datasets` library writes it."""
    ipc = needed("pyarrow.ipc", file)
    try:
        with file.open("rb") as opened:
            is_file = opened.read(6) == b"ARROW1"
            opened.seek(0)
            table = (ipc.open_file if is_file else ipc.open_stream)(opened).read_all()
    except (OSError, ValueError) as error:
        raise ConfigError(f"an .arrow file must be valid: {file}: {str(error).splitlines()[0]}") from error
    check_names(table.schema.names, file)
    for number, row in enumerate(rows_of_table(table)):
        yield f"{file}[{number}]", row


def rows_of_table(table: Any) -> Iterator[dict[str, Any]]:
    columns = [column_values(column) for column in table.columns]
    names = list(table.schema.names)
    for values in zip(*columns, strict=True):
        yield dict(zip(names, values, strict=True))


def column_values(column: Any) -> list[Any]:
    """The values of a column: of float32 with the digits that it has, and as Arrow's scalars where Python has none."""
    kind = str(column.type)
    if kind in ("float", "halffloat") and not column.null_count:
        return list(column.to_numpy(zero_copy_only=False))
    if "float" not in kind:
        try:
            return list(column.to_pylist())
        except (ValueError, OverflowError, NotImplementedError):  # for example one date beyond the year 9999
            pass
    return list(map(python_value, column))


def python_value(scalar: Any) -> Any:
    try:
        return short_floats(scalar.as_py(), scalar.type)
    except (ValueError, OverflowError, NotImplementedError):
        return scalar


def short_floats(value: Any, kind: Any) -> Any:
    """The value with each float32 in its own digits: .1, and not 0.10000000149011612."""
    if value is None:
        return None
    if str(kind) in ("float", "halffloat"):
        from numpy import float16, float32  # only for tables: the head of a run without them is 11 MiB smaller

        return (float32 if str(kind) == "float" else float16)(value)
    if hasattr(kind, "item_type"):  # a map is a list of pairs
        return [[short_floats(name, kind.key_type), short_floats(item, kind.item_type)] for name, item in value]
    if hasattr(kind, "value_type"):  # of a list; of a dictionary or run ends, whose value is one of them
        of_item = kind.value_type
        return (
            [short_floats(item, of_item) for item in value] if isinstance(value, list) else short_floats(value, of_item)
        )
    if isinstance(value, dict):
        return {name: short_floats(item, kind.field(name).type) for name, item in value.items()}
    return value


def rows_of_tables(found: Any) -> Iterator[dict[str, Any]]:
    """The rows of a data set of the `datasets` library, or of another iterable."""
    if not hasattr(found, "with_format"):
        yield from found
        return
    for table in found.with_format("arrow").iter(batch_size=1000):
        yield from rows_of_table(table)


def read_saved(folder: Path, *, split: str) -> Found:
    """A folder of Dataset.save_to_disk, or of a DatasetDict with this split."""
    try:
        found: Any = needed("datasets", folder).load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {folder} as a folder of save_to_disk: {str(error).splitlines()[0]}") from error
    if isinstance(found, dict):
        if split not in found:
            raise ConfigError(f"{folder} has the splits {', '.join(found)}: data.split is {split!r}")
        found = found[split]
    for number, row in enumerate(rows_of_tables(found)):
        yield f"{folder}[{number}]", row


def needed(module: str, path: Path) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{path} needs the package {module.partition('.')[0]}: run {install_command('hf')}, or give a JSON-lines "
            "file"
        ) from error


READERS: Mapping[str, Callable[[Path], Found]] = {
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": read_csv,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".feather": read_arrow,
}
