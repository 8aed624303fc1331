"""Bench `simulate`: its pairs, settings, figures and table."""

from pathlib import Path

import pytest

from areal_bus.config import loader as settings
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError
from areal_lab.simulate.intervals import Prediction, Range
from areal_lab.simulate.outcome import Outcome
from areal_lab.simulate.recording import MIN_UPDATES, WARM_UP_UPDATES
from areal_lab.simulate.sweep import Split
from areal_lab.simulate.tables import RunComparison
from benchmarks.simulate.bench import CONFIG, Pair, changes, figures, markdown, settings_text
from benchmarks.simulate.bench import main as again
from benchmarks.simulate.pairs import ALONE, CROWDED, LAWS, PAIRS, Job, jobs


def test_there_are_20_pairs_of_different_jobs_with_enough_updates_to_measure() -> None:
    assert len(PAIRS) == len(set(PAIRS)) == 20
    for source, target in PAIRS:
        assert source != target
        assert source.engine == target.engine
        changed = [name for name in ("eta", "batch_size", "law") if getattr(source, name) != getattr(target, name)]
        assert changed or (source.learners, source.generators) != (target.learners, target.generators)
    for job in jobs():
        assert job.n_steps - WARM_UP_UPDATES - job.eta > MIN_UPDATES
    assert sum(target.engine == "builtin" for _, target in PAIRS) == 15


@pytest.mark.parametrize("job", jobs(), ids=lambda job: job.name)
def test_the_settings_of_a_job_are_valid_and_its_own(job: Job, tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    if job.engine == "builtin":
        (tmp_path / "rows.jsonl").touch()
        path.write_text(settings_text(tmp_path, tmp_path / "rows.jsonl", LAWS[job.law][1]))
    config: Config = settings.load(str(path) if job.engine == "builtin" else CONFIG, list(changes(job)))
    assert config.rollout.max_head_offpolicyness == job.eta
    assert (config.topology.learners, config.data.batch_size) == (job.learners, job.batch_size)
    assert config.gconfig.max_new_tokens == LAWS[job.law][1]


def pair(predicted: float, lag: float) -> Pair:
    outcome = Outcome(predicted, 0.0, 0.0, 1.0, lag, 1, 0.0, 0.0)
    told = Prediction(outcome, Range(predicted - 5, predicted + 5), None)
    return Pair(ALONE, CROWDED, RunComparison(Split(1, 2), 1, 100.0, 0.9, 20, told), 0.02)


def test_figures_count_pairs_within_the_bounds_and_the_table_has_a_row_per_pair() -> None:
    found = figures([pair(109.0, 1.0), pair(80.0, 0.5)])
    assert (found["pairs"], found["within_10_percent"], found["lag_within_a_quarter"]) == (2, 1, 1)
    assert (found["mean_error"], found["largest_error"], found["largest_lag_error"]) == (0.145, 0.2, 0.4)
    *_, row = markdown([pair(109.0, 1.0)])
    assert row == (
        "| 1 + 1, eta 0, B 32, medium | 1 + 2, eta 1, B 32, medium | 100 | 109 ± 5% | +9% | +2% | 0.90 | 1.00 |"
    )
    assert figures([])["largest_error"] is None


def test_an_earlier_bench_without_a_finished_job_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has none that has ended"):
        again([str(tmp_path)])
