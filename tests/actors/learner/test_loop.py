"""The training loop is found by name."""

from pathlib import Path

import pytest

from actors.learner.loop import find_loop, train
from areal_bus.errors import ConfigError


def test_the_default_loop_is_ours() -> None:
    assert find_loop("ppo") is train


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("loop_a:train", "raise KeyError('x')", "must import: 'loop_a' does not .KeyError: 'x'."),
        ("loop_b:train", "trian = 1", "missing function 'train' in module 'loop_b' .learner.loop."),
        ("loop_c", "", "unknown learner.loop"),
        ("loop_missing:train", None, "No module named 'loop_missing'"),
    ],
)
def test_a_loop_that_cannot_be_found_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str | None, said: str
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    if text is not None:
        (tmp_path / f"{name.partition(':')[0]}.py").write_text(text)
    with pytest.raises(ConfigError, match=said):
        find_loop(name)
