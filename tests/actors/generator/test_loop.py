"""A generator between two terms, between two heads, at new weights, and on its way out."""

import functools
import json
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.runtime.process import LEFT
from areal_bus import messages as m
from areal_bus.core.parts.terms import TermHistory
from areal_bus.transport.bus import Bus
from tests.support.generator_ring import JOB, Ring, joined, prompt, ring

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


Opening = Callable[..., AbstractContextManager[Ring]]


@pytest.fixture
def endless_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opening:
    """Samples of one token each go on until told to end (`let_end`), but for the first few of a group."""
    (tmp_path / "own_term_flow.py").write_text(FLOW)
    monkeypatch.syspath_prepend(str(tmp_path))
    return functools.partial(joined, tmp_path, workflow={"function": "own_term_flow:Flow"})


def endless(around: Ring, uid: int, *samples: int, n_short: int = 0, evaluation: str = "") -> m.Prompt:
    row = {"question": "abcdefgh"[uid] + evaluation[:3], "n_short": n_short, "end": str(around.folder / "end")}
    return replace(prompt(uid, samples=samples, evaluation=evaluation), row=json.dumps(row))


def let_end(around: Ring) -> None:
    (around.folder / "end").touch()


def go_on(around: Ring, n_tokens: int) -> None:
    """Until so many tokens more are sampled."""
    now = around.next_beat().progress
    around.beat_until(lambda beat: beat.progress >= now + n_tokens)


def take_sample(around: Ring, reward: Bus | None = None) -> m.Trajectory:
    """What arrives at the reward for the first time."""
    t: m.Trajectory = around.heard(m.Trajectory, reward or around.reward)
    assert around.heard(m.Sampled).uid == t.uid
    return t


def come_back(around: Ring, why: str) -> None:
    around.tell(m.Rejoin(why))
    around.heard(m.Join)
    around.heard(m.Ready)


def test_a_new_term_ends_whole_groups_that_lost_weights_touched_and_keeps_the_others(endless_ring: Opening) -> None:
    with endless_ring() as around:
        around.tell(endless(around, 0, 0, n_short=1))
        kept = take_sample(around)
        around.tell(endless(around, 1, 0, 1, n_short=1))
        assert take_sample(around).spans == [[0, 1]]  # complete by version 0; its sibling goes on
        around.push(1)
        around.tell(endless(around, 2, 0, 1, n_short=1))
        assert take_sample(around).spans == [[1, 1]]
        around.tell(endless(around, 0, 0, 1, evaluation="before"))
        go_on(around, 8)
        around.tell(replace(endless(around, 3, 0), more=True))  # nothing is decoded before the rest of the share

        around.tell(m.Term(1, 0))
        lost = [around.heard(m.SampleFailed) for _ in range(3)]
        assert [(x.evaluation, x.uid, x.attempt) for x in lost] == [("", 1, 0), ("", 2, 0), ("before", 0, 0)]
        assert {x.reason for x in lost} == {"lost_timeline"}
        around.beat_until(lambda beat: beat.version is None and beat.note.startswith("waits for weights"))
        tokens = around.next_beat().progress
        assert [around.next_beat().progress for _ in range(3)] == [tokens] * 3

        with closing(Bus("reward-0.1", job=JOB, listen=f"ipc://{around.folder}/reward-1")) as reward:
            around.tell(m.PeerList([reward.name], [reward.endpoint]))
            assert around.heard(m.Trajectory, reward) == kept  # of term 0, as it was when it was complete
            let_end(around)
            around.push(0, term=1)
            waited = take_sample(around, reward)
            assert (waited.uid, waited.term, waited.spans) == (3, 1, [[0, 1]])


def test_a_sample_goes_on_over_terms_and_pushes_that_its_tokens_and_the_journal_are_stamped_with(
    endless_ring: Opening,
) -> None:
    with endless_ring() as around:
        around.tell(endless(around, 0, 0))
        go_on(around, 1)
        around.tell(m.Term(1, 0))  # it holds weights of the history
        go_on(around, 4)
        done = around.push(1, term=1)
        around.beat_until(lambda beat: beat.version == 1)
        go_on(around, 1)
        let_end(around)
        t = take_sample(around)
        assert (t.term, [version for version, _ in t.spans]) == (1, [0, 1])
        assert all(pair[1] == 1 for pair in t.segments)
        around.stop()
        lines = around.journal()
        pushed = [line for line in lines if line["event"] == "pushed"]
        assert [(line["term"], line["version"]) for line in pushed] == [(0, 0), (1, 1)]
        assert pushed[1]["stall_s"] == round(done.stall_s, 6)
        assert lines[-1]["event"] == "end"
        labelled = sum(v for line in lines for k, v in line.items() if k.startswith("s_"))
        assert abs(labelled - lines[-1]["wall_s"]) <= 0.01 * lines[-1]["wall_s"] + 0.01  # I12


