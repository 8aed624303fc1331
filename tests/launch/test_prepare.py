"""Input that is refused before the first file of a run is written, with its place and the change to make."""

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from actors.data.fields import UNREAD
from actors.data.loading import RowWithOrigin
from actors.models.loading import load_model, load_tokenizer
from actors.models.scratch import write_scratch_folder
from areal_bus.config.loader import load
from areal_bus.config.sections import ScratchConfig
from areal_bus.errors import ConfigError
from areal_bus.process.commands import install_command
from launch.commands.dry_run import dry_run
from launch.run.prepare import fingerprint, prepare, prepare_in_subprocess

SMALL = """
[model.scratch]
max_positions = 24
[data]
path = "rows.jsonl"
prompt = "{question}>"
chat_template = false
max_prompt_tokens = 16
[gconfig]
n_samples = 2
max_new_tokens = 8
"""
ROWS = [{"question": "abc", "answer": "c", "unit": "m"}, {"question": "abcdefghij", "answer": "j"}]
TEMPLATE = "{% for m in messages %}<{{ m['content'] }}|{% endfor %}"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config with two rows of 4 and 11 tokens, in a working directory of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    write_rows(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "small.toml").write_text(SMALL)
    return tmp_path / "small.toml"


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def refusal(file: Path, *overrides: str) -> str:
    """The error text. No file of a run exists."""
    with pytest.raises(ConfigError) as caught:
        prepare(load(file, overrides, {}), file)
    assert "\n" not in str(caught.value)
    assert not (file.parent / "runs").exists()
    return str(caught.value)


@pytest.fixture
def model(file: Path) -> Path:
    """A transformers folder of the same characters, with weights and without a chat template."""
    write_scratch_folder(file.parent / "shape", ScratchConfig(hidden_size=16, layers=1, heads=2, max_positions=24))
    folder = file.parent / "whole"
    load_model(str(file.parent / "shape"), "float32", "cpu", random_seed=1).save_pretrained(folder)
    load_tokenizer(str(file.parent / "shape")).save_pretrained(folder)
    file.write_text(SMALL.replace("[model.scratch]\nmax_positions = 24", '[model]\npath = "whole"'), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "rollout.engine must import: 'own_engine' does not (ModuleNotFoundError"),
        (
            "import nowhere",
            "rollout.engine must import: 'own_engine' does not (ModuleNotFoundError: No module named 'now",
        ),
        ("open_it = 3", "missing function 'open_it' in module 'own_engine' (rollout.engine)"),
        ("def open_it(context): ...", "(open_it(context)) is called with (context, config, tokenizer): too many"),
    ],
)
def test_an_engine_of_the_user_that_cannot_open_is_refused_before_actors_start(
    file: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, said: str
) -> None:
    monkeypatch.delitem(sys.modules, "own_engine", raising=False)
    if text is not None:
        (file.parent / "own_engine.py").write_text(text)
    assert said in refusal(file, "rollout.engine=own_engine:open_it")


