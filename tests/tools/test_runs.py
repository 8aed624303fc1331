"""tools.runs: the table of all runs."""

import json
from pathlib import Path

import pytest

from areal_bus.errors import ConfigError
from tests.tools.test_export import Ring
from tools import runs

Out = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two runs: b is longer, and its best evaluation is not its last; latest points to it."""
    for name, scores in (("a", ()), ("b", (0.25, 0.75, 0.5))):
        ring = Ring(tmp_path / name)
        for _ in range(2 + len(scores)):
            ring.update(0.5)
        for version, score in enumerate(scores, start=5):
            evaluation = {"set": "", "version": version, "avg_at_k": score, "accuracy": score, "n": 8}
            ring.line("head", "evaluation", name=f"step-{version}", **evaluation)
        ring.line("head", "end", code=0, reason="done", wall_s=1.0)
        (tmp_path / name / "config.json").write_text(json.dumps({"rollout": {"max_head_offpolicyness": 2}}))
    (tmp_path / "latest").symlink_to("b")
    (tmp_path / "no-run").mkdir()
    return tmp_path


def test_the_list_has_each_run_once_with_its_best_evaluation(folder: Path, capsys: Out) -> None:
    assert runs.main([str(folder), "--json"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["name"], first["steps"], first["held_out"], first["metric"]) == ("a", 2, None, "")
    assert (second["name"], second["steps"], second["held_out"], second["metric"]) == ("b", 5, 0.75, "avg_at_k")
    assert {first["eta"], second["eta"]} == {2}
    assert {first["state"], second["state"]} == {"ended"}
    assert second["tokens_per_s"] > 0
    assert tuple(second) == runs.KEYS


@pytest.mark.parametrize(("key", "names"), [("name", "ab"), ("steps", "ba"), ("held_out", "ba"), ("state", "ab")])
def test_the_table_is_sorted_and_runs_without_the_value_come_last(
    folder: Path, capsys: Out, key: str, names: str
) -> None:
    assert runs.main([str(folder), "--sort", key]) == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split("  ")[0] == "name"
    assert "".join(row[0] for row in rows) == names


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing runs: "):
        runs.main([str(tmp_path)])
