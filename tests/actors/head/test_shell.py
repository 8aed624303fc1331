"""The head's shell: in which order the world learns what the pure head has decided."""

import errno
import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from actors.head import shell as of_head
from actors.head.console import Console
from actors.head.shell import Shell, evicted_for_good, write_atomic
from actors.runtime.context import Context
from actors.runtime.process import OVER, code_of
from areal_bus.config.loader import resolve
from areal_bus.config.sections import Config
from areal_bus.core.effects import Effect, End, EvictForGood, Mark, Progress, Record, Save, Send
from areal_bus.core.events import Event
from areal_bus.core.parts.head_checkpoint import HeadCheckpoint, HeadSavepoint
from areal_bus.errors import CheckpointError, ConfigError
from areal_bus.messages import Ack, Evict, Finished, Heartbeat, Message, Stop, Term
from areal_bus.storage import run_files
from areal_bus.storage.head_checkpoints import path_of, save
from areal_bus.storage.journal import Journal
from tests.actors.head.test_alerts import kept
from tools.run import lines

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

    def send_all(self, letters: Iterable[tuple[str, Message]]) -> None:
        for letter in letters:
            self.send(*letter)


def context_of(run: Path, **others: Any) -> Context:
    where: dict[str, Any] = {"job": "j", "head": "ipc:///nowhere", "address": "127.0.0.1", "interface": "lo"}
    counts = dict.fromkeys(("n_generators", "n_rewards", "n_learners"), 1)
    folders = {"run_folder": str(run), "config_folder": str(run), "model_folder": ""}
    return Context("head", 0, rank=0, device="cpu", **{"incarnation": 0, **where, **counts, **folders, **others})


def carry_out(shell: Shell, wire: Wire, effects: Sequence[Effect]) -> None:
    shell._carry_out(cast(Any, wire), effects)


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    config: Config = resolve(TREE, "test", (), {})
    journal = Journal(tmp_path / "journal", role="head", index=0, incarnation=0)
    return Shell(context_of(tmp_path), config, journal)


@pytest.mark.parametrize("code", [0, 1])
def test_the_end_is_on_disk_before_stop_is_sent(tmp_path: Path, shell: Shell, code: int) -> None:
    """A head that dies between the two is not brought back to wait for actors that are gone."""
    wire, stop = Wire(tmp_path), Stop("over")
    carry_out(shell, wire, [Send("generator-1.0", Stop("replaced"))])
    assert shell.end is None
    effects = [
        Send("generator-0.0", Term(1, 0)),
        Send("learner-0.0", stop),
        Send("reward-0.0", stop),
        End(code, "over"),
    ]
    carry_out(shell, wire, effects)
    assert wire.sent == [
        ("generator-1.0", Stop("replaced"), False),
        ("generator-0.0", Term(1, 0), False),
        ("learner-0.0", stop, True),
        ("reward-0.0", stop, True),
    ]
    assert json.loads((tmp_path / "summary.json").read_text())["code"] == code


