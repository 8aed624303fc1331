"""The head's shares at eta = 0, over simulated rings, and the generator that waits for the whole of its own."""

from dataclasses import replace
from pathlib import Path

import pytest

from areal_bus import messages as m
from areal_bus.core.events import Event
from areal_bus.core.parts.staleness import StalenessPolicy
from areal_lab.staleness.simulator.ring import Ring
from areal_lab.staleness.simulator.scenario import ScenarioLengths, Tail
from tests.areal_bus.core.test_head import finish, lines, scenario
from tests.support.generator_ring import prompt
from tests.support.generator_ring import ring as around_a_generator


def ring_of(**changes: object) -> Ring:
    lengths = ScenarioLengths(Tail.PARETO, 2.0, 1.2, 200)
    standard: dict[str, object] = {"batch_size": 5, "eta": 0, "n_generators": 3, "capacity": 2, "lengths": lengths}
    ring = Ring(scenario(**standard | changes), keeps_story=True)
    ring.records = []
    return finish(ring)


def batches(ring: Ring) -> list[list[tuple[object, object]]]:
    """Uids and samples of each batch, in order."""
    found: list[list[tuple[object, object]]] = [[] for _ in lines(ring, Event.BATCH)]
    for line in lines(ring, Event.TRAJECTORY):
        found[int(str(line["step"]))].append((line["uid"], line["sample"]))
    return found


@pytest.mark.parametrize("policy", StalenessPolicy)
@pytest.mark.parametrize("seed", range(5))
def test_batches_and_shares_depend_on_no_time(policy: StalenessPolicy, seed: int) -> None:
    ring = ring_of(seed=seed, policy=policy, joins_s=(2.0, 9.0, 30.0), link_s=2.0)
    assert batches(ring) == [[(5 * step + i, j) for i in range(5) for j in range(2)] for step in range(6)]
    holders = [line["holder"] for line in lines(ring, Event.LEASE)]
    assert holders == [f"generator-{uid % 3}.0" for uid in range(30)]


def test_only_the_last_prompt_of_a_share_lets_it_be_decoded() -> None:
    ring = ring_of(total_steps=2)
    sent = [(what.split()[-1], about) for _, what, about in ring.world.story or () if isinstance(about, m.Prompt)]
    more = {prompt.uid: prompt.more for _, prompt in sent}
    assert more == {uid: uid in (0, 1, 5, 6) for uid in range(10)}  # of 3 generators: 0 and 1 have two prompts


def test_a_short_last_batch_is_shared_out_whole() -> None:
    ring = ring_of(n_rows=7, total_steps=50)
    assert [len(batch) for batch in batches(ring)] == [10, 4]
    assert [line["holder"] for line in lines(ring, Event.LEASE)][5:] == ["generator-2.0", "generator-0.0"]


def test_prompts_refunded_are_replaced_when_the_others_are_done() -> None:
    ring = ring_of(p_error=0.1, seed=4)
    assert lines(ring, Event.REFUND)
    open_: set[object] = set()
    ends = False  # some prompts of the round are done
    for _, record in ring.records or ():
        if record.event in (Event.READY, Event.REFUND):
            open_.discard(record.fields["uid"])
            ends = bool(open_)
        elif record.event is Event.LEASE:
            assert not ends
            open_.add(record.fields["uid"])
    assert len(batches(ring)) == 6


def test_a_generator_decodes_a_share_when_all_of_it_is_there(tmp_path: Path) -> None:
    with around_a_generator(tmp_path) as around:
        around.join()
        around.push(0)
        around.tell(replace(prompt(0), more=True))
        around.beat_until(lambda beat: beat.note == "samples 2")
        assert around.next_beat().progress == around.next_beat().progress == 0
        around.tell(prompt(1))
        heard = [
            around.heard(kind, bus).uid
            for _ in range(4)
            for kind, bus in ((m.Trajectory, around.reward), (m.Sampled, None))
        ]
        assert sorted(heard) == [0] * 4 + [1] * 4
        around.tell(replace(prompt(2), more=True))
        around.beat_until(lambda beat: beat.note == "samples 2")
        around.tell(m.Cancel(2, 0))  # its share will not be whole
        around.tell(prompt(3, samples=(0,), evaluation="before"))
        assert around.heard(m.Trajectory, around.reward).uid == 3
        around.stop()


def test_above_eta_0_no_prompt_waits_for_another() -> None:
    ring = ring_of(eta=1, capacity=8)
    sent = [about for _, _, about in ring.world.story or () if isinstance(about, m.Prompt)]
    assert sent
    assert not any(prompt.more for prompt in sent)
