"""Files of rows, in each of their forms: read whole, or refused by name and place."""

import bz2
import gzip
import json
import lzma
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from actors.data.loading import load_rows, read_rows
from areal_bus.config.data import DataConfig
from areal_bus.errors import ConfigError
from tests.actors.data.test_loading import config_of

LINE = b'{"question": "q", "answer": "1"}\n'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", b'\xef\xbb\xbf{"question": "q", "answer": "1"}\r\n'),
        ("rows.json", b'\xef\xbb\xbf[{"question": "q", "answer": 1}]'),
        ("rows.csv", b"\xef\xbb\xbfquestion,answer\r\nq,1\r\n"),
        ("rows.csv", b"question;answer\nq;1\n"),
        ("rows.csv", b"question\tanswer\nq\t1\n"),
        ("rows.csv", b'question;answer;"a, b"\nq;1;2\n'),
        ("rows.tsv", b"question\tanswer\nq\t1\n"),
        ("rows.jsonl.gz", gzip.compress(b'{"question": "q", "answer": "1"}\n', mtime=0)),
        ("rows.json.xz", lzma.compress(b'[{"question": "q", "answer": "1"}]')),
        ("rows.csv", b'question,answer,said\nq,1,"a ""b"", c\nd"\n'),
        ("rows.csv.bz2", bz2.compress(b"question,answer\nq,1\n")),
        ("rows.tsv.gz", gzip.compress(b"question\tanswer\nq\t1\n", mtime=0)),
        ("rows.csv", b'question,answer,long\nq,1,"' + b"x" * 200_000 + b'"\n'),
        ("rows.jsonl", b'{"question": "q", "answer": "1", "long": ' + b"9" * 5000 + b"}"),
        ("rows.jsonl", b'{"question": "q", "answer": "1", "deep": ' + b"[" * 300 + b"]" * 300 + b"}"),
        ("rows.jsonl", b'{"question": "q", "answer": "1", "half": "\\ud83d", "far": [Infinity]}'),
    ],
)
def test_a_file_is_read_in_each_of_its_forms(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    (row,) = load_rows(config_of(data={"path": name}), tmp_path)
    assert (row["question"], row["answer"]) == ("q", "1")
    assert json.loads(json.dumps(row, ensure_ascii=False).encode()) == row


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", b"{}", "must hold one list of rows.*a.json holds a dict"),
        ("a.json", b'{"question": 1}\n{"question": 2}', "JSON lines have the suffix .jsonl"),
        ("a.json", b'[{"question": "q", "answer": ""}]', r"a.json\[0\] has ''"),
        ("a.csv", b"question,answer\nq,1\nq\n", "wrong number of fields: .*a.csv:3 must have 2"),
        ("a.csv", b"question,answer\nq,1,2\n", "a.csv:2 must have"),
        ("a.csv", b'question,answer\n"q,1\n', "invalid table.*a.csv:"),
        ("a.csv", b"question,answer\nq,\n", "a.csv:2 has ''"),
        ("a.csv", b"question,answer,answer\nq,1,2\n", "duplicate column 'answer'"),
        ("a.parquet", b"no parquet", "a .parquet file must be valid.*a.parquet"),
        ("a.arrow", b"ARROW1??", "an .arrow file must be valid: .*a.arrow"),
        ("a.jsonl.gz", b"no gzip", "unreadable data file: .*a.jsonl.gz"),
        ("a.jsonl.gz", gzip.compress(LINE, mtime=0)[:-9], "unreadable data file: .*a.jsonl.gz"),
        ("a.jsonl", '{"question": "q"}'.encode("utf-16"), "unreadable data file: .*a.jsonl.*UTF-8|UTF-8"),
    ],
)
def test_a_bad_file_is_refused_with_its_place(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        load_rows(config_of(data={"path": name}), tmp_path)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_two_columns_of_one_name_are_refused(tmp_path: Path, suffix: str) -> None:
    columns = [pa.array(["q"]), pa.array(["1"]), pa.array(["2"])]
    table = pa.Table.from_arrays(columns, names=["question", "answer", "answer"])
    file = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        pq.write_table(table, file)
    else:
        with pa.ipc.new_file(str(file), table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(ConfigError, match=f"duplicate column 'answer': .*rows{suffix}"):
        load_rows(config_of(data={"path": file.name}), tmp_path)


def test_a_saved_folder_without_the_split_names_those_it_has(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra hf is not installed")
    path, rows = tmp_path / "saved", [{"question": "q", "answer": "1"}]
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(str(path))
    assert load_rows(config_of(data={"path": path.name, "split": "train"}), tmp_path) == rows
    with pytest.raises(ConfigError, match=r"has the splits train: data.split is 'test'"):
        read_rows(path.name, DataConfig(path=path.name), tmp_path, split="test")
