"""Notes on the rows before a run: dropped prompts, unknown tokens, problems that are training rows."""

import pytest

from actors.data.loading import RowWithOrigin
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError
from launch.checks.row_checks import check_prompts, seen_note, unknown_notes


def rows_of(*questions: str, answer: str = "b") -> list[RowWithOrigin]:
    return [RowWithOrigin(f"rows.jsonl:{n}", {"question": q, "answer": answer}) for n, q in enumerate(questions, 1)]


def scratch(**data: object) -> Config:
    sections = {
        "model": {"scratch": {}},
        "gconfig": {"max_new_tokens": 20},
        "data": {"path": "rows.jsonl", "max_prompt_tokens": 10, **data},
    }
    return Config.model_validate(sections)


def test_rows_over_the_limit_are_dropped_counted_and_named() -> None:
    rows = rows_of("a" * 5, "b" * 30, "c" * 10, "d" * 11)
    (note,) = check_prompts(scratch(long_prompts="drop"), rows, "")
    assert note.startswith("2 of 4 rows are dropped: ")
    assert note.endswith("rows.jsonl:2 (30), rows.jsonl:4 (11)")
    assert check_prompts(scratch(long_prompts="drop"), rows_of("a", "b"), "") == []
    with pytest.raises(ConfigError, match=r'the longest, rows.jsonl:2, has 30; .* or set data.long_prompts = "drop"'):
        check_prompts(scratch(), rows, "")


def test_a_run_whose_prompts_are_all_over_the_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the longest, rows.jsonl:1, has 30"):
        check_prompts(scratch(long_prompts="drop"), rows_of("a" * 30, "b" * 20), "")


def test_characters_missing_in_a_scratch_vocabulary_are_named_with_the_key_to_set() -> None:
    question, answer = unknown_notes(scratch(), rows_of("add A and b", "add c and d", answer="12"), "")
    assert question == "unknown tokens: 5% of the field question, such as 'A'; add them to model.scratch.characters"
    assert answer == "unknown tokens: 100% of the field answer, such as '12'; add them to model.scratch.characters"
    assert unknown_notes(scratch(), rows_of("add a and b"), "") == []


def test_held_out_problems_that_are_training_rows_are_counted() -> None:
    rows, problems = rows_of("one", "two", "three"), rows_of("two ", "four", "three")
    (note,) = seen_note(rows, problems)
    assert note.startswith("2 of 3 held-out problems are training rows: rows.jsonl:1, rows.jsonl:3;")
    assert seen_note(rows, rows_of("four")) == []
