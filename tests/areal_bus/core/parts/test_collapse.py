"""The forecast of a collapse, and what the head does about it: warn, stop, or undo updates once."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_bus.core.events import Event
from areal_bus.core.parts.collapse import (
    COLLAPSE_ESS,
    COLLAPSE_KL,
    LR_SHARE,
    MARGIN,
    CollapseForecast,
    Rollback,
    kept_for_rollback,
    last_good,
)
from areal_bus.errors import CheckpointError
from areal_bus.messages import Role
from areal_bus.storage.run_files import read_rollback, write_rollback
from areal_lab.staleness.simulator.scenario import Fault, draw
from tests.areal_bus.core.test_head import finish, lines, ring_of, scenario
from tests.tools.audit.test_simulated import Recorded, journal
from tools.audit.audit import audit
from tools.run import Run

FIGURES = ("mismatch_kl", "ess", "lag_mean", "lr")
PLANTED = [(0.0, 1.0, 0, 2.25e-4), (0.0166, 0.966, 1, 4.5e-4), (0.106, 0.709, 2, 6.75e-4)]  # measured (docs/alarms.md)
MILD = [(0.0, 1.0, 0, 2.25e-4), (0.0101, 0.982, 1, 4.5e-4), (0.0371, 0.901, 2, 6.75e-4), (0.217, 0.758, 3, 9e-4)]
CLEAN = [
    (0.0, 1.0, 0, 1.8e-4), (0.0101, 0.978, 1, 2.1e-4), (0.0158, 0.969, 1, 2.4e-4), (0.00982, 0.978, 1, 2.7e-4),
    (0.0632, 0.925, 4, 3e-4), (0.0389, 0.915, 4, 3e-4),
]  # fmt: skip


def forecasts(*updates: dict[str, float]) -> list[int]:
    """Versions at which a forecast is raised."""
    forecast = CollapseForecast()
    return [version for version, stats in enumerate(updates, 1) if forecast.see(stats)]


def measured(rows: list[tuple[float, float, int, float]], floor: float = 0.0) -> list[dict[str, float]]:
    return [dict(zip(FIGURES, (kl + floor, ess, float(lag), lr), strict=True)) for kl, ess, lag, lr in rows]


def test_a_forecast_is_raised_by_the_figures_of_a_planted_collapse_and_not_by_those_of_clean_runs() -> None:
    assert forecasts(*measured(PLANTED)) == forecasts(*measured(MILD)) == [2]
    assert forecasts(*measured(CLEAN)) == []
    assert forecasts(*measured(CLEAN, floor=0.02)) == []  # a server that rounds differently


@pytest.mark.parametrize(
    "signs",
    [
        {"ess": 0.5, "clip_share": 0.4},
        {"ess": 0.5, "entropy": 2.0},
        {"entropy": 0.2, "clip_share": 0.4},
        {"mismatch_kl": 0.3, "lag_mean": 64.0, "ess": 0.5},
    ],
)
def test_two_signs_of_one_update_raise_a_forecast_and_one_alone_does_not(signs: dict[str, float]) -> None:
    usual = {"ess": 1.0, "mismatch_kl": 0.001, "clip_share": 0.0, "entropy": 1.0, "lag_mean": 1.0}
    assert forecasts(*[usual] * 6, usual | signs, usual | signs) == [7]  # once while it holds
    for name in signs.keys() - {"lag_mean"}:
        alone = usual | {name: signs[name], "lag_mean": signs.get("lag_mean", 1.0)}
        assert forecasts(*[usual] * 6, alone) == [], name


def test_sampler_and_learner_that_never_agreed_are_not_judged() -> None:
    """As of an engine whose log-probs are not the learner's: their difference says nothing of the policy's movement.

    An update without figures changes nothing.
    """
    rows = [(0.58 + 0.1 * (n % 5), 0.5 - 0.06 * (n % 5), 1, 1e-4) for n in range(15)]
    assert forecasts(*measured(rows)) == forecasts({}, *measured(rows)) == []


@given(kl=st.floats(0.0, 50.0), lr=st.floats(1e-8, 1.0))
def test_the_learning_rate_after_a_rollback_falls_with_the_kl_and_is_one_that_was_good(kl: float, lr: float) -> None:
    forecast = CollapseForecast()
    for stats in ({"lr": lr / 8}, {"lr": lr}, last := {"mismatch_kl": kl, "lr": lr, "lag_mean": 64.0}):
        forecast.see(stats)
    smaller = forecast.smaller_lr(last, 3)
    assert 0 < smaller <= lr * LR_SHARE
    assert (smaller == pytest.approx(lr * LR_SHARE)) == (kl <= COLLAPSE_KL * (1 + 1e-6))
    assert forecast.smaller_lr(last, 2) == min(smaller, lr / 8)
    order = Rollback(0, 9, 5, smaller, "")
    assert order.caps(4) > lr >= order.caps(5)


def test_a_learning_rate_that_jumps_raises_a_forecast_in_its_first_update() -> None:
    usual = {"ess": 0.99, "mismatch_kl": 0.003, "lag_mean": 1.0, "lr": 3e-4}
    assert forecasts({"mismatch_kl": 0.0, "lr": 3e-4}, *[usual] * 9, usual | {"lr": 9e-3}) == [11]
    assert (
        forecasts({"mismatch_kl": 0.0, "lr": 3e-6}, *({**usual, "lr": 3e-6 * n} for n in range(2, 101))) == []
    )  # a warm-up


@given(every=st.integers(1, 12), keep=st.integers(1, 3), n=st.integers(1, 30))
def test_a_good_checkpoint_stays_at_hand_however_few_are_kept(every: int, keep: int, n: int) -> None:
    kept: set[int] = set()
    for newest in range(every, every * n + 1, every):
        kept |= {newest}
        kept = {version for version in kept if version in {*sorted(kept)[-keep:], *kept_for_rollback(kept, newest)}}
        assert len(kept) <= keep + 2
        for at in range(newest, newest + every):  # no forecast loses more than two margins and two intervals
            assert MARGIN <= at - last_good(kept, at) < 2 * (MARGIN + every) or at < MARGIN + every


def test_a_rollback_goes_to_the_last_good_checkpoint_and_trains_on_once() -> None:
    assert MARGIN == 5
    ring = finish(ring_of(total_steps=20, checkpoint_every=3, on_collapse="rollback", collapses_at=10))
    (order,) = lines(ring, Event.COLLAPSE)
    assert (order["version"], order["action"], order["to"]) == (10, "rollback", 3)
    assert f"{COLLAPSE_ESS:g}" in str(order["why"])
    assert [term["version"] for term in lines(ring, Event.TERM)] == [0, 3]
    assert [line["version"] for line in lines(ring, Event.UPDATE)] == [*range(1, 11), *range(4, 21)]
    assert 10 not in [line["version"] for line in lines(ring, Event.PUBLISH)][:10]  # the bad version is not sampled


@pytest.mark.parametrize("action", ["warn", "stop"])
def test_a_forecast_without_a_rollback_undoes_nothing(action: str) -> None:
    ring = finish(ring_of(total_steps=20, checkpoint_every=3, on_collapse=action, collapses_at=10))
    (forecast,) = lines(ring, Event.COLLAPSE)
    assert (forecast["version"], forecast["action"]) == (10, action)
    assert ring.head.state.gate.u == (10 if action == "stop" else 20)
    assert ring.end is not None
    assert ring.end.sentence.startswith("stopped: collapse ahead at version 10") == (action == "stop")


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("role", [Role.HEAD, Role.LEARNER])
def test_a_rollback_is_obeyed_and_audited_whoever_dies_near_it(seed: int, role: Role, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"seed": seed, "total_steps": 12, "checkpoint_every": 2, "collapses_at": 8}
    settings |= {"n_learners": 1 + seed % 2, "on_collapse": "rollback", "p_disk": 0.1 * (seed % 3)}
    settings |= {"p_held": 0.5 * (seed // 2 % 3)}
    quiet = Recorded(scenario(**settings))
    quiet.run()
    at_s = next(now for now, line in quiet.records or () if line.event is Event.COLLAPSE)
    fault = Fault("crash", role, 0, at_s + 0.25 * (seed - 4), 3.0)
    plan = scenario(**settings, faults=(fault,), calm_s=at_s + 20.0)
    ring = Recorded(plan)
    outcome = ring.run()
    assert not outcome.violations
    assert outcome.end is not None
    assert outcome.end.code == 0
    found = audit(Run(journal(tmp_path, plan, ring)))
    assert not found.findings.first
    orders: list[Any] = [*lines(ring, Event.COLLAPSE)]
    assert len(orders) == 1
    assert found.head is not None
    assert found.head.undone.updates >= found.head.undone.on_purpose >= orders[0]["version"] - orders[0]["to"] > 0


@pytest.mark.parametrize("action", ["stop", "rollback"])
def test_schedules_with_faults_of_every_kind_keep_every_invariant_when_a_collapse_is_foretold(
    action: str, tmp_path: Path
) -> None:
    n_orders = 0
    for seed in range(12):
        plan = draw(seed)
        at = random.Random(f"collapse of {seed}").randint(2, max(plan.total_steps - 1, 2))
        ring = Recorded(plan := replace(plan, on_collapse=action, collapses_at=at))
        assert not ring.run().violations, seed
        assert not audit(Run(journal(tmp_path / str(seed), plan, ring))).findings.first, seed
        n_orders += len(lines(ring, Event.COLLAPSE))
    assert n_orders >= 8


def test_the_order_of_a_rollback_survives_on_disk_and_holds_until_the_next_term(tmp_path: Path) -> None:
    assert read_rollback(tmp_path) is None
    order = Rollback(term=2, at=30, to=20, max_lr=1e-5, why="ess")
    write_rollback(tmp_path, order)
    assert read_rollback(tmp_path) == order
    assert [order.is_open(term) for term in (3, 4)] == [True, False]
    (tmp_path / "rollback.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match="unreadable order of a rollback"):
        read_rollback(tmp_path)
