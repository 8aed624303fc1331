"""The generator actor over a real bus and real pushes: the test speaks for the head, a reward and the learner."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.models.loading import load_tokenizer
from actors.runtime import process
from actors.runtime.head_session import HeadSession
from areal_bus import messages as m
from areal_bus.errors import ActorFailed, ConfigError
from tests.support.generator_ring import WAIT_S, Ring, joined, prompt, ring


def test_prompts_become_trajectories_whose_log_probs_a_fresh_forward_confirms(tmp_path: Path) -> None:
    with ring(tmp_path) as around:
        around.join()
        around.tell(prompt(0))  # before any weights: it waits for them
        around.push(1)
        around.tell(prompt(1, "zyx w"))
        for _ in range(4):
            t: m.Trajectory = around.heard(m.Trajectory, around.reward)
            sampled: m.Sampled = around.heard(m.Sampled)
            assert (sampled.uid, sampled.sample) == (t.uid, t.sample)
            ids, logps = np.frombuffer(t.ids, "<i4").tolist(), torch.from_numpy(np.frombuffer(t.logps, "<f4").copy())
            ((n_given, n_sampled),) = t.segments
            assert (len(ids), len(logps), sampled.n_tokens) == (n_given + n_sampled, n_sampled, n_sampled)
            assert t.spans == [[1, n_sampled]]
            with torch.no_grad():
                all_logp = torch.log_softmax(around.model(1)(torch.tensor([ids])).logits[0], -1)
            expected = all_logp[n_given - 1 : -1].gather(-1, torch.tensor(ids[n_given:])[:, None])[:, 0]
            torch.testing.assert_close(logps, expected, atol=1e-5, rtol=0)
            tokenizer = load_tokenizer(str(tmp_path / "model"))
            assert t.text == tokenizer.decode(ids[n_given:], skip_special_tokens=True)
            assert t.prompt_text == json.loads(t.row)["question"]
            around.tell(m.Ack(t.uid, t.sample, t.attempt, t.evaluation))
        around.beat_until(lambda beat: beat.version == 1)
        around.stop()
        assert not around.failed


Flow = Callable[[str, str], None]


@pytest.fixture
def flow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Flow:
    """Makes a module of a workflow importable, of the body of its episode."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda text, name: (tmp_path / f"{name}.py").write_text(HEAD + text, encoding="utf-8") and None


HEAD = """
from pathlib import Path
from actors.workflows.protocol import Episode

class Flow:
    def __init__(self, config): self.n = 0

    async def episode(self, row, ask):
        ids = ask.tokenizer(row["question"])["input_ids"]
"""


FUSSY = """
        turn = await ask(ids)
        self.n += 1
        if row["question"] == "bad" and self.n == 2: raise KeyError("lost")
        return Episode(text=turn.text, row={"n": self.n})
"""


def test_a_group_that_cannot_be_sampled_is_reported_once_with_the_reason(tmp_path: Path, flow: Flow) -> None:
    flow(FUSSY, "fussy_flow")
    with ring(tmp_path, workflow={"function": "fussy_flow:Flow"}) as around:
        around.join(with_reward=False)
        around.push(0)
        around.tell(prompt(0, "bad", samples=(0, 1, 2, 3)))
        failed: m.SampleFailed = around.heard(m.SampleFailed)
        where = f"{tmp_path / 'fussy_flow.py'}:13"
        assert (failed.uid, failed.reason) == (0, "sampling_error")
        error = f"KeyError: 'lost' ({where}); the row has no field 'lost', it has answer, question"
        assert failed.error == error
        kept = (tmp_path / "run" / "logs" / "generator-0.0.failures.txt").read_text()  # item 15
        assert kept.startswith(f"uid 0 sample 1 attempt 0: {error}\nTraceback")
        around.list_reward()
        around.tell(prompt(1, "good", samples=(0,)))
        assert around.heard(m.Trajectory, around.reward).uid == 1  # nothing of the failed group is sent
        assert around.heard(m.Sampled).uid == 1


OUTSIZE = """
        turn = await ask(ids)
        if row["answer"] == "large text":
            return Episode(text="x" * (9 << 20))
        if row["answer"] == "large row":
            return Episode(text=turn.text, row={"note": "字" * (3 << 20)})
        return Episode(text=turn.text, row={"note": {1, 2}} if row["answer"] == "no JSON" else {})
"""