def test_a_push_of_a_newer_term_is_the_news_of_it_and_may_bring_a_lower_version(endless_ring: Opening) -> None:
    with endless_ring(version=7, rollout={"on_update": "keep"}) as around:
        around.tell(endless(around, 0, 0))
        around.beat_until(lambda beat: beat.progress > 0)
        around.send_weights(around.begin(5, term=1, base=5))
        assert around.heard(m.SampleFailed).uid == 0
        assert around.heard(m.PushDone).version == 5
        around.beat_until(lambda beat: beat.version == 5)
        around.tell(endless(around, 1, 0, n_short=1))
        assert take_sample(around).spans == [[5, 1]]


def test_a_new_term_ends_the_push_in_progress_without_a_report(tmp_path: Path) -> None:
    with ring(tmp_path) as around:
        around.join()
        around.begin(1)  # and its root is gone
        around.tell(m.Term(1, 0))
        begin = around.begin(2)  # a late message of the old term's head
        assert begin.term == 0
        done = around.push(1, term=1)
        assert (done.push, done.version) == (2, 1)
        assert done.receive_s < 5.0


def test_surviving_messages_of_a_bundle_cut_by_a_new_term_are_decoded(tmp_path: Path) -> None:
    with joined(tmp_path) as around:
        around.tell(replace(prompt(0, samples=(0,)), more=True))
        around.tell(m.Term(1, 0))
        assert take_sample(around).term == 1


def test_a_rejoin_request_drops_all_work_and_awaits_weights(endless_ring: Opening) -> None:
    with endless_ring(version=3) as around:
        around.tell(endless(around, 0, 0, 1, n_short=1))
        take_sample(around)
        around.tell(m.Rejoin("a new head"))
        again: m.Join = around.heard(m.Join)
        assert (again.name, again.again) == ("generator-0.0", 1)
        assert around.heard(m.Ready).capacity == 4 + 2 * 2  # its slots, and two groups that wait
        around.beat_until(lambda beat: beat.version is None and beat.note.startswith("waits for weights"))
        let_end(around)
        with closing(Bus("reward-0.1", job=JOB, listen=f"ipc://{around.folder}/reward-1")) as reward:
            around.tell(m.PeerList([reward.name], [reward.endpoint]))
            around.push(0, term=4)
            around.tell(endless(around, 1, 0))
            assert take_sample(around, reward).uid == 1  # and nothing before it


def test_a_head_of_another_incarnation_is_joined_once_by_heartbeat_or_rejoin(tmp_path: Path) -> None:
    with ring(tmp_path) as around:
        around.join()  # its Directory is of life 0
        around.tell(m.HeadHeartbeat(0, 0, life=0))
        around.tell(m.HeadHeartbeat(0, 0, life=1))
        assert around.heard(m.Join).again == 1
        around.heard(m.Ready)
        around.tell(m.HeadHeartbeat(0, 0, life=1))
        around.tell(m.Rejoin("yet another"))
        around.tell(m.PeerList([], [], life=2))
        around.tell(m.HeadHeartbeat(0, 0, life=2))
        assert around.heard(m.Join).again == 2
        around.heard(m.Ready)
        around.list_reward(life=2)
        around.push(0)  # no further Join before its answer


def test_a_generator_goes_on_while_the_head_is_silent_and_logs_it(tmp_path: Path) -> None:
    with joined(tmp_path, bus={"silent_s": 0.2}) as around:
        around.tell(prompt(0, samples=(0,)))
        take_sample(around)
        around.beat_until(lambda beat: beat.note.startswith("waits for 1 scores; head silent for"))
        while "silent" in around.next_beat().note:
            around.tell(m.HeadHeartbeat(0, 0))


@pytest.mark.slow
def test_a_drained_generator_reports_leaving_ends_its_work_and_reports_left(endless_ring: Opening) -> None:
    with endless_ring(apart=True) as around:
        around.tell(endless(around, 0, 0))
        around.beat_until(lambda beat: beat.progress > 0)
        around.process.send_signal(signal.SIGUSR1)
        around.heard(m.LeaveRequest)
        let_end(around)
        assert take_sample(around).uid == 0
        come_back(around, "a new head")
        around.heard(m.LeaveRequest)  # it still wants to
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


