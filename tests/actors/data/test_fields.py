"""Values of rows in each form of a file: read, left out, or refused by file, row and column."""

import json
import math
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import feather
from pyarrow import parquet as pq
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from actors.data.loading import complete_row, load_rows
from actors.workflows.prompts import chat, prompt_of
from areal_bus.errors import ConfigError
from tests.actors.data.test_loading import config_of, write

COLUMNS = {
    "price": (pa.array([Decimal("3.50"), Decimal("0.10")], pa.decimal128(10, 2)), [3.5, 0.1]),
    "count": (pa.array([Decimal("7"), None], pa.decimal128(38, 0)), [7, None]),
    "exact": (
        pa.array([Decimal("0.12345678901234567890"), None], pa.decimal128(38, 20)),
        ["0.12345678901234567890", None],
    ),
    "when": (
        pa.array([datetime(2024, 1, 2, 3, 4, 5), None], pa.timestamp("us")),
        ["2024-01-02T03:04:05", None],
    ),
    "day": (pa.array([date(2024, 1, 2), None]), ["2024-01-02", None]),
    "lasted": (pa.array([timedelta(seconds=1.5), None]), [1.5, None]),
    "text": (pa.array([b"abc", None], pa.binary()), ["abc", None]),
    "tenth": (pa.array([0.1, 0.7], pa.float32()), [0.1, 0.7]),
    "some": (pa.array([0.1, None], pa.float32()), [0.1, None]),
    "tenths": (pa.array([[0.1], [0.7, None]], pa.list_(pa.float32())), [[0.1], [0.7, None]]),
    "inner": (pa.array([{"x": 0.1}, None], pa.struct([("x", pa.float32())])), [{"x": 0.1}, None]),
    "missing": (pa.array([None, 1.0]), [None, 1.0]),
    "far": (pa.array([math.inf, 1.0]), [math.inf, 1.0]),
    "kind": (pa.array(["a", "b"]).dictionary_encode(), ["a", "b"]),
    "shared": (pa.DictionaryArray.from_arrays(pa.array([1, 0]), pa.array([0.1, 0.7], pa.float32())), [0.7, 0.1]),
}


def test_a_value_beyond_python_leaves_the_others_of_its_column(tmp_path: Path) -> None:
    ends = pa.RunEndEncodedArray.from_arrays(pa.array([1, 2], pa.int32()), pa.array([0.1, 0.7], pa.float32()))
    names = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"a" * 16, b"b" * 16], pa.binary(16)))
    far = pa.array([10**15, 0], pa.date64())
    both = pa.array(
        [{"x": 0.1, "day": 10**15}, {"x": 0.1, "day": 0}], pa.struct({"x": pa.float32(), "day": pa.date64()})
    )
    columns = {"question": ["1", "2"], "answer": ["1", "2"], "ends": ends, "name": names, "far": far, "both": both}
    table = pa.table(columns)
    with pa.OSFile(str(tmp_path / "rows.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    first, second = load_rows(config_of(data={"path": "rows.arrow"}), tmp_path)
    assert (first["ends"], first["name"]) == (0.1, "61616161-6161-6161-6161-616161616161")
    assert "far" not in first
    assert "both" not in first
    assert (second["far"], second["both"]) == ("1970-01-01", {"x": 0.1, "day": "1970-01-01"})


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".feather", "saved"])
def test_each_type_of_a_column_is_a_json_value(tmp_path: Path, suffix: str) -> None:
    columns = {"question": pa.array(["1", "2"]), "answer": pa.array([0.1, 27.0], pa.float32())}
    table = pa.table({**columns, **{name: values for name, (values, _) in COLUMNS.items()}})
    table = table.append_column("image", pa.array([b"\xff\xd8", None], pa.binary()))
    path = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        pq.write_table(table, path)
    elif suffix == "saved":
        datasets.Dataset(table.drop_columns(["lasted"])).save_to_disk(path)
    else:
        feather.write_feather(table, path, compression="uncompressed")
    rows = load_rows(config_of(data={"path": path.name}), tmp_path)
    assert [row["answer"] for row in rows] == ["0.1", "27.0"]
    for name, (_, values) in COLUMNS.items():
        if name in rows[0]:
            assert [row[name] for row in rows] == values, name
    assert COLUMNS.keys() - rows[0].keys() <= ({"lasted"} if suffix == "saved" else set())
    assert "image" not in rows[0]  # nothing reads it
    assert json.loads(json.dumps(rows)) == rows


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"answer_key": "image"}, "column 'image': .*rows.parquet.0. has 2 bytes that are no UTF-8 text"),
        ({"answer_key": "far"}, "column 'far': .*rows.parquet.1. has the number inf"),
        ({"answer_key": "none"}, "column 'none': .*rows.parquet.1. has the number nan"),
        ({"prompt": "{question} {image}"}, "column 'image': .*rows.parquet.0."),
        ({"answer_key": "late"}, "column 'late': .*rows.parquet.0. has a value of the type"),
    ],
)
def test_a_column_that_is_needed_and_cannot_be_read_is_refused_by_file_row_and_column(
    tmp_path: Path, keys: dict[str, str], said: str
) -> None:
    columns = {"question": ["1", "2"], "answer": ["1", "2"], "image": [b"\xff\xd8", b"\xff"]}
    numbers = {"far": [1.0, math.inf], "none": [1.0, math.nan], "late": pa.array([10**13, 1], pa.timestamp("s"))}
    pq.write_table(pa.table({**columns, **numbers}), tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match=said):
        load_rows(config_of(data={"path": "rows.parquet", **keys}), tmp_path)


