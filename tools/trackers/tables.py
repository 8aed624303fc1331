"""Writes CSV and Parquet: one row a version, one column a series, over the surviving history."""

import csv
import importlib
import io
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tools.trackers.protocol import Target
from tools.trackers.series import Row

WRITE_SHARE = 0.01  # of the time: a file of a long run is rewritten less often

Table = dict[int, dict[str, float]]  # version -> series -> value


class TableWriter:
    """Keeps all rows and rewrites the file, atomically."""

    takes_undo = True
    is_rewritten = True
    takes_samples = False

    def __init__(self, path: Path, encode: Callable[[Table], bytes]) -> None:
        self._path, self._encode = path, encode
        self._table: Table = {}
        self._due = 0.0  # monotonic
        self._is_written = False

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._table.setdefault(row.step, {"wall": row.wall}).update(row.values)
            self._is_written = False
        if time.monotonic() >= self._due:
            self._rewrite()

    def undo(self, version: int) -> None:
        self._table = {step: values for step, values in self._table.items() if step <= version}
        self._is_written = False

    def close(self) -> None:
        if not self._is_written:
            self._rewrite()

    def _rewrite(self) -> None:
        began = time.monotonic()
        temporary = self._path.with_suffix(".new")
        temporary.write_bytes(self._encode(self._table))
        os.replace(temporary, self._path)
        self._is_written = True
        ended = time.monotonic()
        self._due = ended + (ended - began) / WRITE_SHARE


def csv_writer(target: Target) -> TableWriter:
    return TableWriter(target.folder / "scalars.csv", _csv)


def parquet_writer(target: Target) -> TableWriter:
    return TableWriter(target.folder / "scalars.parquet", _parquet)


def _columns(table: Table) -> list[str]:
    return ["version", "wall", *sorted({name for values in table.values() for name in values} - {"wall"})]


def _records(table: Table) -> list[dict[str, Any]]:
    return [{"version": step, **table[step]} for step in sorted(table)]


def _csv(table: Table) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, _columns(table), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(_records(table))
    return text.getvalue().encode()


def _parquet(table: Table) -> bytes:
    pyarrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    records = _records(table)
    kinds = {"version": pyarrow.int64()}
    columns = {
        name: pyarrow.array([record.get(name) for record in records], kinds.get(name, pyarrow.float64()))
        for name in _columns(table)
    }
    sink = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), sink)
    return sink.getvalue()
