import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from actors.data.loading import load_problems, load_rows, load_sets, task_with_origins
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError
from areal_bus.messages import MAX_ROW_BYTES, Prompt
from areal_bus.wire import codec


def check_data(config: Config, folder: Path) -> None:
    """Read all data of this config."""
    load_rows(config, folder)
    load_sets(config, folder)


def config_of(**sections: dict) -> Config:
    return Config.model_validate(sections)


def write(folder: Path, *lines: str) -> Path:
    (folder / "own.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_a_data_file_is_found_next_to_the_config_and_in_the_working_directory(tmp_path, monkeypatch):
    write(tmp_path, '{"question": "1+1", "answer": "2", "level": 3}', "", '{"question": "2+2", "answer": "4"}')
    config = config_of(data={"path": "own.jsonl"})
    expected = [{"question": "1+1", "answer": "2", "level": 3}, {"question": "2+2", "answer": "4"}]
    assert load_rows(config, tmp_path) == expected
    monkeypatch.chdir(tmp_path)
    assert load_rows(config, tmp_path / "elsewhere") == expected


def test_answers_that_are_numbers_become_text_and_other_keys_are_copied(tmp_path):
    write(tmp_path, '{"problem": "half\u2028of 7", "solution": 3.5}', '{"problem": 5, "solution": 12}')
    config = config_of(data={"path": "own.jsonl", "question_key": "problem", "answer_key": "solution"})
    rows = load_rows(config, tmp_path)
    assert [(row["question"], row["answer"]) for row in rows] == [("half\u2028of 7", "3.5"), ("5", "12")]
    assert rows[0]["problem"] == "half\u2028of 7"  # a separator of lines within a text


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        (['{"question": "q", "answer": "a"}', '{"question": "q"'], ["own.jsonl:2", "JSON"]),
        (['{"question": "q", "answer": "a"}', "", '{"question": "q"}'], ["own.jsonl:3", "'answer'", "only 'question'"]),
        (['{"answer": "a", "text": "t"}'], ["own.jsonl:1", "'question'", "'text'", "data.question_key"]),
        (['{"question": "q", "answer": null}'], ["own.jsonl:1", "'answer'", "None"]),
        (['{"question": "q", "answer": "  "}'], ["own.jsonl:1", "not empty"]),
        (['{"question": "q", "answer": "\\ud800"}'], ["own.jsonl:1", "lone surrogate", r"\ud800"]),
        (['{"question": "q", "answer": {"\\udfff": 1}}'], ["own.jsonl:1", "'answer'", "lone surrogate"]),
        (['{"question": "q", "answer": NaN}'], ["own.jsonl:1", "'answer'", "the number nan"]),
        (['{"question": "q", "answer": -1e999}'], ["own.jsonl:1", "'answer'", "the number -inf"]),
        (['{"question": "q", "answer": "a", "demonstration": Infinity}'], ["'demonstration'", "the number inf"]),
        (['{"question": "q", "answer": ' + "[" * 100_000], ["own.jsonl:1", "levels"]),
        (['["q", "a"]'], ["own.jsonl:1", "list"]),
        ([""], ["own.jsonl", "at least one row"]),
    ],
)
def test_a_bad_row_is_refused_with_its_line_number_and_content(tmp_path, lines, parts):
    write(tmp_path, *lines)
    with pytest.raises(ConfigError) as caught:
        check_data(config_of(data={"path": "own.jsonl"}), tmp_path)
    assert all(part in str(caught.value) for part in parts), caught.value


