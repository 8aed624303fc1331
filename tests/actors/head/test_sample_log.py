"""Samples are written whatever their texts are."""

import json
from dataclasses import replace
from pathlib import Path

from actors.head.sample_log import SampleLog, as_line
from areal_bus.core.effects import Keep
from areal_bus.messages import Scored

SCORED = Scored(
    status="value", reward=1.0, correct=None, error="", score_s=0.1, uid=0, sample=0, attempt=0, evaluation="",
    generator="generator-0.0", finish="stop", segments=[[1, 2]], spans=[[0, 2]], seconds=1.0, term=0,
    ids=b"\1\0\0\0" * 3, logps=b"\0\0\0\xbf" * 2, prompt_text="p", text="t",
)  # fmt: skip


def line_of(folder: Path, scored: Scored) -> dict[str, object]:
    log = SampleLog(folder)
    log.keep(Keep(scored, step=0, clock=0, n_masked=0))
    log.close()
    [line] = (folder / "samples" / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    read: dict[str, object] = json.loads(line)
    return read


def test_turns_that_are_no_pairs_of_texts_are_left_out(tmp_path: Path) -> None:
    texts = ["no JSON", '[["a"', "{}", "[1]", '[["a"]]', '[["a", 1]]', '[["\\q", ""]]', '"x"', "null"]
    for i, turns in enumerate([*texts, "[" * 100_000, "1" * 5000]):
        line = line_of(tmp_path / str(i), replace(SCORED, turns=turns))
        assert "turns" not in line, turns[:10]
        assert line["completion"] == "t"


def test_half_a_pair_in_turns_and_texts_is_replaced(tmp_path: Path) -> None:
    line = line_of(tmp_path, replace(SCORED, turns='[["a\\ud83d", "b"]]', text="\udc00", error="\ud83d"))
    assert (line["turns"], line["completion"], line["error"]) == ([["a\ufffd", "b"]], "\ufffd", "\ufffd")


def test_a_sample_has_the_answer_of_its_row() -> None:
    for row, answer in (('{"answer":"4"}', "4"), ('{"answer":[4]}', "[4]"), ("{}", None), ("", None)):
        assert as_line(Keep(SCORED, step=0, clock=0, n_masked=0, row=row)).get("answer") == answer, row
