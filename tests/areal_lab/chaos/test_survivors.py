"""The surviving history, from journals written by hand."""

from typing import Any

from areal_lab.chaos.survivors import Survivors


def line(t: float, event: str, **fields: Any) -> dict[str, Any]:
    return {"t": t, "event": event, **fields}


def test_prompts_undone_by_a_term_are_neither_lost_nor_trained_twice() -> None:
    admits = [line(0.0, "admit", uid=uid) for uid in range(5)]
    trained = [line(1.0, "trajectory", uid=uid, sample=0, step=step) for uid, step in ((0, 0), (1, 1), (2, 1))]
    back = line(2.0, "term", version=1, next_uid=3, open=[1, 2])
    again = [line(3.0, "trajectory", uid=uid, sample=0, step=1) for uid in (1, 2)]
    found = Survivors.of([*admits, *trained, line(1.5, "refund", uid=2), back, *again])
    assert (found.admitted, set(found.trained), found.refunded) == ({0, 1, 2}, {0, 1, 2}, set())
    assert (found.lost, found.twice) == (set(), [])
    found = Survivors.of([*admits, *trained, back, *again, *again[:1]])
    assert (found.lost, found.twice) == (set(), [(1, 0)])
    assert Survivors.of([*admits, *trained]).lost == {3, 4}


def test_updates_after_the_start_of_a_term_are_undone_and_their_repetition_survives() -> None:
    lines = [line(float(version), "update", version=version) for version in (1, 2, 3)]
    back = line(4.0, "term", version=1, next_uid=0, open=[])
    found = Survivors.of([*lines, back, line(7.0, "update", version=2)])
    assert (found.updates, found.n_undone) == ({1: 1.0, 2: 7.0}, 2)


def test_an_update_that_a_dead_head_did_not_report_survives_with_its_learner() -> None:
    alive = line(4.0, "term", version=2, next_uid=0, open=[], lives_on=True)
    found = Survivors.of([line(1.0, "update", version=1), alive, line(5.0, "update", version=3)])
    assert (found.updates, found.n_undone) == ({1: 1.0, 2: 4.0, 3: 5.0}, 0)
