"""The forecast of a collapse from the figures of updates."""

import pytest

from areal_bus.core.parts.collapse import CollapseForecast

KL = ("mismatch_kl", "ess", "lag_mean")
PLANTED = [(0.0, 1.0, 0), (0.0166, 0.966, 1), (0.106, 0.709, 2), (0.14, 0.827, 3)]  # lr x 30 at a lag of 64, measured
CLEAN = [(0.0, 1.0, 0), (0.0063, 0.99, 1), (0.0146, 0.966, 1), (0.011, 0.97, 1), (0.0632, 0.925, 4), (0.0389, 0.915, 4)]


def forecasts(*updates: dict[str, float]) -> list[int]:
    """Versions at which a forecast is raised."""
    forecast = CollapseForecast()
    return [version for version, stats in enumerate(updates, 1) if forecast.see(stats)]


def measured(rows: list[tuple[float, float, int]], floor: float = 0.0) -> list[dict[str, float]]:
    return [dict(zip(KL, (kl + floor, ess, float(lag)), strict=True)) for kl, ess, lag in rows]


def test_a_forecast_is_raised_by_the_figures_of_a_planted_collapse_and_not_by_those_of_clean_runs() -> None:
    assert forecasts(*measured(PLANTED)) == [3]
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
    """As of an engine whose log-probs are not the learner's: their difference says nothing of the policy's movement."""
    rows = [(0.58 + 0.1 * (n % 5), 0.5 - 0.06 * (n % 5), 1) for n in range(15)]
    assert forecasts(*measured(rows)) == []
