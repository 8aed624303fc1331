import json
from pathlib import Path
from typing import Any

import pytest

from areal_bus.core.events import Event
from areal_bus.journal import Journal
from tools import breakdown

Out = pytest.CaptureFixture[str]


def write_incarnation(path: Path, *events: dict[str, Any]) -> None:
    who = {"role": "learner", "rank": 0, "inc": 0}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps({**who, **event}, separators=(",", ":")) + "\n" for event in events)
    path.write_text(text)


START = {"event": "start", "t": 50.0}


def test_labels_are_shown_as_shares_of_the_wall_time(tmp_path: Path, capsys: Out) -> None:
    write_incarnation(
        tmp_path / "journal" / "learner-0.0.jsonl",
        START,
        {"event": "spans", "t": 54.0, "s_train": 3.0, "s_wait": 1.0},
        {"event": "spans", "t": 60.0, "s_train": 4.5, "s_push": 1.5},
        {"event": "end", "t": 60.0, "wall_s": 10.0},
    )
    assert breakdown.main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "learner-0.0   10.0 s   ended" in lines
    assert [line.split()[:4] for line in lines if "#" in line] == [
        ["train", "7.50", "s", "75.0%"],
        ["push", "1.50", "s", "15.0%"],
        ["wait", "1.00", "s", "10.0%"],
    ]


@pytest.mark.parametrize(("s_train", "code"), [(9.95, 0), (10.09, 0), (9.85, 1), (10.15, 1)])
def test_labels_that_do_not_sum_to_the_wall_time_are_an_error(
    s_train: float, code: int, tmp_path: Path, capsys: Out
) -> None:
    write_incarnation(
        tmp_path / "journal" / "learner-0.0.jsonl",
        START,
        {"event": "spans", "t": 60.0, "s_train": s_train},
        {"event": "end", "t": 60.0, "wall_s": 10.0},
    )
    assert breakdown.main([str(tmp_path)]) == code
    assert ("I12: labels must sum to the wall time within 1%: learner-0.0" in capsys.readouterr().out) == bool(code)


def test_a_killed_actor_is_measured_up_to_its_last_label(tmp_path: Path, capsys: Out) -> None:
    path = tmp_path / "journal" / "learner-0.0.jsonl"
    write_incarnation(path, START, {"event": "spans", "t": 54.0, "s_train": 4.0}, {"event": "step", "t": 90.0})
    with path.open("a") as file:
        file.write('{"event":"spans","t":91.0,"s_tr')
    assert breakdown.main([str(tmp_path)]) == 0
    assert "learner-0.0   4.0 s   no end line (running or killed)" in capsys.readouterr().out


def test_incarnations_in_one_file_are_separated_and_an_error_is_shown(tmp_path: Path, capsys: Out) -> None:
    path = tmp_path / "journal" / "learner-0.0.jsonl"
    again = {"event": "start", "t": 500.0}
    write_incarnation(
        path, START, {"event": "spans", "t": 54.0, "s_a": 4.0}, again, {"event": "failed", "t": 500.1, "error": "no"}
    )
    assert [one.measured_s for one in breakdown.read_incarnations(path)] == [4.0, 0.0]
    assert breakdown.main([str(tmp_path)]) == 0
    assert "learner-0.0   0.0 s   failed: no\n  no labelled second yet" in capsys.readouterr().out


def test_an_error_that_the_head_reports_about_another_actor_is_not_its_own(tmp_path: Path) -> None:
    path = tmp_path / "journal" / "head-0.0.jsonl"
    write_incarnation(path, START, {"event": "failed", "t": 51.0, "error": "no", "name": "generator-0.0"})
    assert [one.error for one in breakdown.read_incarnations(path)] == [None]


def test_a_journals_own_spans_account_for_its_wall_time(tmp_path: Path, capsys: Out) -> None:
    for role in ("head", "generator", "learner"):
        book = Journal(tmp_path / "journal", role=role, index=0, incarnation=0)
        for step in range(100):
            with book.span("work"):
                book.write(Event.STEP, version=step)
        book.close()
    assert breakdown.main([str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["whole"] is True
    assert [actor["name"] for actor in told["actors"]] == ["generator-0.0", "head-0.0", "learner-0.0"]