@pytest.mark.parametrize(
    ("what", "error"), [("large text", "bytes"), ("large row", "bytes"), ("no JSON", "set is not JSON serializable")]
)
def test_an_episode_that_no_message_holds_fails_its_prompt_and_the_generator_goes_on(
    tmp_path: Path, flow: Flow, what: str, error: str
) -> None:
    """Its completion was journalled before its row was written, and its episode stayed open."""
    flow(OUTSIZE, "outsize_flow")
    with joined(tmp_path, workflow={"function": "outsize_flow:Flow"}) as around:
        around.tell(replace(prompt(0, samples=(0, 1)), row=json.dumps({"question": "abc", "answer": what})))
        failed: m.SampleFailed = around.heard(m.SampleFailed)
        assert (failed.uid, failed.attempt, failed.reason) == (0, 0, "sampling_error")
        assert error in failed.error
        around.tell(prompt(1, samples=(0,)))
        assert around.heard(m.Trajectory, around.reward).uid == 1  # the first message that a reward gets
        assert around.heard(m.Sampled).uid == 1
        around.stop()
        assert not around.failed
        lines = around.journal()
        assert [line["uid"] for line in lines if line["event"] == "completion"] == [1]
        assert [line["sample"] for line in lines if line["event"] == "request" and line["uid"] == 0] == [0, 1]


def test_a_prompt_over_the_limit_is_refused(tmp_path: Path) -> None:
    with joined(tmp_path) as around:
        around.tell(prompt(5, "a" * 13, evaluation="before"))
        failed: m.SampleFailed = around.heard(m.SampleFailed)
        assert (failed.uid, failed.evaluation, failed.reason) == (5, "before", "prompt_too_long")
        assert "13" in failed.error


def test_a_workflow_that_does_not_import_ends_the_actor_with_a_config_error(tmp_path: Path) -> None:
    with ring(tmp_path, workflow={"function": "no_such_flow:Flow"}) as around:
        around.heard(m.Join)
        assert "no_such_flow" in around.heard(m.Failure).error
        around.thread.join(WAIT_S)
        assert isinstance(around.failed[0], ConfigError)


# a guest ends without its head: no supervisor of the job ends it when the job is killed

PATIENCE_S = 1.5  # launch.timeout_s, above bus.silent_s


@contextmanager
def guest(folder: Path, **launch: float) -> Iterator[Ring]:
    with ring(folder, is_guest=True, launch=launch, bus={"silent_s": 0.5}) as around:
        yield around
        around.thread.join(WAIT_S)
        assert not around.thread.is_alive()


def test_a_guest_without_an_answer_from_a_head_ends_and_names_the_endpoint(tmp_path: Path) -> None:
    with guest(tmp_path, timeout_s=PATIENCE_S) as around:
        pass
    (error,) = around.failed
    assert isinstance(error, ActorFailed)
    assert re.search(
        rf"no answer of the head at {re.escape(around.context.head)} within launch.timeout_s = 1.5", str(error)
    )


def test_a_guest_that_is_asked_to_leave_with_no_head_there_leaves_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()
    monkeypatch.setattr(process, "_drain_requested", asked)
    asked.set()
    with guest(tmp_path, timeout_s=600.0) as around:
        pass
    assert around.failed == []
    assert around.journal()[-1]["reason"] == "asked to leave, with no head there"


class Line:
    """What Presence needs of a bus: how long the head has been silent."""

    def __init__(self) -> None:
        self.silent_s = 0.0

    def silence_s(self, peer: str) -> float:
        assert peer == "head"
        return self.silent_s


def test_a_guest_that_stood_still_itself_does_not_blame_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    line = Line()
    presence = HeadSession(line, silent_s=3.0)  # type: ignore[arg-type]
    presence.observe("head", m.Rejoin("who are you"))
    presence.give_up_after(10.0, "here")
    now, line.silent_s = 400.0, 300.0  # SIGSTOP, SIGCONT: heartbeats come in a moment
    presence.give_up_after(10.0, "here")
    for _ in range(5):
        now += 2.0
        presence.give_up_after(10.0, "here")
    now += 2.0
    with pytest.raises(ActorFailed, match="timed out: the head at here was silent"):
        presence.give_up_after(10.0, "here")
