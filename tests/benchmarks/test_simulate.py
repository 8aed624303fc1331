"""Bench `simulate`: its pairs and their settings."""

from pathlib import Path

import pytest

from areal_bus.config import loader as settings
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError
from areal_lab.simulate.recording import MIN_UPDATES, WARM_UP_UPDATES
from benchmarks.simulate.bench import CONFIG, changes, settings_text
from benchmarks.simulate.bench import main as again
from benchmarks.simulate.pairs import LAWS, PAIRS, Job, jobs


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


def test_an_earlier_bench_without_a_finished_job_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has none that has ended"):
        again([str(tmp_path)])
