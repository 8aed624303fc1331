"""Checkpoints: whole or not at all, verified, and plain transformers folders."""

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.learner.checkpoint import checkpoint
from actors.learner.update.ppo import PPOActor
from actors.models.loading import load_model
from areal_bus.errors import CheckpointError, ConfigError
from areal_bus.storage import versioned_dirs
from areal_bus.weights.snapshot import digest_of
from tests.support.learner_setup import (
    RESUMED,
    begun_at,
    check_equal_states,
    resume,
    resumed_config,
    scratch_tokenizer,
    settings,
    tiny_actor,
    tiny_model,
    train,
    weights,
)
from tests.support.learner_setup import save as save_actor
from tests.support.old_checkpoint import write_whole
from tools import save_hf
from tools.offline.save_hf import save_hf as offline_save_hf


def save(actor: PPOActor, folder: Path, **how: Any) -> Path:
    return save_actor(actor, folder / "checkpoints", tokenizer=scratch_tokenizer(folder / "scratch"), **how)


@pytest.mark.slow
def test_save_hf_writes_the_learners_float32_weights_of_a_rounded_model(tmp_path: Path) -> None:
    actor = tiny_actor(tmp_path, settings(model={"scratch": {}, "dtype": "bfloat16"}, actor={"lr": 1e-2}))
    train(actor, range(1))
    folder = save(actor, tmp_path)
    assert save_hf.main([str(tmp_path), str(tmp_path / "float32"), "--dtype", "float32"]) == 0
    offline_save_hf(folder, tmp_path / "deep" / "rounded", shard_gb=1e-5)
    exact = AutoModelForCausalLM.from_pretrained(tmp_path / "float32", dtype=torch.float32)
    rounded = AutoModelForCausalLM.from_pretrained(tmp_path / "deep" / "rounded")
    assert len(list((tmp_path / "deep" / "rounded").glob("*.safetensors"))) > 1
    assert AutoTokenizer.from_pretrained(tmp_path / "float32")("abc")["input_ids"] == [3, 4, 5]
    ours, theirs = actor.policy.parameters(), dict(exact.named_parameters())
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert all(torch.equal(ours[name].bfloat16(), weight) for name, weight in rounded.named_parameters())


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["nowhere", "new"], "unknown CHECKPOINT nowhere: give a folder like"),
        (["run", "full"], "FOLDER must not exist or be empty"),
        (["run", "new", "--shard-gb", "0"], "--shard-gb is above 0"),
        (["run/checkpoints/step-000001", "new"], "differs in size"),
    ],
)
def test_save_hf_refuses(tmp_path: Path, words: list[str], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("full").mkdir()
    Path("full", "file").touch()
    actor = tiny_actor(tmp_path)
    actor.version = 1
    (save(actor, Path("run")) / "model" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=why):
        save_hf.main(words)
    assert not Path("new").exists()


@pytest.mark.parametrize(
    ("versions", "resumable", "kept"),
    [
        ((1, 2, 10), range(99), [2, 10]),
        ((1, 2, 3, 4, 5), (1, 2), [1, 2, 4, 5]),  # the two newest with a head's savepoint, and the two newest of all
        ((10, 999_999, 1_000_000, 5), range(10**7), [5, 1_000_000]),  # a run that went back keeps its newest
    ],
)
def test_the_newest_checkpoints_are_kept(
    tmp_path: Path, versions: Sequence[int], resumable: Sequence[int], kept: list[int]
) -> None:
    actor = tiny_actor(tmp_path)
    for version in versions:
        actor.version = version
        save(actor, tmp_path, counts=lambda version: version in resumable)
    assert names(tmp_path) == [f"step-{version:06d}" for version in kept]


def die(*_: Any, **__: Any) -> NoReturn:
    raise KeyboardInterrupt("killed here")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_a_checkpoint_with_its_final_name_is_complete_after_a_killed_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = tiny_actor(tmp_path)
    save(actor, tmp_path, keep=1)
    actor.version = 1
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", die)
        with pytest.raises(KeyboardInterrupt):
            save(actor, tmp_path, keep=1)
    assert names(tmp_path) == [f".step-000000.{os.getpid()}.tmp", "step-000001"]
    actor.version = 2
    save(actor, tmp_path, keep=2)
    assert names(tmp_path) == ["step-000001", "step-000002"]


@pytest.mark.parametrize("n_renames", [0, 1, 2])
def test_a_checkpoint_that_is_written_again_is_never_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_renames: int
) -> None:
    actor = tiny_actor(tmp_path)
    first = (save(actor, tmp_path) / "manifest.json").read_text()
    train(actor, range(1))
    actor.version = 0
    rename = Path.rename
    done: list[Path] = []

    def killed_later(path: Path, target: Path) -> Path:
        if len(done) == n_renames:
            die()
        done.append(path)
        return rename(path, target)

    with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
        patched.setattr(Path, "rename", killed_later)
        save(actor, tmp_path)
    versioned_dirs.tidy(tmp_path / "checkpoints")
    assert names(tmp_path) == ["step-000000"]
    folder = tmp_path / "checkpoints" / "step-000000"
    checkpoint.verify(folder)
    assert ((folder / "manifest.json").read_text() == first) == (n_renames < 2)