# rollout.on_update = "drain"

DRAIN = {"on_update": "drain"}


def test_new_weights_wait_for_the_episodes_under_way_and_no_other_is_begun(endless_ring: Opening) -> None:
    with endless_ring(rollout=DRAIN) as around:
        around.tell(endless(around, 0, 0))
        go_on(around, 4)
        digest = around.send_weights(around.begin(1))
        go_on(around, 8)  # the weights are here
        around.tell(endless(around, 1, 0, n_short=1))
        go_on(around, 8)
        let_end(around)
        first = take_sample(around)
        assert (first.uid, len(first.spans), first.spans[0][0]) == (0, 1, 0)  # many turns, all by version 0
        assert around.heard(m.PushDone).digest == digest
        assert take_sample(around).spans == [[1, 1]]


def test_weights_that_waited_are_forgotten_when_a_new_term_takes_them_back(endless_ring: Opening) -> None:
    with endless_ring(rollout=DRAIN) as around:
        around.tell(endless(around, 0, 0))
        go_on(around, 4)
        around.send_weights(around.begin(1))
        go_on(around, 8)
        around.tell(m.Term(1, 0))
        go_on(around, 8)  # it has read that
        let_end(around)
        assert take_sample(around).spans[0][0] == 0
        done = around.push(0, term=1)
        assert done.version == 0


# rollout.on_update = "finish_old"


def test_an_episode_ends_at_the_version_it_began_with_while_others_begin_at_newer_ones(endless_ring: Opening) -> None:
    with endless_ring(rollout={"on_update": "finish_old", "max_head_offpolicyness": 1}) as around:
        around.tell(endless(around, 0, 0))
        go_on(around, 4)
        assert around.push(1).version == 1  # two versions are held, and there is room for no third
        around.tell(endless(around, 1, 0, n_short=1))
        assert take_sample(around).spans == [[1, 1]]
        around.tell(endless(around, 2, 0))
        go_on(around, 8)
        around.send_weights(around.begin(2))
        go_on(around, 8)
        around.tell(m.Cancel(0, 0))  # so that there is room
        assert around.heard(m.PushDone).version == 2
        around.tell(endless(around, 3, 0, n_short=1))
        assert take_sample(around).spans == [[2, 1]]
        let_end(around)
        last = take_sample(around)
        assert (last.uid, len(last.spans), last.spans[0][0]) == (2, 1, 1)  # many turns


# what a generator has at a weight swap is reported, and another one goes on from it

STEADY = {"n_samples": 2, "temperature": 1e-3}  # the same tokens again and again: none stops
EVALUATION = {"evaluate": {"temperature": 1e-3}}


def halt(around: Ring, uid: int) -> None:
    """Nothing is decoded until the prompt is cancelled: the rest of its share is to follow."""
    around.tell(replace(prompt(uid, samples=(0,)), more=True))


def begin_long_samples(around: Ring) -> None:
    """One of an evaluation, one of training, with 20 tokens together at least."""
    around.join()
    around.push(0)
    around.tell(prompt(0, samples=(0,), evaluation="before"))
    around.tell(prompt(0, samples=(1,)))
    around.beat_until(lambda beat: beat.progress >= 20)
    halt(around, 1)


def test_partials_with_enough_new_tokens_are_reported_at_new_weights(tmp_path: Path) -> None:
    long = STEADY | {"max_new_tokens": 3900}
    with ring(tmp_path, gconfig=long, rollout={"report_tokens": 4}, **EVALUATION) as around:
        begin_long_samples(around)
        around.push(1)
        partial = around.heard(m.Partial)
        n = partial.n_sampled
        assert (partial.uid, partial.sample, partial.attempt, partial.term) == (0, 1, 0, 0)
        assert n >= 4
        assert (partial.spans, len(partial.logps)) == ([[0, n]], 4 * n)
        assert partial.segments[0][0] + n == len(partial.ids) // 4
        around.push(2)  # nothing new is there, so nothing is reported: only heartbeats follow
        tokens = around.next_beat().progress
        around.tell(m.Cancel(1, 0))
        around.beat_until(lambda beat: beat.progress >= tokens + 20)
        halt(around, 2)
        around.push(3)
        later = around.heard(m.Partial)
        assert later.spans == [[0, n], [2, later.n_sampled - n]]
        assert later.ids.startswith(partial.ids)


