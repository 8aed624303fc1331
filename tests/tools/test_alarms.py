"""tools.alarms: each rule, planted failures in runs of the tiny task, clean runs, samples, rollbacks, the command."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from areal_bus.config.sections import AlarmName
from areal_bus.errors import ConfigError
from tests.support.planted import run_planted
from tests.tools.test_export import Ring
from tools.alarms import __main__ as alarms
from tools.alarms import rules
from tools.alarms.alarm_reader import (
    MOST_SAMPLES,
    AlarmReader,
    Finding,
    SampleReader,
    chosen,
    findings,
    read,
    repeated_share,
    template_of,
)
from tools.alarms.history import History, Waiting
from tools.alarms.rules import RULES
from tools.run import Run
from tools.trackers.series import UPDATE, Row, Undone

ROOT = Path(__file__).parents[2]
PLANT = 30  # version at which a failure begins
FOUND_WITHIN = 20  # updates
Out = pytest.CaptureFixture[str]


# rules


def normal(version: int) -> dict[str, float]:
    return {
        "rollout/reward": 0.3 + 0.01 * (version % 3),
        "rollout/reward_std": 0.4,
        "rollout/length": 100.0 + version % 7,
        "rollout/accuracy": 0.4,
        "rollout/completed_accuracy": 0.3,
        "rollout/zero_advantage_share": 0.3,
        "staleness/masked_share": 0.02,
        "train/entropy": 0.5,
        "train/kl": 0.001,
    }


PLANTED: Mapping[str, Callable[[int], dict[str, float]]] = {  # alarm -> values, from the number of updates after PLANT
    "reward_falls": lambda n: {"rollout/reward": max(0.3 - 0.02 * n, 0.0)},
    "length_drift": lambda n: {"rollout/length": 100.0 * 1.06**n},
    "unended_answers": lambda n: {"rollout/accuracy": 113 / 128, "rollout/completed_accuracy": 0.0},
    "entropy_cliff": lambda n: {"train/entropy": 0.5 * 0.8**n},
    "mismatch_rises": lambda n: {"train/kl": 0.001 * 2.0**n},
    "collapse_ahead": lambda n: {"train/ess": 0.5, "train/clip_share": 0.4},
    "masked_tokens": lambda n: {"staleness/masked_share": 0.15},
    "no_signal": lambda n: {"rollout/zero_advantage_share": 0.95},
}


def raised_by(values: Callable[[int], dict[str, float]], n: int, folder: Path) -> dict[str, Finding]:
    reader = AlarmReader(Run(folder))
    for version in range(1, n + 1):
        reader.take(Row(UPDATE, version, float(version), values(version)))
    return {finding.name: finding for finding in reader.findings()}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_figure_raises_its_alarm_and_no_other(name: str, tmp_path: Path) -> None:
    def values(version: int) -> dict[str, float]:
        return normal(version) | (PLANTED[name](version - PLANT) if version > PLANT else {})

    raised = raised_by(values, PLANT + FOUND_WITHIN, tmp_path)
    assert set(raised) == {name}
    assert PLANT < raised[name].since <= PLANT + FOUND_WITHIN
    assert raised[name].is_active


def test_an_alarm_that_no_longer_holds_stays_with_its_last_version(tmp_path: Path) -> None:
    def values(version: int) -> dict[str, float]:
        return normal(version) | ({"staleness/masked_share": 0.5} if 10 <= version < 15 else {})

    alarm = raised_by(values, 40, tmp_path)["masked_tokens"]
    assert (alarm.since, alarm.last, alarm.is_active) == (10, 18, False)  # a fifth of 0.5 is the limit


def test_a_held_out_fall_needs_a_rising_reward_and_more_than_noise(tmp_path: Path) -> None:
    def raised(rewards: tuple[float, float], accuracies: tuple[float, float], n: int) -> set[str]:
        reader = AlarmReader(Run(tmp_path))
        for version in range(1, 11):
            reward = rewards[version > 5] + 0.01 * (version % 2)
            reader.take(Row(UPDATE, version, 0.0, normal(version) | {"rollout/reward": reward}))
            if version % 5 == 0:
                accuracy = {"eval/accuracy": accuracies[version > 5], "eval/n": float(n)}
                reader.take(Row(f"evaluation/step-{version}", version, 0.0, accuracy))
        return {finding.name for finding in reader.findings()}

    assert raised((0.3, 0.5), (0.6, 0.3), 200) == {"held_out_falls"}
    assert raised((0.3, 0.3), (0.6, 0.3), 200) == set()  # both fall: no hacking of the reward
    assert raised((0.3, 0.5), (0.6, 0.4), 20) == set()  # within three standard errors
    assert raised((0.3, 0.5), (0.3, 0.6), 200) == set()


def test_waiting_counts_labels_of_learners_and_generators_by_actor() -> None:
    history, waiting = History(), Waiting()
    generator = {"role": "generator", "rank": 1, "s_idle": 9.0, "w_idle:prompt": 8.0, "s_generate": 1.0}
    waiting.add(generator)
    waiting.add({"role": "learner", "rank": 0, "s_wait_batch": 1.0, "s_backward": 3.0})
    waiting.add({"role": "head", "rank": 0, "s_wait": 9.0})
    history.waits = [(1, waiting), (2, Waiting())]
    assert history.waited_share("generator", 2) == {"generator-1": 0.8}
    assert history.waited_share("learner", 2) == {"learner-0": 0.25}
    assert history.waited_share("learner", 3) == {}  # there are no three updates


def test_the_rules_are_those_of_the_settings_and_of_the_page() -> None:
    page = (ROOT / "docs" / "alarms.md").read_text()
    assert [rule.name for rule in RULES] == list(get_args(AlarmName))
    for rule in RULES:
        assert f"| `{rule.name}` |" in page


# texts and samples


def test_repeated_shares_and_templates() -> None:
    assert repeated_share("the cat sat on the mat and the dog lay on the rug") == 0
    assert repeated_share("I think so. " * 20) > 0.9
    assert repeated_share("abababababab") > 0.7
    assert repeated_share("banana") == 0.25  # one of four
    assert repeated_share("") == repeated_share("aaaa") == 0  # a few n-grams say nothing
    assert template_of("What is 3+4?", "What is asked: 3 plus 4 makes 7") == "* * asked: # plus # makes #"
    assert template_of("olleh>", " hello ") == "hello"


def sample(step: int, uid: int, text: str = "x", **more: Any) -> dict[str, Any]:
    about = {"evaluation": "", "step": step, "uid": uid, "sample": 0, "reward": 0.5, "prompt": f"p{uid}"}
    return about | {"completion": text} | more


def write(folder: Path, *samples: dict[str, Any], torn: str = "") -> None:
    (folder / "samples").mkdir(exist_ok=True)
    with (folder / "samples" / "samples.jsonl").open("a") as file:
        file.write("".join(json.dumps(one) + "\n" for one in samples) + torn)


def test_samples_are_read_step_by_step_as_the_file_grows_and_after_a_rollback(tmp_path: Path) -> None:
    def uids(step: int) -> list[int] | None:
        block = reader.block(step)
        return None if block is None else [one["uid"] for one in block.kept]

    reader = SampleReader(Run(tmp_path))
    assert uids(0) is None  # no file yet
    write(tmp_path, sample(0, 1), sample(0, 2), sample(0, 9, evaluation="before"), torn='{"step": 1, "uid"')
    assert uids(0) == [1, 2]
    assert uids(1) is None
    write(tmp_path, torn=': "broken"}\n')
    write(tmp_path, sample(1, 3), sample(2, 4), sample(3, 5), sample(1, 6), sample(2, 7))
    assert [uids(1), uids(2)] == [[3], [4]]
    reader.go_back()  # to version 1: the batch of step 3 was not trained
    assert [uids(1), uids(2), uids(3)] == [[6], [7], None]


def test_the_samples_to_read_are_the_highest_ranks_of_many_prompts() -> None:
    samples = [sample(0, uid, n_tokens=n) for uid, n in ((1, 9), (1, 8), (2, 7), (3, 1), *((4, 0) for _ in range(20)))]
    read_first = [(one["uid"], one["n_tokens"]) for one in chosen(samples, lambda one: one["n_tokens"])]
    assert read_first[:5] == [(1, 9), (2, 7), (3, 1), (4, 0), (1, 8)]
    assert len(read_first) == MOST_SAMPLES


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("repetition", lambda uid: f"{'abcdefgh'[uid]}x " * 40),
        ("one_template", lambda uid: "Thank you for asking me this."),
    ],
)
def test_texts_of_the_samples_raise_alarms(name: str, bad: Callable[[int], str], tmp_path: Path) -> None:
    words = [first + rest for first in "bdfgk" for rest in ("alm", "ern", "olt", "usk")]
    reader = AlarmReader(Run(tmp_path))
    for version in range(1, PLANT + FOUND_WITHIN + 1):
        for uid in range(8):
            good = " ".join(words[(version * 3 + uid + i * i) % len(words)] for i in range(12))
            write(tmp_path, sample(version - 1, uid, bad(uid) if version > PLANT else good))
        reader.take(Row(UPDATE, version, 0.0, normal(version)))
    [alarm] = reader.findings()
    assert (alarm.name, alarm.is_active, len(alarm.samples)) == (name, True, MOST_SAMPLES)
    assert PLANT < alarm.since <= PLANT + 5


def test_a_rollback_clears_the_alarms_of_its_versions(tmp_path: Path) -> None:
    reader = AlarmReader(Run(tmp_path))
    for version in range(1, 21):
        share = {"staleness/masked_share": 0.9 if version > 10 else 0.0}
        reader.take(Row(UPDATE, version, 0.0, normal(version) | share))
    assert [finding.since for finding in reader.findings()] == [11]
    reader.take(Undone(10))
    assert (reader.findings(), reader.version) == ([], 10)
    for version in range(11, 31):
        reader.take(Row(UPDATE, version, 0.0, normal(version)))
    assert reader.findings() == []


# the command


def test_real_rings_bound_by_one_side_raise_its_starvation_alarm(
    journals: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have ten updates; the time of the first is not judged, so that windows of 4 are left."""
    with monkeypatch.context() as short:
        short.setattr(rules, "WINDOW", 4)
        bounds = ("generation-bound", "learner-bound", "push-bound")
        names = {name: {one.name for one in read(Run(journals / name)).findings()} for name in bounds}
    assert names["learner-bound"] == {"starved_generators"}
    assert names["generation-bound"] == {"starved_learner", "masked_tokens"}
    assert names["push-bound"] == set()
    assert alarms.main([str(journals / "generation-bound"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in found["alarms"]] == ["masked_tokens"]
    assert found["version"] == 10
    assert "evaluate.every_steps" in found["not_checked"]["held_out_falls"]


def test_the_command_prints_rule_values_advice_and_samples_as_plain_text(tmp_path: Path, capsys: Out) -> None:
    ring = Ring(tmp_path / "ring")
    assert alarms.main([str(ring.folder)]) == 0
    assert "no alarm in 0 versions" in capsys.readouterr().out
    for version in range(6):
        for uid in range(4):
            write(ring.folder, sample(version, 10 * version + uid, "so \x1b[31m it is " * 30))
        ring.update(0.5)
    ring.line("head", "end", code=0, reason="done", wall_s=1.0)
    assert alarms.main([str(ring.folder)]) == 1
    out = capsys.readouterr().out
    for text in (
        "repetition: raised at version 5, and holds",
        "more than 20% of the samples",
        "  try ",
        "step 4 uid 4",
    ):
        assert text in out
    assert "\x1b" not in out
    assert alarms.main([str(ring.folder), "--follow"]) == 1
    assert capsys.readouterr().out.startswith("alarm repetition at version 5: 80% of the samples")


def test_bad_input_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing journal"):
        alarms.main([str(tmp_path)])
    (tmp_path / "config.json").write_text('{"watch": {"console": "perhaps"}}')
    with pytest.raises(ConfigError, match=r"watch\.console: Input should be a valid boolean"):
        read(Run(tmp_path))


# planted failures in runs of the tiny task

OURS = "tests.support.planted:"
FAILURES: tuple[tuple[dict[str, Any], set[str]], ...] = (  # settings, and what they raise among others
    ({"actor.lr": 2e-3, "reward.function": f"{OURS}pays_for_length"}, {"held_out_falls", "length_drift"}),
    ({"actor.lr": 2e-3, "reward.function": f"{OURS}pays_for_repeats"}, {"repetition"}),
    ({"actor.lr": 2e-3, "reward.function": f"{OURS}pays_for_one_text"}, {"one_template", "entropy_cliff"}),
    ({"reward.function": f"{OURS}pays_always"}, {"no_signal"}),
    ({"actor.lr": 1e-2}, {"repetition", "reward_falls"}),
    (
        {"actor.lr": 4e-3, "rollout.exact_lag": 4, "rollout.max_head_offpolicyness": 4},
        {"mismatch_rises", "reward_falls"},
    ),
)
SOAK = pytest.mark.soak


@pytest.fixture(scope="module")
def warm_ups(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("warm-ups")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("planted", "names"), [FAILURES[0], *(pytest.param(*failure, marks=SOAK) for failure in FAILURES[1:])]
)
def test_a_planted_failure_is_found_within_20_updates(
    planted: dict[str, Any], names: set[str], tmp_path: Path, warm_ups: Path
) -> None:
    run = run_planted(tmp_path / "run", planted, warm_ups=warm_ups)
    found = {finding.name: finding for finding in findings(Run(run))}
    assert names <= found.keys()
    assert max(finding.since for finding in found.values()) <= FOUND_WITHIN  # the whole run
    assert {len(found[name].samples) for name in names} == {MOST_SAMPLES}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=SOAK) for seed in (2, 3, 4, 5))])
def test_a_clean_run_raises_nothing(seed: int, tmp_path: Path, warm_ups: Path) -> None:
    run = run_planted(tmp_path / "run", {"run.seed": seed}, warm_ups=warm_ups)
    assert findings(Run(run)) == []