def test_all_are_stopped_and_the_run_keeps_its_code_when_the_summary_cannot_be_written(
    tmp_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk stays full; savepoints, which a run that is over does not need, make room."""
    tried: list[bool] = []
    waypoint = tmp_path / "frontiers" / "waypoint-0"

    def refuse(path: Path, text: str) -> None:
        tried.append(waypoint.exists())
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("actors.head.shell.write_atomic", refuse)
    monkeypatch.setattr("actors.head.shell.SUMMARY_S", 0.05)
    monkeypatch.setattr("actors.head.shell.RETRY_S", 0.03)
    waypoint.parent.mkdir(exist_ok=True)
    waypoint.write_bytes(b"a savepoint")
    wire = Wire(tmp_path)
    carry_out(shell, wire, [Send("learner-0.0", Stop("done")), End(0, "done")])
    assert [(to, message) for to, message, _ in wire.sent] == [("learner-0.0", Stop("done"))]
    assert (tried[0], tried[-1]) == (True, False)
    assert len(tried) > 1
    assert shell.end.code == 0


def test_a_restarted_head_waits_for_its_port_and_the_first_one_is_refused(
    tmp_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        endpoint = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        first = context_of(tmp_path, head=endpoint)
        with pytest.raises(ConfigError, match=r"Address already in use .*; start the job again"):
            of_head.open_bus(first, shell.config, shell)
        tries: list[float] = []

        def pause(seconds: float) -> None:
            tries.append(seconds)
            if len(tries) == 2:
                other.close()

        monkeypatch.setattr("actors.head.shell.time.sleep", pause)
        bus = of_head.open_bus(replace(first, incarnation=1), shell.config, shell)
        bus.close()
    assert len(tries) == 2


class Reading(Wire):
    """Notes, too, which uids the journal had as each message was sent."""

    def __init__(self, run: Path) -> None:
        super().__init__(run)
        self._journal = run / "journal" / "head-0.0.jsonl"
        self.written: list[list[int]] = []

    def send(self, to: str, message: Message) -> None:
        super().send(to, message)
        self.written.append([line["uid"] for line in lines(self._journal, "scored")])


def test_decisions_are_journalled_before_their_messages_are_sent(tmp_path: Path, shell: Shell) -> None:
    """Several messages are decided on together; a head that dies meanwhile has told nobody what it never wrote."""
    wire = Reading(tmp_path)
    acks = [Ack(uid, 0, 0, "") for uid in range(3)]
    effects = [x for ack in acks for x in (Send("generator-0.0", ack), Record(Event.SCORED, {"uid": ack.uid}))]
    carry_out(shell, wire, effects)
    assert [message for _, message, _ in wire.sent] == acks
    assert wire.written == [[0, 1, 2]] * 3


def test_messages_that_never_end_do_not_keep_the_head_from_its_deadlines(tmp_path: Path, shell: Shell) -> None:
    class Endless(Wire):
        n_taken = 0

        def receive(self, timeout_s: float) -> tuple[str, Message]:
            self.n_taken += 1
            assert self.n_taken < 10_000
            return "generator-0.0", Heartbeat(progress=0, version=None, note="")

    wire = Endless(tmp_path)
    shell._decide(cast(Any, wire), wire.receive(0))
    assert wire.n_taken > 1


def test_messages_before_a_savepoint_are_sent_before_it_is_written(tmp_path: Path, shell: Shell) -> None:
    wire = Reading(tmp_path)
    ack, waypoint = Ack(0, 0, 0, ""), HeadSavepoint("learner-0.0", HeadCheckpoint(3))
    before: list[Effect] = [Send("generator-0.0", ack), Record(Event.SCORED, {"uid": 0})]
    after: list[Effect] = [Record(Event.SCORED, {"uid": 1}), Send("generator-0.0", ack)]
    carry_out(shell, wire, [*before, Mark(waypoint), *after])
    assert wire.written == [[0], [0, 1]]
    assert [found.checkpoint.version for found in shell.checkpoints.waypoints()] == [3]


def test_warnings_are_logged_journalled_and_repeated_at_the_end(tmp_path: Path, shell: Shell) -> None:
    shell.console = Console(total_steps=3, out=(out := io.StringIO()))
    figures = {"reward": 0.0, "zero_advantage_share": 1.0, "truncated_share": 0.0}
    for step in range(3):
        carry_out(
            shell,
            Wire(tmp_path),
            [kept(step, step), Progress("step", {"version": step + 1, "v": step, **figures})],
        )
    assert "\nwarning: no group had a signal in 3 batches in a row" in out.getvalue()
    (note,) = lines(tmp_path / "journal" / "head-0.0.jsonl", "note")
    assert note["level"] == "warning"
    carry_out(shell, Wire(tmp_path), [End(0, "done")])
    assert json.loads((tmp_path / "summary.json").read_text())["batches_without_signal"] == 3
    shell._print_report()
    assert "\nwarning: none of 3 batches had a group with a signal" in out.getvalue()


def test_the_console_prints_steps_evaluations_and_warnings_after_an_actor_failed(tmp_path: Path, shell: Shell) -> None:
    """Its supervisor starts it again, and the run goes on."""
    shell.console = Console(total_steps=3, out=(out := io.StringIO()))
    figures = {"name": "step-2", "version": 2, "version_last": 2, "accuracy": None, "k": 1, "n": 4, "n_failed": 0}
    carry_out(
        shell,
        Wire(tmp_path),
        [
            Record(Event.FAILED, {"name": "generator-0.0", "error": "RuntimeError: out of memory"}),
            Progress("step", {"version": 1, "v": 0, "reward": 0.25}),
            Progress("evaluation", figures | {"reward": 0.5}),
            Progress("warning", {"text": "generator-0 is paused"}),
            Progress("note", {"name": "generator-0.1", "text": "loads the model"}),
        ],
    )
    for printed in ("0.250", "evaluation step-2", "warning: generator-0 is paused", "generator-0.1: loads the model"):
        assert printed in out.getvalue()


def test_the_next_head_of_a_start_knows_who_is_evicted_for_good_and_a_later_start_has_all(
    shell: Shell, tmp_path: Path
) -> None:
    known: list[list[int]] = []

    class Noted(Wire):
        def send_all(self, letters: Iterable[tuple[str, Message]]) -> None:
            known.append(evicted_for_good(tmp_path, "j"))
            super().send_all(letters)

    assert evicted_for_good(tmp_path, "j") == []
    orders = Send("generator-1.2", Evict("no", for_good=True))
    carry_out(shell, Noted(tmp_path), [EvictForGood((1,)), orders])
    assert known == [[1]], "it is on disk before the order is sent"
    assert evicted_for_good(tmp_path, "the next start") == []


def test_a_disk_that_does_not_take_an_eviction_for_good_is_a_warning(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "evicted.json").mkdir()
    wire = Wire(tmp_path)
    carry_out(shell, wire, [EvictForGood((1,)), Send("generator-1.2", Evict("no", for_good=True))])
    assert [to for to, _, _ in wire.sent] == ["generator-1.2"]
    assert evicted_for_good(tmp_path, "j") == []


@pytest.mark.parametrize("text", ["", '{"ter', "[]", "{}", "7", '{"term": "4"}', '{"term": null}', '{"term": -1}'])
def test_terms_go_on_where_the_last_head_was_and_a_torn_file_ends_the_job(tmp_path: Path, text: str) -> None:
    assert run_files.next_term(tmp_path) == 0
    write_atomic(tmp_path / run_files.TERM_FILE, json.dumps({"term": 4}))
    assert run_files.next_term(tmp_path) == 5
    (tmp_path / run_files.TERM_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=r"term\.json must hold .* write it with the largest") as caught:
        run_files.next_term(tmp_path)
    assert code_of(caught.value) == OVER
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("how", ["it is written", "the disk hangs", "the disk does not take it"])
def test_the_end_of_a_drained_run_names_the_checkpoint_with_a_head_checkpoint(
    tmp_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A checkpoint whose frontier is not on disk is none to go on from."""
    frontiers = tmp_path / "frontiers"
    for version in (2, 4):
        (tmp_path / "checkpoints" / f"step-{version:06d}").mkdir(parents=True)
    save(path_of(frontiers, 2), HeadCheckpoint(2))
    stuck = frontiers / ".frontier-000004.tmp"
    if how == "the disk hangs":
        os.mkfifo(stuck)
        monkeypatch.setattr(of_head, "CHECKPOINTS_S", 0.2)
    elif how == "the disk does not take it":
        stuck.mkdir()
    shell.head.state.is_draining = True
    shell.head.state.gate.u = 4
    shell.head.state.terms.finished[0] = Finished(str(tmp_path / "checkpoints" / "step-000004"), "")
    wire = Wire(tmp_path)
    carry_out(shell, wire, [Save(HeadCheckpoint(4)), End(0, "drained at version 4")])
    summary = json.loads((tmp_path / "summary.json").read_text())
    version = 4 if how == "it is written" else 2
    folder = str(tmp_path / "checkpoints" / f"step-{version:06d}")
    assert (summary["drained"], summary["versions"], summary["checkpoint"]) == (True, 4, folder)
    told = [line for line in shell._report() if "a resumed run starts at" in line]
    assert told == (
        [] if version == 4 else [f"version 4 has no complete checkpoint on disk: a resumed run starts at {folder}"]
    )
    if how == "the disk hangs":
        os.close(os.open(stuck, os.O_RDONLY))  # its thread goes on


def test_the_head_imports_nothing_large() -> None:
    """Its planned memory (launch/memory) has no room for numpy (11 MiB) or for tokenizers and the hub (8 MiB)."""
    large = ("torch", "numpy", "transformers", "tokenizers", "safetensors", "huggingface_hub")
    code = f"import sys, actors.head.shell; print([name for name in {large!r} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
