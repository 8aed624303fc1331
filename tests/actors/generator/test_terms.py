"""A generator between two terms, between two heads, and on its way out."""

import json
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.runtime.process import LEFT
from areal_bus.core.parts.terms import TermHistory
from areal_bus.messages import (
    HeadHeartbeat,
    Join,
    LeaveRequest,
    PeerList,
    Prompt,
    PushDone,
    Ready,
    Rejoin,
    Sampled,
    SampleFailed,
    Term,
    Trajectory,
)
from areal_bus.transport.bus import Bus
from tests.support.generator_ring import JOB, Ring, prompt, ring

FLOW = """
from pathlib import Path
from actors.workflows.protocol import Episode

class Flow:
    def __init__(self, config): self.begun = {}

    async def episode(self, row, ask):
        n = self.begun[row["question"]] = self.begun.get(row["question"], 0) + 1
        ids = ask.tokenizer(row["question"])["input_ids"]
        while True:
            turn = await ask(ids, max_new_tokens=1)
            ids = ids + turn.ids
            if n <= row["n_short"] or Path(row["end"]).exists():
                return Episode(text="")
"""


@contextmanager
def endless_ring(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, apart: bool = False, **sections: dict[str, Any]
) -> Iterator[Ring]:
    """Samples of one token each go on until told to end (`end`), but for the first few of a group."""
    (folder / "own_term_flow.py").write_text(FLOW)
    monkeypatch.syspath_prepend(str(folder))
    with ring(folder, apart=apart, workflow={"function": "own_term_flow:Flow"}, **sections) as around:
        yield around


def endless(around: Ring, uid: int, *samples: int, n_short: int = 0, evaluation: str = "") -> Prompt:
    row = {"question": "abcdefgh"[uid] + evaluation[:3], "n_short": n_short, "end": str(around.folder / "end")}
    return replace(prompt(uid, samples=samples, evaluation=evaluation), row=json.dumps(row))


def let_end(around: Ring) -> None:
    (around.folder / "end").touch()


def take_sample(around: Ring, reward: Bus | None = None) -> Trajectory:
    """What arrives at the reward for the first time."""
    t: Trajectory = around.heard(Trajectory, reward or around.reward)
    assert around.heard(Sampled).uid == t.uid
    return t


def test_a_new_term_ends_whole_groups_that_lost_weights_touched_and_keeps_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with endless_ring(tmp_path, monkeypatch) as around:
        around.join()
        around.push(0)
        around.tell(endless(around, 0, 0, n_short=1))
        kept = take_sample(around)
        around.tell(endless(around, 1, 0, 1, n_short=1))
        assert take_sample(around).spans == [[0, 1]]  # complete by version 0; its sibling goes on
        around.push(1)
        around.tell(endless(around, 2, 0, 1, n_short=1))
        assert take_sample(around).spans == [[1, 1]]
        around.tell(endless(around, 0, 0, 1, evaluation="before"))
        tokens = around.next_beat().progress
        around.beat_until(lambda beat: beat.progress >= tokens + 8)
        around.tell(replace(endless(around, 3, 0), more=True))  # nothing is decoded before the rest of the share

        around.tell(Term(1, 0))
        lost = [around.heard(SampleFailed) for _ in range(3)]
        assert [(x.evaluation, x.uid, x.attempt) for x in lost] == [("", 1, 0), ("", 2, 0), ("before", 0, 0)]
        assert {x.reason for x in lost} == {"lost_timeline"}
        around.beat_until(lambda beat: beat.version is None and beat.note.startswith("waits for weights"))
        tokens = around.next_beat().progress
        assert [around.next_beat().progress for _ in range(3)] == [tokens] * 3

        with closing(Bus("reward-0.1", job=JOB, listen=f"ipc://{tmp_path}/reward-1")) as reward:
            around.tell(PeerList([reward.name], [reward.endpoint]))
            assert around.heard(Trajectory, reward) == kept  # of term 0, as it was when it was complete
            let_end(around)
            around.push(0, term=1)
            waited = take_sample(around, reward)
            assert (waited.uid, waited.term, waited.spans) == (3, 1, [[0, 1]])


def test_a_generator_that_holds_weights_of_the_history_goes_on_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with endless_ring(tmp_path, monkeypatch) as around:
        around.join()
        around.push(0)
        around.tell(endless(around, 0, 0))
        around.beat_until(lambda beat: beat.progress > 0)
        around.tell(Term(1, 0))
        tokens = around.next_beat().progress
        around.beat_until(lambda beat: beat.progress > tokens + 3)
        around.push(1, term=1)
        around.beat_until(lambda beat: beat.version == 1)
        tokens = around.next_beat().progress
        around.beat_until(lambda beat: beat.progress > tokens)
        let_end(around)
        t = take_sample(around)
        assert (t.term, [version for version, _ in t.spans]) == (1, [0, 1])
        around.stop()
        pushed = [line for line in around.journal() if line["event"] == "pushed"]
        assert [(line["term"], line["version"]) for line in pushed] == [(0, 0), (1, 1)]


