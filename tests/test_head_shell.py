"""The head's shell: in which order the world learns what the pure head has decided."""

import json
from pathlib import Path
from typing import Any

import pytest

from actors.context import Context
from actors.head import Shell
from areal_bus.config import Config
from areal_bus.effects import End, Send
from areal_bus.journal import Journal
from areal_bus.messages import Message, Stop, Term
from areal_bus.settings import resolve

TREE: dict[str, Any] = {
    "model": {"scratch": {}},
    "data": {"task": "reverse", "chat_template": False},
}


class Wire:
    """Takes what is sent, and notes whether the end was on disk by then."""

    def __init__(self, run: Path) -> None:
        self._summary = run / "summary.json"
        self.sent: list[tuple[str, Message, bool]] = []

    def send(self, to: str, message: Message) -> None:
        self.sent.append((to, message, self._summary.exists()))


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    config: Config = resolve(TREE, "test", (), {})
    context = Context(
        role="head", index=0, incarnation=0, rank=0, job="j", head="ipc:///nowhere", address="127.0.0.1",
        interface="lo", device="cpu", n_generators=1, n_rewards=1, n_learners=1, run_folder=str(tmp_path),
        config_folder=str(tmp_path), model_folder="",
    )  # fmt: skip
    return Shell(context, config, Journal(tmp_path / "journal", role="head", index=0, incarnation=0))


@pytest.mark.parametrize("code", [0, 1])
def test_the_end_is_on_disk_before_anybody_is_told_to_stop(tmp_path: Path, shell: Shell, code: int) -> None:
    """A head that dies between the two is not brought back to wait for actors that are gone."""
    wire, stop = Wire(tmp_path), Stop("over")
    effects = [
        Send("generator-0.0", Term(1, 0)),
        Send("learner-0.0", stop),
        Send("reward-0.0", stop),
        End(code, "over"),
    ]
    shell._carry_out(wire, effects)  # type: ignore[arg-type]
    assert wire.sent == [
        ("generator-0.0", Term(1, 0), False),
        ("learner-0.0", stop, True),
        ("reward-0.0", stop, True),
    ]
    assert json.loads((tmp_path / "summary.json").read_text())["code"] == code


def test_an_actor_that_was_replaced_is_told_to_stop_and_nothing_has_ended(tmp_path: Path, shell: Shell) -> None:
    wire = Wire(tmp_path)
    shell._carry_out(wire, [Send("generator-0.0", Stop("replaced"))])  # type: ignore[arg-type]
    assert wire.sent == [("generator-0.0", Stop("replaced"), False)]
    assert shell.end is None