def row_of(n_bytes: int, letter: str = "x") -> dict[str, str]:
    """A row of so many bytes as JSON."""
    empty = {"question": "q", "answer": ""}
    n = n_bytes - len(json.dumps(empty, ensure_ascii=False).encode())
    return empty | {"answer": letter * (n // len(letter.encode())) + "x" * (n % len(letter.encode()))}


@pytest.mark.parametrize("letter", ["x", "字"])
@pytest.mark.parametrize("where", ["data", "evaluate"])
def test_a_row_of_a_file_is_refused_at_the_start_where_no_message_holds_it(tmp_path, where, letter):
    """It passed the start, and ended the head, and each next one, when it was leased."""
    small = json.dumps({"question": "q", "answer": "a"})
    for n_bytes in (MAX_ROW_BYTES, MAX_ROW_BYTES + 1):
        large = json.dumps(row_of(n_bytes, letter), ensure_ascii=False)
        (tmp_path / "own.jsonl").write_text(small if where == "evaluate" else large, encoding="utf-8")
        (tmp_path / "test.jsonl").write_text(large, encoding="utf-8")
        config = config_of(data={"path": "own.jsonl"}, evaluate={"path": "test.jsonl", "before": where == "evaluate"})
        if n_bytes == MAX_ROW_BYTES:
            check_data(config, tmp_path)
            row = load_problems(config, tmp_path)[0] if where == "evaluate" else load_rows(config, tmp_path)[0]
            codec.check(Prompt(0, 0, 0, [0], "", json.dumps(row | {"source": "a" * 1000}, ensure_ascii=False)))
        else:
            with pytest.raises(ConfigError, match=rf"too large: .*has {n_bytes} bytes as JSON; {MAX_ROW_BYTES} are"):
                check_data(config, tmp_path)


def test_a_generated_row_is_refused_at_the_start_where_no_message_holds_it():
    rows = [row_of(MAX_ROW_BYTES), row_of(MAX_ROW_BYTES + 1)]
    assert task_with_origins(rows[:1], "data.task = 'own', row")
    with pytest.raises(ConfigError, match=r"too large: data\.task = 'own', row 1 has"):
        task_with_origins(rows, "data.task = 'own', row")


def test_verls_rows_load_with_messages_and_nested_keys(tmp_path):
    row = {
        "data_source": "gsm8k",
        "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "1+1"}]}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"answer": 3, "a.b": 1},
    }
    write(tmp_path, json.dumps(row))
    for key, answer in [("reward_model.ground_truth", "2"), ("extra_info.answer", "3")]:
        config = config_of(data={"path": "own.jsonl", "question_key": "prompt", "answer_key": key})
        assert load_rows(config, tmp_path) == [row | {"question": "1+1", "answer": answer}]
    write(tmp_path, '{"a.b": "flat first", "a": {"b": "nested"}, "answer": "x"}')
    (row,) = load_rows(config_of(data={"path": "own.jsonl", "question_key": "a.b"}), tmp_path)
    assert row["question"] == "flat first"


USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": None}
NO_PROMPTS: list[tuple[list[object], str]] = [
    ([], "is an empty list of chat messages"),
    ([{"role": "user"}], "content of a chat message must be text"),
    (["hello"], '"role"'),
    ([{"role": "user", "content": [{"type": "image_url"}]}], "parts of the type text"),
    ([USER, {"role": "assistant", "content": "a"}], "before the assistant's turn"),
    ([{"role": "system", "content": "q"}], "missing user message"),
    ([USER, {"role": "assistant"}, USER], ""),
    ([USER, ANSWER | {"content": 3}, USER], ""),
    ([USER, ANSWER | {"tool_calls": "add"}, USER], ""),
    ([USER, ANSWER | {"tool_calls": [{"name": "add"}]}, USER], ""),
    ([USER, ANSWER | {"content": [{"type": "image_url"}]}, USER], ""),
]


def test_messages_that_are_no_prompt_or_no_template_can_write_are_refused_with_their_place(tmp_path):
    for messages, part in NO_PROMPTS:
        write(tmp_path, json.dumps({"question": messages, "answer": "a"}))
        with pytest.raises(ConfigError, match=r"own\.jsonl:1") as caught:
            check_data(config_of(data={"path": "own.jsonl"}), tmp_path)
        assert part in str(caught.value), messages


def test_a_path_without_a_file_is_named_with_the_places_that_were_tried(tmp_path):
    for path in ("missing.jsonl", "./missing", "/no/such/file", "a/b/c"):
        with pytest.raises(ConfigError, match="was not found as"):
            check_data(config_of(data={"path": path}), tmp_path)
    with pytest.raises(ConfigError, match="is another folder"):
        check_data(config_of(data={"path": "."}), tmp_path)


def test_a_hub_id_is_refused_with_the_install_command_without_the_datasets_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"run pip install --constraint /\S+/constraints.txt 'areal-bus\[hf\]'"):
        check_data(config_of(data={"path": "openai/gsm8k"}), tmp_path)


def test_a_hub_id_is_loaded_with_its_subset_and_split_and_evaluated_on_test(tmp_path, monkeypatch):
    asked = []

    def load_dataset(path, name=None, *, split):
        asked.append((path, name, split))
        if name == "broken":
            raise RuntimeError("no such subset\nmore")
        return [{"question": "q", "answer": split}]

    module = ModuleType("datasets")
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    config = config_of(data={"path": "openai/gsm8k"}, evaluate={"path": "owner/name:subset", "after": True})
    assert load_rows(config, tmp_path)[0]["answer"] == "train"
    assert load_problems(config, tmp_path)[0]["answer"] == "test"
    assert asked == [("openai/gsm8k", "main", "train"), ("owner/name", "subset", "test")]
    with pytest.raises(ConfigError, match=r"no such subset$"):
        check_data(config_of(data={"path": "owner/name:broken"}), tmp_path)


def test_problems_are_the_held_out_ones_unless_a_file_is_given_and_limits_hold(tmp_path):
    write(tmp_path, *(json.dumps({"question": str(n), "answer": str(n)}) for n in range(5)))
    config = config_of(data={"task": "sums", "limit": 7}, evaluate={"limit": 3})
    assert (len(load_rows(config, tmp_path)), len(load_problems(config, tmp_path))) == (7, 3)
    own = config_of(data={"task": "sums"}, evaluate={"path": "own.jsonl", "limit": 4})
    assert [row["answer"] for row in load_problems(own, tmp_path)] == ["0", "1", "2", "3"]
    assert load_problems(config_of(data={"path": "own.jsonl"}), tmp_path) == []
