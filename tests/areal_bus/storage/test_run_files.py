"""Which checkpoints stay for their evaluation, and where the best one is found."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_bus.config.validation import check
from areal_bus.errors import ConfigError
from areal_bus.storage import run_files, versioned_dirs
from areal_bus.storage.run_files import BestRule
from tests.support.learner_setup import settings

VALUES = st.dictionaries(st.integers(1, 30).map(lambda i: 2 * i), st.sampled_from([0.0, 0.25, 0.5, 1.0]), max_size=12)


@given(VALUES, st.integers(1, 4))
def test_the_best_stay_until_better_ones_come_and_those_without_a_value_wait_for_it(
    values: dict[int, float], keep: int
) -> None:
    rule, pairs = BestRule(keep, every=2), list(values.items())
    kept = {version for version in range(1, 70) if rule.keeps(version, pairs)}
    newest = max(values, default=0)
    evaluated = kept & values.keys()
    assert len(evaluated) == min(keep, len(values))
    assert kept - evaluated == {version for version in range(2, 70, 2) if version > newest}
    for version in values.keys() - evaluated:  # a kept one is better, or as good and older
        assert all((values[best], -best) > (values[version], -version) for best in evaluated)


def test_the_link_points_to_the_best_model_that_is_there(tmp_path: Path) -> None:
    assert run_files.read_best(tmp_path) == []
    for version in (4, 6):
        (versioned_dirs.place(tmp_path / "checkpoints", version) / "model").mkdir(parents=True)
    run_files.write_best(tmp_path, "avg_at_k", [(2, 0.9), (4, 0.5), (6, 0.5)])  # the disk was full at version 2
    assert run_files.read_best(tmp_path) == [(2, 0.9), (4, 0.5), (6, 0.5)]
    assert (tmp_path / "best").resolve().parent.name == "step-000004"
    (tmp_path / "best.json").write_text("{")
    assert run_files.read_best(tmp_path) == []


def test_without_evaluations_nothing_is_best_and_the_model_before_training_takes_no_place() -> None:
    rule, values = BestRule(1, every=4), [(0, 0.95), (4, 0.85), (8, 0.9)]
    assert [rule.keeps(version, values) for version in (4, 8)] == [False, True]
    assert not BestRule(0, 2).keeps(2, [(2, 1.0)])
    assert not BestRule(2, 0).is_due(2)
    with pytest.raises(ConfigError, match=r"checkpoint\.keep_best compares evaluations"):
        check(settings(checkpoint={"keep_best": 1}, data={"task": "sums", "chat_template": False}))
