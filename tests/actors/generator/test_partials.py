"""A generator reports what it has at a weight swap, and goes on from what another one had."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_bus.messages import Cancel, Join, Partial, Prompt, Ready, Rejoin, Sampled, Term, Trajectory
from tests.support.generator_ring import Ring, prompt, ring

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
        partial = around.heard(Partial)
        n = partial.n_sampled
        assert (partial.uid, partial.sample, partial.attempt, partial.term) == (0, 1, 0, 0)
        assert n >= 4
        assert (partial.spans, len(partial.logps)) == ([[0, n]], 4 * n)
        assert partial.segments[0][0] + n == len(partial.ids) // 4
        around.push(2)  # nothing new is there, so nothing is reported: only heartbeats follow
        tokens = around.next_beat().progress
        around.tell(Cancel(1, 0))
        around.beat_until(lambda beat: beat.progress >= tokens + 20)
        halt(around, 2)
        around.push(3)
        later = around.heard(Partial)
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
    with ring(tmp_path, gconfig=STEADY | {"max_new_tokens": 3900}, **EVALUATION) as around:
        around.join()
        around.push(0)
        around.tell(prompt(2, samples=(1,)))
        around.beat_until(lambda beat: beat.progress >= 20)
        around.tell(Rejoin("a new head"))
        around.heard(Join)
        around.heard(Ready)
        around.tell(Term(1, 0))
        partial = around.heard(Partial)
        assert (partial.uid, partial.sample, partial.attempt, partial.term) == (2, 1, 0, 0)
        assert partial.spans == [[0, partial.n_sampled]]
        assert partial.n_sampled >= 20
        around.push(0, term=1)  # fails on a second offer


def test_a_finished_sample_is_offered_without_its_last_token(tmp_path: Path) -> None:
    with ring(tmp_path, gconfig=STEADY) as around:
        around.join()
        around.push(0)
        whole = made(around, prompt(3, samples=(1,)))
        around.tell(Rejoin("a new head"))
        around.heard(Join)
        around.heard(Ready)
        around.tell(Term(1, 0))
        partial = around.heard(Partial)
        assert partial == part_of(whole, 9, attempt=0)
        around.push(0, term=1)
        around.tell(replace(partial, attempt=1000))
        again = made(around, replace(prompt(3, samples=(1,)), attempt=1000))
        assert (again.ids, again.spans, again.term) == (whole.ids, whole.spans, 1)


def made(around: Ring, asked: Prompt) -> Trajectory:
    around.tell(asked)
    trajectory: Trajectory = around.heard(Trajectory, around.reward)
    assert around.heard(Sampled).attempt == asked.attempt
    return trajectory


def part_of(t: Trajectory, n: int, *, attempt: int, version: int = 0) -> Partial:
    n_given = t.segments[0][0]
    return Partial(
        t.uid, t.sample, attempt, 0, [[n_given, n]], [[version, n]], t.ids[: 4 * (n_given + n)], t.logps[: 4 * n]
    )


def test_a_sample_that_another_generator_began_goes_on_where_it_was(tmp_path: Path) -> None:
    with ring(tmp_path, gconfig=STEADY) as around:
        around.join()
        around.push(0)
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
        around.tell(part_of(whole, 6, attempt=4))  # nobody's prompt
        last = made(around, replace(asked, attempt=3))
        assert anew.spans == last.spans == [[0, 10]]
        around.stop()
        requests = [line for line in around.journal() if line["event"] == "request"]
        assert [line.get("n_done") for line in requests] == [None, 6, None, None]
        completions = [line["n_tokens"] for line in around.journal() if line["event"] == "completion"]
        assert completions == [10, 10, 10, 10]


def test_a_partial_of_another_prompt_is_dropped_and_the_prompt_sampled_from_the_start(tmp_path: Path) -> None:
    with ring(tmp_path, gconfig=STEADY) as around:
        around.join()
        around.push(0)
        whole = made(around, prompt(3, samples=(1,)))
        around.tell(part_of(whole, 6, attempt=1))
        row = json.dumps({"question": "cba", "answer": "abc"})
        other = made(around, replace(prompt(3, samples=(1,)), attempt=1, row=row))
        assert other.ids[: 4 * other.segments[0][0]] != whole.ids[: 4 * other.segments[0][0]]
        around.stop()
        assert not any("n_done" in line for line in around.journal())


def logps(t: Trajectory) -> Any:
    return np.frombuffer(t.logps, dtype="<f4")