def test_a_map_is_a_list_of_pairs_with_the_digits_that_they_have(tmp_path: Path) -> None:
    shares = pa.array([[("a", 0.1)]], pa.map_(pa.string(), pa.float32()))
    pq.write_table(pa.table({"question": ["q"], "answer": ["1"], "shares": shares}), tmp_path / "rows.parquet")
    (row,) = load_rows(config_of(data={"path": "rows.parquet"}), tmp_path)
    assert row["shares"] == [["a", 0.1]]


def test_values_of_numpy_and_torch_in_a_row_are_plain() -> None:
    row = {
        "question": "q", "answer": np.int64(5), "small": np.float32(0.1), "many": np.array([[0.1, 2]], np.float32),
        "yes": np.bool_(True), "tensor": torch.tensor([1, 2]), "words": np.array(["a", None], object), 3: (1, 2),
        "thing": object(), "text": np.str_("t"),
    }  # fmt: skip
    assert complete_row(row, config_of(data={"path": "x.jsonl"}).data, "here") == {
        "question": "q", "answer": "5", "small": 0.1, "many": [[0.1, 2.0]], "yes": True, "tensor": [1, 2],
        "words": ["a", None], "3": [1, 2], "text": "t", "replaced": {"answer": 5},
        "_unread_columns": {"thing": "here has a value of the type object"},
    }  # fmt: skip


CALLED = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def test_messages_of_a_row_keep_their_tool_calls_and_null_contents(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "1+1?", "name": None},
        {"role": "assistant", "content": None, "tool_calls": [CALLED]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
        {"role": "user", "content": "And?"},
    ]
    write(tmp_path, json.dumps({"question": messages, "answer": "2"}))
    config = config_of(data={"path": "own.jsonl"})
    (row,) = load_rows(config, tmp_path)
    asked = prompt_of(row, config.data)
    assert asked.messages == [{"role": "user", "content": "1+1?"}, {**messages[1], "content": ""}, *messages[2:]]
    assert '"name": "add"' in asked.text
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments.a }}]{% endfor %};{% endfor %}"
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=template)
    assert chat(asked.messages, None, tokenizer) == "user:1+1?;assistant:[add 1];tool:2;user:And?;"


def test_numbers_and_names_that_json_cannot_hold_are_left_out_of_a_row() -> None:
    row = {"question": "q", "answer": "a", "large": -(10**5000), "most": 10**4000 - 1, 10**5000: 1, "\ud83d": 2,
           "deep": [{10**5000: 1}], "decimal": Decimal("1" * 5000)}  # fmt: skip
    read = complete_row(row, config_of(data={"path": "x.jsonl"}).data, "here")
    assert set(read) == {"question", "answer", "most", "_unread_columns"}
    assert set(read["_unread_columns"]) == {"large", "a whole number of 16610 bits", "\ufffd", "deep", "decimal"}
    assert json.loads(json.dumps(read, ensure_ascii=False).encode()) == read


def test_numbers_that_are_not_finite_stay_in_the_tests_of_a_row() -> None:
    row = {"question": "q", "answer": "a", "plus_input": [[math.inf, 1], [math.nan]], "limit": np.float32("inf")}
    read = complete_row(row, config_of(data={"path": "x.jsonl"}).data, "here")
    assert read["plus_input"][0] == [math.inf, 1]
    assert math.isnan(read["plus_input"][1][0])
    assert read["limit"] == math.inf
