"""eta = 0 is the synchronous algorithm: the ring over real processes and the plain loop, 20 steps, bit for bit."""

import shutil
from pathlib import Path

import pytest

from areal_bus.config.loader import load
from areal_bus.errors import ConfigError
from benchmarks.eta0 import bench as eta0
from tests.support.replaying import replay_run
from tools.offline import synchronous_reference


@pytest.mark.soak  # in CI: tools/trust/test_prove.py (two steps of a config), faults/test_resume.py (a resumed run)
def test_the_ring_of_two_generators_and_the_plain_loop_are_the_same_bits(tmp_path: Path) -> None:
    evaluates = ("evaluate.before=true", "evaluate.every_steps=6", "evaluate.limit=5", "evaluate.n_samples=3")
    few = ("data.limit=1000",)
    run, plain = eta0.ring(tmp_path, 2, changes=(*few, *evaluates)), eta0.reference(tmp_path, 2, changes=few)
    likeness = eta0.compare(run, plain, n_generators=2)
    assert likeness.difference is None
    assert likeness.n_same == eta0.STEPS
    holders = {line["uid"]: line["holder"] for line in run.events("lease", role="head")}
    assert holders == {uid: f"generator-{uid % 2}.0" for uid in range(8 * eta0.STEPS)}
    found = [(line["name"], line["version_first"], line["version_last"]) for line in run.events("evaluation")]
    assert found == [("before", 0, 0), ("step-6", 6, 6), ("step-12", 12, 12), ("step-18", 18, 18)]  # each pinned
    lengths = {line["n_tokens"] for line in run.events("trajectory", role="head")}
    assert len(lengths) > 5  # or queue, order and batch would be put to no test
    assert replay_run(run.folder, n_generators=2).head.state.gate.u == eta0.STEPS
    lines, batches = plain / "reference.jsonl", plain / "batches"
    lines.write_text("".join(line + "\n" for line in lines.read_text().splitlines()[: eta0.STEPS]))
    assert not eta0.compare(run, plain, n_generators=2).identical_batches  # a step less is a difference
    shutil.rmtree(batches / "step-000000")
    (batches / "step-000001").rename(batches / "step-000000")
    assert (
        eta0.compare(run, plain, n_generators=2).difference == "step 1: prompts, tokens, log-probs, rewards, advantages"
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("rollout.max_head_offpolicyness=1", "set rollout.max_head_offpolicyness = 0"),
        ("learner.loop=my:loop", "my:loop"),
    ],
)
def test_the_synchronous_reference_refuses_settings_that_it_does_not_implement(change: str, sentence: str) -> None:
    synchronous_reference.check(load(eta0.CONFIG, eta0.CHANGES), 1)
    with pytest.raises(ConfigError, match=sentence):
        synchronous_reference.check(load(eta0.CONFIG, [*eta0.CHANGES, change]), 1)