def test_a_start_does_not_fail_where_a_rank_still_writes_for_a_dead_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = tmp_path / f".step-000007.{dead.pid}.tmp"
    (left / "shards").mkdir(parents=True)

    def refuse(path: str, **_: int) -> None:
        raise OSError(errno.ENOTEMPTY, "a file of another process is open here", path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", refuse)
        versioned_dirs.tidy(tmp_path)
    assert left.is_dir()
    versioned_dirs.tidy(tmp_path)
    assert not left.exists()


@pytest.mark.parametrize("name", ["shards/shard-00001-of-00001.safetensors", "model/model.safetensors", "state.json"])
def test_one_wrong_byte_is_refused(tmp_path: Path, name: str) -> None:
    actor = tiny_actor(tmp_path)
    train(actor, range(1))
    folder = save(actor, tmp_path)
    checkpoint.verify(folder)
    path = folder / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=name.split("/")[-1]):
        checkpoint.load(folder)


def test_the_manifest_names_every_other_file_and_one_that_is_missing_is_refused(tmp_path: Path) -> None:
    folder = save(tiny_actor(tmp_path), tmp_path)
    named = set(json.loads((folder / "manifest.json").read_text())["files"])
    assert {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} == named | {"manifest.json"}
    for name, said in (("model/config.json", "must be readable"), ("manifest.json", "readable manifest")):
        (folder / name).unlink()
        with pytest.raises(CheckpointError, match=said):
            checkpoint.load(folder)


@pytest.mark.parametrize("is_old", [False, True])
def test_state_of_another_model_is_refused(tmp_path: Path, is_old: bool) -> None:
    actor = tiny_actor(tmp_path)
    train(actor, range(1))
    state = checkpoint.load(write_whole(actor, tmp_path) if is_old else save(actor, tmp_path))
    others = [(tiny_model(n_layers=3), "'model.layers.2.*another model")]
    others += [] if is_old else [(tiny_model(key_heads=4), r"is \[16, 32\] there and \[32, 32\] here")]
    for model, why in others:
        other = tiny_actor(tmp_path / "other", model=model)
        before = {name: value.clone() for name, value in other.policy.parameters().items()}
        with pytest.raises(CheckpointError, match=why):
            checkpoint.restore(state, policy=other.policy, optimizer=other.optimizer)
        assert all(torch.equal(value, before[name]) for name, value in other.policy.parameters().items())
        assert not other.optimizer.state


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_of_one_file_still_loads_and_goes_on_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    """Of schema 1, which rank 0 wrote alone."""
    config = settings(model={"scratch": {}, "dtype": dtype}, actor={"lr": 1e-2, "advantage": "gae"})
    first = tiny_actor(tmp_path / "a", config)
    train(first, range(2))
    folder = write_whole(first, tmp_path)
    second = tiny_actor(tmp_path / "b", config, model=load_model(str(folder / "model"), "float32", "cpu"))
    resume(second, folder)
    for actor in (first, second):
        train(actor, range(2, 4))
    torch.testing.assert_close(weights(first.policy), weights(second.policy), atol=0, rtol=0)
    offline_save_hf(folder, tmp_path / "exact", dtype="float32")
    assert load_model(str(tmp_path / "exact"), "float32", "cpu") is not None


KINDS = [(kind, "float32", False) for kind in RESUMED]
KINDS += [("lora", "bfloat16", False), ("schedule", "float32", True), ("schedule", "bfloat16", True)]


@pytest.mark.parametrize(("kind", "dtype", "tied"), KINDS)
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path, kind: str, dtype: str, tied: bool) -> None:
    """Also with dropout, which draws what it would have drawn, and before an optimizer has any state. What is exported
    is what is pushed.
    """
    config = resumed_config(kind, dtype)
    whole = tiny_actor(tmp_path / "whole", config, model=tiny_model(tied=tied))
    train(whole, range(3))
    folder = save_actor(whole, tmp_path / "kept")
    pushed, drawn = weights(whole.policy), torch.rand(3)
    rest = train(whole, range(3, 5))
    again = begun_at(tmp_path / "again", config, folder)
    assert torch.equal(torch.rand(3), drawn)
    resume(again, folder)
    assert train(again, range(3, 5)) == rest
    check_equal_states(whole, again)
    if kind == "schedule":
        exported: Any = AutoModelForCausalLM.from_pretrained(folder / "model")
        rounded = {name: value.to(whole.policy.dtype) for name, value in pushed.items()}
        assert digest_of(dict(exported.named_parameters())) == digest_of(rounded)


def test_a_checkpoint_of_a_newer_release_is_refused_with_a_way_out(tmp_path: Path) -> None:
    folder = save(tiny_actor(tmp_path), tmp_path)
    (folder / "state.json").write_text(json.dumps({"schema": 3, "version": 0}))
    with pytest.raises(CheckpointError, match=r"schema 1 or 2: .* has 3; a newer release .*model.path = "):
        checkpoint.version_of(folder)


def test_shards_without_a_piece_are_refused(tmp_path: Path) -> None:
    """Even when the manifest is right: a file of another rank's pieces only."""
    actor = tiny_actor(tmp_path)
    train(actor, range(1))
    folder = save(actor, tmp_path)
    file = folder / "shards" / "shard-00001-of-00001.safetensors"
    held = load_file(file)
    key = next(key for key in held if held[key].dim() == 2)
    info = {name: {"saved_offsets": [0] * tensor.dim()} for name, tensor in held.items()}
    info[key]["saved_offsets"] = [4, 0]
    save_file(held, file, metadata={"DCP_SHARDING_INFO": json.dumps(info)})
    with pytest.raises(CheckpointError, match=f"numbers of '{key}'"):
        checkpoint.restore(checkpoint.read(folder), policy=actor.policy, optimizer=actor.optimizer)
