"""The laboratory of planted collapses: three branches of one run."""

from pathlib import Path

import pytest

from areal_bus.core.parts.collapse import CollapseForecast
from areal_lab.loops import collapse
from areal_lab.settings import load
from tests.areal_lab.test_sweep import BASE, SMALL


def test_a_score_has_fallen_where_it_stays_below_nine_tenths_of_the_best() -> None:
    assert collapse.fallen_at({20: 0.4, 21: 0.5, 22: 0.44, 23: 0.3, 24: 0.2, 25: 0.1}) == 22
    assert collapse.fallen_at({20: 0.4, 21: 0.1, 22: 0.37, 23: 0.4, 24: 0.41, 25: 0.38}) is None
    assert collapse.fallen_at({20: 0.4, 21: 0.4, 22: 0.4, 23: 0.4, 24: 0.1}) is None  # the last two decide nothing


def test_a_branch_goes_on_from_the_weights_of_its_version_with_the_planted_rate_and_sampler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collapse, "CHECKPOINT", 1)
    changes = {"actor.lr": 3e-2, "evaluate.before": "false", "run.total_train_steps": 3, "learner.warmup.steps": 30}
    changes |= {"data.batch_size": 8, "data.largest": 3, "gconfig.n_samples": 4}  # enough for a signal in each batch
    config = load(BASE, [f"{key}={value}" for key, value in {**SMALL, **changes}.items()])
    loop = collapse.PlantedLoop(config, BASE.parent, tmp_path, warm_ups=tmp_path)
    clean = [step for step, _ in loop.steps(CollapseForecast())]
    assert [step.stats["lr"] for step in clean] == pytest.approx([1e-4, 2e-4, 3e-4])  # a warm-up
    loop.plant(2, stays_at=0, most_lr=1.0)
    assert loop.digest == clean[1].digest != clean[2].digest
    (step,) = loop.run()
    assert (step.version, step.stats["lag_mean"]) == (3, 2.0)
    assert step.stats["lr"] == loop._actor.optimizer.param_groups[0]["lr"] == pytest.approx(3e-2)
    loop.close()
