"""Keys that are gone: refused with what to do, and left out of the settings that an older run saved."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from areal_bus.config import removed
from areal_bus.config.loader import fields, load, put
from areal_bus.config.removed import REMOVED, saved, why
from areal_bus.errors import ConfigError
from launch.commands.main import load_settings
from launch.commands.settings_help import explain
from tests.areal_bus.config.test_config import SMALL, refusal, write


def test_a_removed_key_is_refused_unless_it_has_its_former_default(tmp_path: Path) -> None:
    file = write(tmp_path, SMALL)
    assert load(file, ["learner.helpers=0"], {}) == load(file, (), {"AREAL_BUS_LEARNER__HELPERS": "0"}) == load(file)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("topology.adapt.eta_min=2", "set the eta itself, rollout.max_head_offpolicyness"),
        ("topology.adapt.slots_min=8", "set the slots themselves, rollout.max_concurrent_rollouts"),
        ("rollout.exact_lag=2", "areal_lab.loops.exact_lag"),
        ("virtual_time.seconds=2.0", "areal_lab.loops.virtual_time"),
        ("learner.helpers=1", "its threads shortened an update by a tenth, only for very small"),
    ],
)
def test_a_removed_key_is_refused_with_the_remedy(tmp_path: Path, option: str, said: str) -> None:
    key, _, value = option.partition("=")
    table, _, name = key.rpartition(".")
    file = write(tmp_path, SMALL)
    for found in (refusal(file, option), refusal(write(tmp_path, f"{SMALL}[{table}]\n{name} = {value}\n"))):
        assert found.startswith(f"{key} no longer exists: ")
        assert said in found
        assert f"; remove it (it is {value}; " in found


@pytest.mark.parametrize("key", ["virtual_time.token_s", "virtual_time", *REMOVED])
def test_a_removed_key_is_explained_by_why_it_is_gone(tmp_path: Path, key: str) -> None:
    said = rf"^{key} no longer exists: {re.escape(why(key))}$"
    with pytest.raises(ConfigError, match=said):
        explain(key)


def test_saved_settings_of_an_older_run_go_on_by_the_successor_of_a_key() -> None:
    lora = {"rank": 4, "offload": True}
    tree = {"actor": {"behav_imp_weight_mode": "mask", "behav_imp_weight_cap": 5.0, "lora": lora}}
    assert removed.ignored(tree) == []
    assert removed.left_out(tree)["actor"] == {
        "behav_imp_weight_cap": 5.0, "correction_action": "mask", "lora": {"rank": 4}, "offload": "base",
    }  # fmt: skip
    taus = {"actor": {"sapo_tau_neg": 2.0, "normalize_batch": True, "normalize_batch_over": "all"}}
    assert removed.ignored(taus) == []
    assert removed.left_out(taus)["actor"] == {"normalize_batch": "all", "sapo_tau": [1.0, 2.0]}
    for actor in ({"behav_imp_weight_mode": "mask"}, {"behav_imp_weight_mode": "mask", "correction": "tis"}):
        assert "correction_action" not in removed.left_out({"actor": dict(actor)})["actor"]


@pytest.mark.parametrize(
    "tree",
    [
        {"learner": {"helpers": 3}},
        {"topology": {"adapt": {"every_steps": 5, "eta_min": 1, "slots_min": 8}}},
        {"topology": {"adapt": {"schedule": [[3, 2]], "eta_min": None, "slots_min": None}}},
        {"rollout": {"exact_lag": [1, 2]}, "virtual_time": {"seconds": None, "token_s": 0.05}},
    ],
)
def test_saved_settings_of_an_older_run_may_hold_a_removed_key(tree: dict[str, Any]) -> None:
    config = saved(json.dumps(tree))
    assert config.topology.adapt.every_steps == tree.get("topology", {}).get("adapt", {}).get("every_steps", 0)
    assert saved(config.model_dump_json()) == config


def test_settings_have_at_most_253_keys() -> None:
    most = 253  # critic.warmup_updates; serve.save_every, max_staleness; rewards: groups, URL, a model, a second grader
    assert len(fields()) <= most, (
        f"a new key needs a user who sets it, and a value that they set: {len(fields())} keys, {most} at most: "
        "make another key a constant with a comment at its user (removed.py answers old files), or raise the limit in "
        "the same change with these reasons"
    )
    assert not fields().keys() & removed.REMOVED.keys()


def test_values_of_removed_keys_in_a_saved_run_are_named_unless_they_are_the_former_defaults() -> None:
    tree = {"watch": {"window": 9, "horizon": 20}, "topology": {"adapt": {"max_learners": None}}, "bus": {"port": 5000}}
    assert [note.split(" is ignored")[0] for note in removed.ignored(tree)] == ["bus.port = 5000", "watch.window = 9"]


@pytest.mark.parametrize("key", removed.REMOVED)
def test_each_removed_key_has_a_reason_that_ends_a_sentence(key: str) -> None:
    default, reason = removed.REMOVED[key]
    tree: dict[str, Any] = {}
    put(tree, key, default, "here")
    removed.refuse(tree, {})
    put(tree, key, "another", "here")
    with pytest.raises(ConfigError, match=f"{re.escape(key)} no longer exists: .*; remove it"):
        removed.refuse(tree, {key: "here"})
    assert reason[-1] not in ".; "


def test_a_run_of_an_older_version_is_resumed_with_its_own_settings(tmp_path: Path) -> None:
    config = load(write(tmp_path, SMALL), (), {})
    tree = config.model_dump(mode="json") | {"virtual_time": {"seconds": None, "token_s": 0.05}}
    tree["rollout"]["exact_lag"] = None
    (tmp_path / "config.json").write_text(json.dumps(tree))
    (tmp_path / "origin.json").write_text(json.dumps({"config": str(tmp_path / "config.toml")}))
    resumed, _ = load_settings([], str(tmp_path), [])
    assert resumed.model_copy(update={"run": config.run}) == config