@pytest.mark.parametrize("kind", ["scratch", "folder"])
def test_a_prompt_over_the_limit_is_refused_with_its_line_and_both_remedies(
    file: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    if kind == "folder":
        request.getfixturevalue("model")
    output = refusal(file, "data.max_prompt_tokens=10")
    assert "at most data.max_prompt_tokens = 10 tokens" in output
    assert "rows.jsonl:2, has 11; set data.max_prompt_tokens = 11 (or more), or remove rows of that length" in output


@pytest.mark.parametrize(
    ("kind", "name"), [("scratch", "model.scratch.max_positions"), ("folder", "the model's max_position_embeddings")]
)
def test_a_prompt_that_leaves_no_room_for_its_completion_is_refused(
    file: Path, kind: str, name: str, request: pytest.FixtureRequest
) -> None:
    if kind == "folder":
        request.getfixturevalue("model")
    output = refusal(file, "gconfig.max_new_tokens=14")
    assert f"a prompt plus gconfig.max_new_tokens = 14 may have at most {name} = 24 tokens" in output
    assert "rows.jsonl:2, has 11; set gconfig.max_new_tokens = 13 (or less)" in output


def test_evaluation_problems_have_the_same_limits(file: Path) -> None:
    write_rows(file.parent / "held.jsonl", [{"question": "a" * 16, "answer": "b"}])
    assert "held.jsonl:1, has 17" in refusal(file, "evaluate.path=held.jsonl", "evaluate.after=true")
    absent = refusal(file, "evaluate.path=none.jsonl", "evaluate.after=true")
    assert "the data file must exist: 'none.jsonl'" in absent
    prepare(load(file, ["evaluate.path=held.jsonl"], {}), file)


@pytest.mark.parametrize("kind", ["scratch", "folder"])
def test_token_ids_of_another_vocabulary_are_refused_also_by_a_dry_run(
    file: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    if kind == "folder":
        request.getfixturevalue("model")
    for change, key in (
        ("gconfig.stop_token_ids=[3, 31]", "stop_token_ids"),
        ('gconfig.logit_bias={ "31" = 1 }', "logit_bias"),
    ):
        output = refusal(file, change)
        assert output.startswith(f"unknown token id 31 in gconfig.{key}: the model has 31 tokens")
        with pytest.raises(ConfigError, match="the model has 31 tokens"):
            dry_run(load(file, [change], {}), file, None)
    prepare(load(file, ["gconfig.stop_token_ids=[30]"], {}), file)


def test_an_argument_that_the_chat_template_does_not_read_is_refused(file: Path, model: Path) -> None:
    (model / "chat_template.jinja").write_text(TEMPLATE + "{% if short %}x{% endif %}")
    chat = "data.chat_template=true"
    output = refusal(file, chat, "data.chat_template_kwargs={ enable_thinkin = false }")
    assert "'enable_thinkin' is not in that of whole" in output
    prepare(load(file, [chat, "data.chat_template_kwargs={ short = true }"], {}), file)


def test_a_generated_row_is_named_by_its_number(file: Path) -> None:
    file.write_text(SMALL.replace('path = "rows.jsonl"', 'task = "reverse"'), encoding="utf-8")
    output = refusal(file, "data.max_prompt_tokens=5")
    assert "data.task = 'reverse', row " in output
    assert "or lower data.largest, or set data.long_prompts" in output


def test_prompts_of_a_users_workflow_are_not_checked(file: Path) -> None:
    (file.parent / "own_flow.py").write_text(
        "from actors.workflows.protocol import Episode\nclass Flow:\n    def __init__(self, config): ...\n"
        "    async def episode(self, row, ask): return Episode((await ask([3])).text)\n"
    )
    prepare(load(file, ["data.max_prompt_tokens=3", "workflow.function=own_flow:Flow"], {}), file)


def test_a_chat_template_is_required_and_counted(file: Path, model: Path) -> None:
    assert "needs a tokenizer with a template" in refusal(file, "data.chat_template=true")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    output = refusal(file, "data.chat_template=true", "data.max_prompt_tokens=12")
    assert "rows.jsonl:2, has 13" in output
    (model / "chat_template.jinja").write_text("{{ raise_exception('no such role') }}")
    assert "no such role" in refusal(file, "data.chat_template=true")


def test_a_workflow_whose_init_raises_is_refused_in_one_line(file: Path) -> None:
    (file.parent / "raising_flow.py").write_text(
        "print('hello', end='')\nclass Flow:\n    def __init__(self, config): raise KeyError('tools')\n"
        "    async def episode(self, row, ask): ...\n"
    )
    output = refusal(file, "workflow.function=raising_flow:Flow")
    assert "must build from the config alone: Flow(config) of" in output
    assert output.endswith("raised KeyError: 'tools' (raising_flow.py:3)")  # item 15
    with pytest.raises(ConfigError, match="raised KeyError: 'tools'"):
        prepare_in_subprocess(load(file, ["workflow.function=raising_flow:Flow"], {}), file)


@pytest.mark.parametrize(
    ("files", "change", "fault"),
    [
        ({"taken": ""}, "journal.dir=taken/j", "journal.dir must be a writable folder: taken/j"),
        ({"own_tracker.py": "class Writer:\n    takes_undo = is_rewritten = takes_samples = False"},
         'journal.tracker=["own_tracker:Writer"]', "'own_tracker:Writer' has no write, close"),
        ({"rows.jsonl": '{"question": "a", "answer": "b"}\n{"question": "\\ud800", "answer": "b"}\n'}, "run.seed=1",
         "rows.jsonl:2 has text with the lone surrogate '\\ud800'"),
        ({}, "data.prompt={question} {unit}>", "unknown field {unit} in data.prompt"),
        ({}, "reward.function=nowhere:score", "reward.function 'nowhere:score' must import"),
        ({}, "workflow.function=nowhere:Flow", "workflow.function 'nowhere:Flow' must import"),
        ({}, "learner.loop=nowhere:train", "learner.loop must import: 'nowhere' does not"),
        ({}, "model.scratch.heads=3", "model.scratch.hidden_size must be an even multiple"),
    ],
)  # fmt: skip
def test_files_and_settings_that_do_not_fit_are_refused(
    file: Path, files: dict[str, str], change: str, fault: str
) -> None:
    for name, text in files.items():
        (file.parent / name).write_text(text)
    assert fault in refusal(file, change)


def test_a_tracker_whose_package_is_missing_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_bus.config.names.trackers.find_spec", lambda package: None)
    said = refusal(file, 'journal.tracker=["csv", "wandb"]')
    assert said.endswith(f"run {install_command('wandb')}")


def test_a_run_records_where_it_was_started_and_keeps_the_date_of_its_first_start(file: Path) -> None:
    run = Path(prepare(load(file, (), {}), file).run_folder)
    origin = json.loads((run / "origin.json").read_text())
    folder = str(file.parent)
    known = {"config": str(file), "folder": folder, "working_folder": folder, "rows": 2}
    assert {key: origin[key] for key in known} == known
    assert len(origin["date"]) == len("2025-03-07")
    (run / "origin.json").write_text(json.dumps(origin | {"date": "2025-03-07"}))
    prepare(load(file, (), {}), file, run)
    assert json.loads((run / "origin.json").read_text())["date"] == "2025-03-07"


DISTILLED = ("actor.advantage=distill", "gconfig.n_samples=2")


def test_a_teacher_and_a_reference_with_the_tokenizer_of_the_policy_are_accepted(file: Path, model: Path) -> None:
    prepare(load(file, [*DISTILLED, "teacher.path=whole", "actor.kl_ctl=0.1", "reference.path=whole"], {}), file)
    file.write_text(SMALL, encoding="utf-8")  # the policy is from scratch, with the same characters
    prepare(load(file, [*DISTILLED, "teacher.path=whole"], {}), file)


def test_a_frozen_model_of_another_tokenizer_is_refused(file: Path, model: Path) -> None:
    write_scratch_folder(file.parent / "shape2", ScratchConfig(characters="zyxabc", hidden_size=16, layers=1, heads=2))
    other = file.parent / "other"
    load_model(str(file.parent / "shape2"), "float32", "cpu", random_seed=1).save_pretrained(other)
    load_tokenizer(str(file.parent / "shape2")).save_pretrained(other)
    said = refusal(file, *DISTILLED, "teacher.path=other")
    assert said.startswith("teacher.path must be a model with the policy's tokenizer: 28 tokens have another id or are")
    said = refusal(file, "actor.kl_ctl=0.1", "reference.path=other")
    assert said.startswith("reference.path must be a model with the policy's tokenizer")


def test_a_frozen_model_without_weights_or_room_or_folder_is_refused(file: Path, model: Path) -> None:
    assert "has no weights; name the RUN/model of a run" in refusal(file, *DISTILLED, "teacher.path=shape")
    said = refusal(file, *DISTILLED, "teacher.path=whole", "gconfig.max_new_tokens=9")
    assert "data.max_prompt_tokens + gconfig.max_new_tokens = 25 tokens" in said
    assert refusal(file, *DISTILLED, "teacher.path=./nowhere").startswith("teacher.path must be a model folder or")


def test_a_warm_up_on_rows_of_a_file_needs_demonstrations_that_are_texts(file: Path) -> None:
    warm_up = "learner.warmup.steps=1"
    assert "none of the 2 rows has one; add it, or set learner.warmup.steps = 0" in refusal(file, warm_up)
    write_rows(file.parent / "rows.jsonl", [ROWS[0], {**ROWS[1], "demonstration": 5}])
    assert refusal(file, warm_up).endswith("rows.jsonl:2 it is of type int")
    write_rows(file.parent / "rows.jsonl", [ROWS[0], {**ROWS[1], "demonstration": "j"}])
    prepare(load(file, [warm_up], {}), file)


TAKES_GOLD = {
    "own": 'def score(prompt, completion, row):\n    return float(row["gold"] == completion)\n',
    "trl": "def score(completions, gold, **kwargs):\n    return [1.0 for _ in completions]\n",
}


@pytest.mark.parametrize("kind", TAKES_GOLD)
def test_a_reward_that_takes_a_column_that_cannot_be_read_is_refused_by_file_row_and_column(
    file: Path, kind: str
) -> None:
    columns = {"question": ["abc", "ab"], "answer": ["c", "b"], "gold": [b"\xff\xfe", b"\xff"]}
    parquet.write_table(pyarrow.table(columns), file.parent / "rows.parquet")
    (file.parent / "takes_gold.py").write_text(TAKES_GOLD[kind])
    said = refusal(file, "data.path=rows.parquet", "reward.function=takes_gold:score")
    where = file.parent / "rows.parquet"
    why = f"{where}[0] has 2 bytes that are no UTF-8 text; change it in the file"
    assert said.endswith(f"; unreadable value in column 'gold': {why}")
    assert said.count("unreadable") == 1


def test_the_place_of_an_unreadable_value_is_no_part_of_the_data(file: Path) -> None:
    (one, other) = [
        RowWithOrigin("", {"question": "q", "answer": "a", UNREAD: {"image": f"{place} has 2 bytes"}}) for place in "ab"
    ]
    assert fingerprint([one]) == fingerprint([other])
