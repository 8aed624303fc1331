"""Replays: the recorded batches give the recorded weights, and another learner when its settings change."""

import json
from pathlib import Path

import pytest

from areal_bus.errors import ConfigError
from areal_bus.process.commands import find_mpirun
from areal_bus.process.isolation import CHILD
from tests.tools.trust.plain import TINY, settings, train_plain
from tools.offline.replay import Replay
from tools.trust import replay
from tools.trust.batches import steps_of_loop
from tools.trust.child import run_to_end


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_plain(tmp_path_factory.mktemp("recorded") / "run")


def digests(folder: Path) -> list[str]:
    return [json.loads(line)["digest"] for line in (folder / "reference.jsonl").read_text().splitlines()[1:]]


def test_recorded_batches_give_the_same_weights_without_generators(recorded: Path, tmp_path: Path) -> None:
    again = Replay(recorded, tmp_path, before=1, overrides=[])
    assert [step.digest for step in again.run(None)] == digests(recorded)


def test_another_learning_rate_changes_the_weights_and_not_the_data(recorded: Path, tmp_path: Path) -> None:
    again = Replay(recorded, tmp_path, before=1, overrides=["actor.lr=1e-2"])
    assert digests(recorded)[0] not in [step.digest for step in again.run(2)]
    assert again.version == 2


def test_settings_that_the_batches_decide_are_refused(recorded: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unsupported setting of a replay: gconfig.n_samples=2: its batches"):
        Replay(recorded, tmp_path, before=1, overrides=["gconfig.n_samples=2"])


def test_a_version_without_a_batch_is_missing(recorded: Path) -> None:
    steps = steps_of_loop(recorded)
    assert [step.version for step in replay.chosen(steps, 2, None)] == [2, 3]
    assert [step.version for step in replay.chosen(steps, 2, 1)] == [2]
    with pytest.raises(ConfigError, match="missing version 4: the last update of this run is version 3"):
        replay.chosen(steps, 4, None)
    with pytest.raises(ConfigError, match="must be at least 1"):
        replay.chosen(steps, 0, None)


@pytest.mark.slow
def test_a_ring_is_replayed_from_its_checkpoint_bit_for_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = [f"run.folder={json.dumps(str(tmp_path))}", 'run.name="ring"', "checkpoint.every_steps=2"]
    changes = settings(run__total_train_steps=4, rollout__max_head_offpolicyness=1, actor__ppo_n_minibatches=2)
    words = [word for setting in (*changes, *place) for word in ("--set", setting)]
    run_to_end([find_mpirun(), "-np", "3", *CHILD, "areal_bus.launch", str(TINY), *words], tmp_path / "ring.txt")
    run = str(tmp_path / "ring")
    assert replay.main([run, "--from", "3", "--json"]) == 0
    same = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (same["bit_equal"], same["from"], same["steps"]) == (True, 3, 2)
    words = ["--from", "3", "--steps", "1", "--set", "actor.lr=1e-2", "--json", "--output", str(tmp_path / "other")]
    assert replay.main([run, *words]) == 0
    other = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (other["bit_equal"], other["steps"]) == (False, 1)
    assert other["first_difference"].startswith("other figures of step 3, lr: ")
    assert "Another learner on the same data" in (tmp_path / "other" / "replay.html").read_text()
