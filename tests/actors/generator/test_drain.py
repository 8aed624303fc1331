"""rollout.on_update = "drain": new weights wait for the samples under way, and no other is begun meanwhile."""

from pathlib import Path

import pytest

from actors.engines.builtin.engine import BuiltinEngine, EngineOptions
from actors.engines.protocol import Request
from areal_bus.messages import PushDone, Term
from tests.actors.engines.builtin.test_engine import llama
from tests.actors.generator.test_terms import endless, endless_ring, let_end, take_sample
from tests.support.generator_ring import Ring

DRAIN = {"on_update": "drain"}


def request(sample: int, *, turn: int = 0, n: int = 3) -> Request:
    return Request(("", 0, 0, sample, turn), [1, 2, 3], (sample,), max_new_tokens=n, temperature=1.0, top_p=1.0)


def go_on(around: Ring, n_tokens: int) -> None:
    """Until so many tokens more are sampled."""
    now = around.next_beat().progress
    around.beat_until(lambda beat: beat.progress >= now + n_tokens)


def test_new_weights_wait_for_the_episodes_under_way_and_no_other_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with endless_ring(tmp_path, monkeypatch, rollout=DRAIN) as around:
        around.join()
        around.push(0)
        around.tell(endless(around, 0, 0))
        go_on(around, 4)
        digest = around.send_weights(around.begin(1))
        go_on(around, 8)  # the weights are here
        around.tell(endless(around, 1, 0, n_short=1))
        go_on(around, 8)
        let_end(around)
        first = take_sample(around)
        assert (first.uid, len(first.spans), first.spans[0][0]) == (0, 1, 0)  # many turns, all by version 0
        assert around.heard(PushDone).digest == digest
        assert take_sample(around).spans == [[1, 1]]


def test_weights_that_waited_are_forgotten_when_a_new_term_takes_them_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with endless_ring(tmp_path, monkeypatch, rollout=DRAIN) as around:
        around.join()
        around.push(0)
        around.tell(endless(around, 0, 0))
        go_on(around, 4)
        around.send_weights(around.begin(1))
        go_on(around, 8)
        around.tell(Term(1, 0))
        go_on(around, 8)  # it has read that
        let_end(around)
        assert take_sample(around).spans[0][0] == 0
        done = around.push(0, term=1)
        assert done.version == 0


def test_an_engine_that_holds_begins_nothing_but_goes_on_with_episodes_and_the_update_ends_it() -> None:
    model = llama(0)
    running = BuiltinEngine(model, EngineOptions(n_slots=2, on_update="drain"), stop_ids=frozenset(), version=0)
    assert not running.hold()
    running.submit(request(0))
    assert running.step() == []
    assert running.n_tokens == 0
    running.submit(request(1, turn=1, n=1))
    assert running.hold()
    assert [done.key[3] for done in running.step()] == [1]
    assert not running.hold()
    running.update(1, {name: weight.clone() for name, weight in running.parameters().items()})
    running.step()
    assert running.n_tokens == 2
    assert running.newest(("", 0, 0, 0, 0)) == 1
