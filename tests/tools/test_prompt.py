import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from areal_bus.core.events import Event
from areal_bus.errors import ConfigError
from tests.tools.audit.forged_terms import crashed_run
from tools import prompt, terminal

Out = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three terms: prompt 4 is trained, erased and given again, trained and undone, and trained again."""
    return crashed_run().save(tmp_path)


def sentences(capsys: Out, *words: str) -> list[str]:
    assert prompt.main(words) == 0
    return [line.split(None, 2)[2] for line in capsys.readouterr().out.splitlines()[3:]]


def test_a_prompt_is_followed_through_undone_terms_to_its_last_batch(run: Path, capsys: Out) -> None:
    found = sentences(capsys, str(run), "4")
    assert [line for line in found if line.startswith(("admitted", "attempt", "term", "version"))] == [
        "admitted at version 1: row 4, pass 0; 3 live and 0 in training with it",
        "attempt 0 leased to generator-0.0: 2 samples",
        "version 2 made of its batch",
        "version 2 published: its credit is free",
        "term 1 begins at version 1: erased",
        "admitted at version 1: row 4, pass 0; 3 live and 0 in training with it",
        "attempt 1000 leased to generator-0.0: 2 samples",
        "version 3 made of its batch",
        "version 3 published: its credit is free",
        "term 2 begins at version 2: stays open, verdicts kept of samples 0",
        "attempt 2000 leased to generator-1.0: 1 sample",
        "version 3 made of its batch",
        "version 3 published: its credit is free",
    ]
    assert found[-4] == "sample 0 is in batch 2: reward 104, 5 tokens, largest lag 1"
    assert "sample 1 ends: 5 tokens of versions 1 (3), 2 (2), stop" in found


def test_a_refund_has_its_reason_and_its_lost_samples(run: Path, capsys: Out) -> None:
    found = sentences(capsys, str(run), "7")
    assert "refunded, reward_error: age 0, 2 scored samples and 10 tokens not trained" in found
    assert "sample 1 scored in 0 s: error: no answer" in found


def test_a_problem_of_an_evaluation_is_no_training_prompt(run: Path, capsys: Out) -> None:
    name = next(line["evaluation"] for line in events(run, "request") if line.get("evaluation"))
    found = sentences(capsys, str(run), "0", "--evaluation", name)
    assert found[0].startswith("sample 0 begins")
    assert not any(line.startswith(("admitted", "version", "term")) for line in found)


def test_the_lines_of_the_journal_are_printed_as_they_are(run: Path, capsys: Out) -> None:
    assert prompt.main([str(run), "2", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["event"] for line in lines[:3]] == ["admit", "lease", "request"]
    assert all(line["uid"] == 2 for line in lines if "uid" in line)


def test_an_unknown_prompt_is_refused_with_those_that_there_are(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown prompt 99: \S+ has prompts 0 to \d+$"):
        prompt.main([str(run), "99"])
    with pytest.raises(ConfigError, match=r"unknown prompt 0: \S+ has no problems of the evaluation 'none'$"):
        prompt.main([str(run), "0", "--evaluation", "none"])


KEYS = (
    "wall", "role", "rank", "inc", "uid", "attempt", "holder", "step", "version", "versions", "sample", "n", "n_tokens",
    "status", "reward", "error", "born", "row", "epoch", "live", "in_training", "clock", "n_masked", "finish", "term",
    "open", "kept", "next_uid", "name", "state", "why", "reason", "age",
)  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
def test_lines_without_one_of_their_keys_are_shown_as_incomplete(run: Path, capsys: Out, key: str) -> None:
    for path in (run / "journal").glob("*.jsonl"):
        kept = [{k: v for k, v in json.loads(line).items() if k != key} for line in path.read_text().splitlines()]
        path.write_text("".join(f"{json.dumps(line)}\n" for line in kept))
    if key == "uid":
        with pytest.raises(ConfigError, match="unknown prompt 4"):
            prompt.main([str(run), "4"])
    else:
        assert len(sentences(capsys, str(run), "4")) > 5
        assert prompt.main([str(run), "7", "--json"]) == 0


@pytest.mark.parametrize("words", [["12", "RUN"], ["RUN"], ["1.5"]])
def test_words_in_the_wrong_order_are_refused_with_the_right_one(capsys: Out, words: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        prompt.main(words)
    said = f"argument UID: must be a whole number, and come after RUN: it is {words[-1]!r}"
    assert said in capsys.readouterr().err


def test_json_of_a_run_cannot_control_the_terminal() -> None:
    value = {"error": "für \u202e\x9b31m \ud800 \U000e0001 \x1b[2J \u2028 日本"}
    line = terminal.json_line(value)
    assert line.isprintable()
    assert "für" in line
    assert "日本" in line
    assert json.loads(line) == value


def test_every_event_of_a_prompt_has_a_sentence() -> None:
    assert set(prompt.OF_PROMPTS) <= set(prompt.SENTENCES)
    assert set(prompt.OF_PROMPTS) | set(prompt.OF_THE_RING) <= {str(event) for event in Event}


def events(folder: Path, *names: str) -> Sequence[dict[str, Any]]:
    files = (folder / "journal").glob("*.jsonl")
    lines = (json.loads(line) for file in files for line in file.read_text().splitlines())
    return [line for line in lines if line["event"] in names]


def test_hostile_text_of_an_error_reaches_the_terminal_escaped(tmp_path: Path, capsys: Out) -> None:
    forge = crashed_run()
    for line in (line for lines in forge.lines.values() for line in lines if line.get("error")):
        line["error"] = "\x1b[2J" + "x" * 10_000
    for line in (line for lines in forge.lines.values() for line in lines if line["event"] == "lease"):
        line["holder"] = "\x1b[31m\n"
    assert prompt.main([str(forge.save(tmp_path)), "7"]) == 0
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert max(map(len, output.splitlines())) < 300
