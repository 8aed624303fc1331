"""Evaluations in training: a generator is killed in the middle of one, the run drains in another, and is resumed."""

import signal
from pathlib import Path

import pytest

from tests.faults.ring import Ring

pytestmark = pytest.mark.slow

KEEP_BEST = ("checkpoint.keep_best=1", "checkpoint.keep=1", "evaluate.metric=reward")
SETTINGS = (
    *KEEP_BEST,
    "evaluate.every_steps=2",
    "evaluate.n_samples=3",
    "data.held_out=12",
    "run.total_train_steps=14",
)


def test_an_evaluation_survives_a_generator_and_a_resumed_run_evaluates_each_version_once(tmp_path: Path) -> None:
    problems = tmp_path / "small.jsonl"
    problems.write_text('{"question": "abc", "answer": "cba"}\n{"question": "dog", "answer": "god"}\n')
    sets = f'evaluate.sets=[{{name = "small", path = "{problems}"}}]'
    ring = Ring(tmp_path, *SETTINGS, sets)
    ring.throttle(0.02)
    ring.hold_learner(2)
    with ring.started():
        ring.wait_for("request", role="generator", rank=0, evaluation="step-2")
        fault = ring.kill("generator-0")
        ring.wait_for("evaluation", name="step-2:small", after=fault.t)
        ring.hold_learner(4)
        ring.wait_for("request", role="generator", evaluation="step-4")
        ring.send(signal.SIGUSR1)
        ring.hold_learner(None)
        ring.finish()
    assert not ring.lines("evaluation", name="step-4", role="head")
    ring.throttle(None)
    with ring.started("--resume", str(ring.run)):
        ring.finish()
    history = ring.check_survived()
    assert history.n_terms == 2
    found = [(line["name"], line["n"], line["n_failed"]) for line in ring.lines("evaluation", role="head")]
    names = [name for name, _, _ in found]
    assert len(set(names)) == len(names)
    assert {"step-2", "step-2:small", "step-14", "step-14:small"} <= set(names)
    assert {"step-4", "step-6"} & set(names)  # the drained run's: at the version from which it goes on
    values = [(line["version"], line["reward"]) for line in ring.lines("evaluation", role="head")
              if line["name"].startswith("step-") and ":" not in line["name"]]  # fmt: skip
    models = {version: ring.run / "checkpoints" / f"step-{version:06d}" / "model" for version, _ in values}
    ordered = [version for version, _ in sorted(values, key=lambda found: (-found[1], found[0]))]
    assert (
        ordered[0] % 2 or models[ordered[0]].is_dir()
    )  # one that begins late may be of a version without a checkpoint
    assert (ring.run / "best").resolve() == next(models[version] for version in ordered if models[version].is_dir())
    assert all(n == (6 if name.endswith("small") else 36) and not failed for name, n, failed in found)