def test_a_push_of_a_newer_term_is_the_news_of_it_and_may_bring_a_lower_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with endless_ring(tmp_path, monkeypatch, rollout={"on_update": "keep"}) as around:
        around.join()
        around.push(7)
        around.tell(endless(around, 0, 0))
        around.beat_until(lambda beat: beat.progress > 0)
        around.send_weights(around.begin(5, term=1, base=5))
        assert around.heard(SampleFailed).uid == 0
        assert around.heard(PushDone).version == 5
        around.beat_until(lambda beat: beat.version == 5)
        around.tell(endless(around, 1, 0, n_short=1))
        assert take_sample(around).spans == [[5, 1]]


def test_a_term_that_was_missed_makes_all_before_it_void(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with endless_ring(tmp_path, monkeypatch) as around:
        around.join()
        around.push(1)
        around.tell(endless(around, 0, 0, n_short=1))
        take_sample(around)
        around.tell(Term(2, 5))  # term 1 began nobody knows where
        assert around.heard(SampleFailed).uid == 0
        around.beat_until(lambda beat: beat.version is None)


def test_a_new_term_ends_the_push_in_progress_without_a_report(tmp_path: Path) -> None:
    with ring(tmp_path) as around:
        around.join()
        around.begin(1)  # and its root is gone
        around.tell(Term(1, 0))
        begin = around.begin(2)  # said by the old term's head, late
        assert begin.term == 0
        done = around.push(1, term=1)
        assert (done.push, done.version) == (2, 1)
        assert done.receive_s < 5.0


def test_surviving_messages_of_a_bundle_cut_by_a_new_term_are_decoded(tmp_path: Path) -> None:
    with ring(tmp_path) as around:
        around.join()
        around.push(0)
        around.tell(replace(prompt(0, samples=(0,)), more=True))
        around.tell(Term(1, 0))
        assert take_sample(around).term == 1


def test_a_rejoin_request_drops_all_work_and_awaits_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with endless_ring(tmp_path, monkeypatch) as around:
        around.join()
        around.push(3)
        around.tell(endless(around, 0, 0, 1, n_short=1))
        take_sample(around)
        around.tell(Rejoin("a new head"))
        again: Join = around.heard(Join)
        assert (again.name, again.again) == ("generator-0.0", 1)
        assert around.heard(Ready).capacity == 4 + 2 * 2  # its slots, and two groups that wait
        around.beat_until(lambda beat: beat.version is None and beat.note.startswith("waits for weights"))
        let_end(around)
        with closing(Bus("reward-0.1", job=JOB, listen=f"ipc://{tmp_path}/reward-1")) as reward:
            around.tell(PeerList([reward.name], [reward.endpoint]))
            around.push(0, term=4)
            around.tell(endless(around, 1, 0))
            assert take_sample(around, reward).uid == 1  # and nothing before it


def test_a_head_of_another_incarnation_is_joined_once_by_heartbeat_or_rejoin(tmp_path: Path) -> None:
    with ring(tmp_path) as around:
        around.join()  # its Directory is of life 0
        around.tell(HeadHeartbeat(0, 0, life=0))
        around.tell(HeadHeartbeat(0, 0, life=1))
        assert around.heard(Join).again == 1
        around.heard(Ready)
        around.tell(HeadHeartbeat(0, 0, life=1))
        around.tell(Rejoin("yet another"))
        around.tell(PeerList([], [], life=2))
        around.tell(HeadHeartbeat(0, 0, life=2))
        assert around.heard(Join).again == 2
        around.heard(Ready)
        around.list_reward(life=2)
        around.push(0)  # no further Join before its answer


def test_a_generator_goes_on_while_the_head_is_silent_and_logs_it(tmp_path: Path) -> None:
    with ring(tmp_path, bus={"silent_s": 0.2}) as around:
        around.join()
        around.push(0)
        around.tell(prompt(0, samples=(0,)))
        take_sample(around)
        around.beat_until(lambda beat: beat.note.startswith("waits for 1 scores; head silent for"))
        while "silent" in around.next_beat().note:
            around.tell(HeadHeartbeat(0, 0))


@pytest.mark.slow
def test_a_drained_generator_reports_leaving_ends_its_work_and_reports_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with endless_ring(tmp_path, monkeypatch, apart=True) as around:
        around.join()
        around.push(0)
        around.tell(endless(around, 0, 0))
        around.beat_until(lambda beat: beat.progress > 0)
        assert around.process is not None
        around.process.send_signal(signal.SIGUSR1)
        around.heard(LeaveRequest)
        let_end(around)
        assert take_sample(around).uid == 0
        around.tell(Rejoin("a new head"))
        around.heard(Join)
        around.heard(Ready)
        around.heard(LeaveRequest)  # it still wants to
        around.stop()
        assert around.process.returncode == LEFT


def test_a_term_is_applied_once_and_its_base_selects_the_surviving_messages() -> None:
    timeline = TermHistory()
    assert not timeline.begin(0, 0)
    assert timeline.begin(1, 5)
    assert not timeline.begin(1, 7)
    assert [timeline.keeps(newest) for newest in (None, 0, 5, 6)] == [True, True, True, False]
    assert timeline.begin(3, 9)
    assert not timeline.begin(2, 9)
    assert [timeline.keeps(newest) for newest in (None, 0, 9)] == [True, False, False]
    assert timeline.begin(4, 6)
    assert timeline.keeps(6)