@pytest.mark.parametrize("rollout", [{"report_tokens": 0}, {"report_tokens": 1, "max_head_offpolicyness": 0}])
def test_nothing_is_reported_when_it_is_not_asked_for_or_eta_is_0(rollout: dict[str, Any], tmp_path: Path) -> None:
    with ring(tmp_path, gconfig=STEADY | {"max_new_tokens": 3900}, rollout=rollout, **EVALUATION) as around:
        begin_long_samples(around)
        around.push(1)
        around.beat_until(lambda beat: beat.version == 1)  # fails on any other message
        around.next_beat()


def test_unfinished_samples_are_offered_to_the_next_head(tmp_path: Path) -> None:
    with joined(tmp_path, gconfig=STEADY | {"max_new_tokens": 3900}, **EVALUATION) as around:
        around.tell(prompt(2, samples=(1,)))
        around.beat_until(lambda beat: beat.progress >= 20)
        come_back(around, "a new head")
        around.tell(m.Term(1, 0))
        partial = around.heard(m.Partial)
        assert (partial.uid, partial.sample, partial.attempt, partial.term) == (2, 1, 0, 0)
        assert partial.spans == [[0, partial.n_sampled]]
        assert partial.n_sampled >= 20
        around.push(0, term=1)  # fails on a second offer


def test_a_finished_sample_is_offered_without_its_last_token(tmp_path: Path) -> None:
    with joined(tmp_path, gconfig=STEADY) as around:
        whole = made(around, prompt(3, samples=(1,)))
        come_back(around, "a new head")
        around.tell(m.Term(1, 0))
        partial = around.heard(m.Partial)
        assert partial == part_of(whole, 9, attempt=0)
        around.push(0, term=1)
        around.tell(replace(partial, attempt=1000))
        again = made(around, replace(prompt(3, samples=(1,)), attempt=1000))
        assert (again.ids, again.spans, again.term) == (whole.ids, whole.spans, 1)


def made(around: Ring, asked: m.Prompt) -> m.Trajectory:
    around.tell(asked)
    trajectory: m.Trajectory = around.heard(m.Trajectory, around.reward)
    assert around.heard(m.Sampled).attempt == asked.attempt
    return trajectory


def part_of(t: m.Trajectory, n: int, *, attempt: int, version: int = 0) -> m.Partial:
    n_given = t.segments[0][0]
    return m.Partial(
        t.uid, t.sample, attempt, 0, [[n_given, n]], [[version, n]], t.ids[: 4 * (n_given + n)], t.logps[: 4 * n]
    )


def test_a_sample_that_another_generator_began_goes_on_where_it_was(tmp_path: Path) -> None:
    with joined(tmp_path, gconfig=STEADY) as around:
        asked = prompt(3, samples=(1,))
        whole = made(around, asked)
        assert whole.segments[0][1] == 10
        around.tell(part_of(whole, 6, attempt=1))
        again = made(around, replace(asked, attempt=1))
        assert (again.ids, again.spans, again.segments) == (whole.ids, whole.spans, whole.segments)
        assert again.logps[:24] == whole.logps[:24]
        np.testing.assert_allclose(logps(again), logps(whole), atol=1e-3)
        around.tell(part_of(whole, 6, attempt=2, version=7))  # newer than what this one holds
        anew = made(around, replace(asked, attempt=2))
        around.tell(part_of(whole, 10, attempt=3))  # nothing would be left to sample
        around.tell(part_of(whole, 6, attempt=4))  # a prompt that no generator holds
        last = made(around, replace(asked, attempt=3))
        assert anew.spans == last.spans == [[0, 10]]
        around.stop()
        requests = [line for line in around.journal() if line["event"] == "request"]
        assert [line.get("n_done") for line in requests] == [None, 6, None, None]
        completions = [line["n_tokens"] for line in around.journal() if line["event"] == "completion"]
        assert completions == [10, 10, 10, 10]


def test_a_partial_of_another_prompt_is_dropped_and_the_prompt_sampled_from_the_start(tmp_path: Path) -> None:
    with joined(tmp_path, gconfig=STEADY) as around:
        whole = made(around, prompt(3, samples=(1,)))
        around.tell(part_of(whole, 6, attempt=1))
        row = json.dumps({"question": "cba", "answer": "abc"})
        other = made(around, replace(prompt(3, samples=(1,)), attempt=1, row=row))
        assert other.ids[: 4 * other.segments[0][0]] != whole.ids[: 4 * other.segments[0][0]]
        around.stop()
        assert not any("n_done" in line for line in around.journal())


def logps(t: m.Trajectory) -> Any:
    return np.frombuffer(t.logps, dtype="<f4")
