"""Agents under a real generator: its bus, its pushes and whatever ends a conversation from outside."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from areal_bus.messages import Cancel, Prompt, PushDone, Refund, Sampled, SampleFailed, Term, Trajectory
from tests.actors.endpoint.test_http_server import TEMPLATE
from tests.support.generator_ring import Ring, prompt, ring
from tests.support.polling import is_alive, wait_until


def of_agent(name: str) -> dict[str, Any]:
    return {
        "function": "agent",
        "agent": {"function": f"tests.actors.endpoint.endpoint_agents:{name}", "chat_template": TEMPLATE},
    }


def ask(uid: int, **row: Any) -> Prompt:
    """One sample of a row for an agent."""
    return replace(prompt(uid, samples=(0,)), row=json.dumps({"question": "abc", **row}))


def answered_once(around: Ring) -> None:
    """The agent has its first answer, and the engine nothing to do."""
    around.beat_until(lambda beat: beat.progress > 0)


@pytest.mark.parametrize(("on_update", "spans"), [("recompute", [1, 2]), ("drain", [1])])
def test_a_push_between_two_calls_changes_the_weights_unless_conversations_drain(
    on_update: str, spans: list[int], tmp_path: Path
) -> None:
    rollout = {"max_concurrent_rollouts": 4, "on_update": on_update, "report_tokens": 1}
    with ring(tmp_path, workflow=of_agent("talk"), rollout=rollout) as around:
        around.join()
        around.push(1)
        around.tell(ask(0, go=str(tmp_path / "go")))
        answered_once(around)
        begin = around.begin(2)
        around.send_weights(begin)
        if on_update == "recompute":
            assert around.heard(PushDone).version == 2  # and no part of the sample: nobody can go on with an agent
        (tmp_path / "go").touch()
        t: Trajectory = around.heard(Trajectory, around.reward)
        assert [version for version, _ in t.spans] == spans
        assert len(t.segments) == 2
        heard = {type(around.heard(PushDone | Sampled)) for _ in range(1 if on_update == "recompute" else 2)}
        assert heard == ({Sampled} if on_update == "recompute" else {Sampled, PushDone})
        around.stop()
        assert not around.failed


def cancelled(around: Ring) -> None:
    around.tell(Cancel(0, 0))


def in_a_new_term(around: Ring) -> None:
    around.tell(Term(1, 0))
    unsampled: SampleFailed = around.heard(SampleFailed)
    assert (unsampled.uid, unsampled.reason) == (0, Refund.LOST_TIMELINE)


def stopped(around: Ring) -> None:
    around.stop()


@pytest.mark.parametrize("ended", [cancelled, in_a_new_term, stopped])
def test_whatever_ends_a_conversation_ends_its_agent(ended: Callable[[Ring], None], tmp_path: Path) -> None:
    with ring(tmp_path, workflow=of_agent("hangs")) as around:
        around.join()
        around.push(1)
        around.tell(ask(0, pids=str(tmp_path / "pids")))
        wait_until(lambda: (tmp_path / "pids").exists() and len((tmp_path / "pids").read_text().split()) == 2)
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        answered_once(around)
        ended(around)
        wait_until(lambda: not any(map(is_alive, pids)))
        assert not around.failed
