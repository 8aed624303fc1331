"""Uploads of checkpoints: whole at the target or marked as partial, never in training's way, and the push to a hub."""

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import huggingface_hub
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from actors.learner.checkpoint.checkpoint_manager import CheckpointHooks, CheckpointManager
from actors.learner.checkpoint.upload import Uploads, check_hub, copy, file_system, push_to_hub
from areal_bus.config.sections import CheckpointConfig
from areal_bus.config.validation import check
from areal_bus.errors import ConfigError
from areal_bus.storage import versioned_dirs
from areal_bus.storage.journal import Journal
from tests.support.learner_setup import PLAIN, settings


def sealed(run: Path, version: int, text: str = "weights") -> Path:
    """A small complete checkpoint."""
    final = versioned_dirs.place(run / "checkpoints", version)
    building = versioned_dirs.building(final)
    (building / "model").mkdir()
    (building / "model" / "model.safetensors").write_text(text)
    (building / "state.json").write_text(json.dumps({"version": version}))
    versioned_dirs.seal(building, final)
    return final


def names(target: Any, root: str) -> list[str]:
    return sorted(name.removeprefix(root.rstrip("/") + "/").lstrip("/") for name in target.find(root))


WHOLE = [
    "step-000003.complete",
    *(f"step-000003/{name}" for name in ("manifest.json", "model/model.safetensors", "state.json")),
    "upload.id",
]


@pytest.fixture(params=["memory", "local"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Any, str, str]]:
    """(file system, path, URL)."""
    url = "memory://target/run" if request.param == "memory" else f"file://{tmp_path}/target/run"
    yield *file_system(url), url
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def test_a_checkpoint_is_copied_whole_and_then_marked(tmp_path: Path, place: tuple[Any, str, str]) -> None:
    target, root, url = place
    folder = sealed(tmp_path, 3)
    uploads = Uploads(url)
    uploads.add(folder)
    uploads.finish(lambda: None)
    assert names(target, root) == WHOLE
    assert target.cat_file(f"{root}/step-000003/model/model.safetensors") == b"weights"
    assert uploads.take_notes() == [f"uploaded step-000003 to {url}"]
    assert not uploads.holds("step-000003")
    uploads.close()


class Killed(BaseException):
    pass


@pytest.mark.parametrize("at", range(7))
def test_a_death_at_any_point_leaves_no_mark_and_the_next_start_copies_again(
    tmp_path: Path, place: tuple[Any, str, str], at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, root, _ = place
    folder, calls = sealed(tmp_path, 3), []

    def dies(real: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            if len(calls) == at:
                raise Killed
            calls.append(1)
            return real(*args, **kwargs)

        return called

    with monkeypatch.context() as patched:
        for name in ("put_file", "mv", "pipe_file"):
            patched.setattr(target, name, dies(getattr(target, name)))
        try:
            copy(folder, target, root)
        except Killed:
            assert not target.exists(f"{root}/step-000003.complete")
            assert target.exists(f"{root}/step-000003") == (at == 5)
        else:
            assert at == 6
    copy(folder, target, root)
    assert names(target, root) == WHOLE


def test_a_version_that_was_trained_again_replaces_the_one_at_the_target(
    tmp_path: Path, place: tuple[Any, str, str]
) -> None:
    target, root, _ = place
    copy(first := sealed(tmp_path, 3, "first"), target, root)
    shutil.rmtree(first)
    copy(sealed(tmp_path, 3, "again"), target, root)
    assert target.cat_file(f"{root}/step-000003/model/model.safetensors") == b"again"
    assert names(target, root) == WHOLE


def test_checkpoints_of_another_run_and_the_runs_own_are_not_replaced(
    tmp_path: Path, place: tuple[Any, str, str]
) -> None:
    target, root, url = place
    copy(sealed(tmp_path / "a", 3, "first"), target, root)
    uploads = Uploads(url)
    uploads.add(sealed(tmp_path / "b", 3, "other"))
    uploads.finish(lambda: None)
    uploads.close()
    assert "has checkpoints of another run; set another checkpoint.upload" in uploads.take_notes()[0]
    assert target.cat_file(f"{root}/step-000003/model/model.safetensors") == b"first"
    own = tmp_path / "a" / "checkpoints"
    with pytest.raises(ConfigError, match="run's own folder of checkpoints"):
        copy(own / "step-000003", LocalFileSystem(), str(own))
    assert (own / "step-000003" / "model" / "model.safetensors").read_text() == "first"


class FullFileSystem(LocalFileSystem):
    """Refuses to write as long as `n_left` is above 0."""

    protocol = "full"
    cachable = False
    n_left = 0

    def put_file(self, *args: Any, **kwargs: Any) -> None:
        if FullFileSystem.n_left:
            FullFileSystem.n_left -= 1
            raise OSError("no space left on device")
        super().put_file(*args, **kwargs)


@pytest.mark.parametrize(
    ("n_full", "said"), [(2, "uploaded step-000003"), (99, "checkpoint not uploaded: step-000003")]
)
def test_a_full_target_is_tried_again_and_then_a_warning(tmp_path: Path, n_full: int, said: str) -> None:
    fsspec.register_implementation("full", FullFileSystem, clobber=True)
    FullFileSystem.n_left = n_full
    uploads = Uploads(f"full://{tmp_path}/target", waits_s=(0.0, 0.0, 0.0))
    uploads.add(sealed(tmp_path, 3))
    uploads.finish(lambda: None)
    (note,) = uploads.take_notes()
    assert note.startswith(said)
    assert ("4 attempts" in note and "no space left" in note) == (n_full == 99)
    FullFileSystem.n_left = 0
    uploads.add(sealed(tmp_path, 4))  # the next one is tried again
    uploads.finish(lambda: None)
    assert uploads.take_notes()[0].startswith("uploaded step-000004")
    uploads.close()


class SlowFileSystem(LocalFileSystem):
    """Writes nothing until `goes_on` is set."""

    protocol = "slow"
    cachable = False
    goes_on = threading.Event()

    def put_file(self, *args: Any, **kwargs: Any) -> None:
        SlowFileSystem.goes_on.wait()
        super().put_file(*args, **kwargs)


def test_a_target_that_hangs_delays_nothing_and_its_checkpoint_is_not_removed(tmp_path: Path) -> None:
    fsspec.register_implementation("slow", SlowFileSystem, clobber=True)
    SlowFileSystem.goes_on.clear()
    manager = manager_of(tmp_path, CheckpointConfig(upload=f"slow://{tmp_path}/target", keep_every=5))
    manager._uploads.add(sealed(tmp_path, 3))
    assert manager._is_leaving(3)
    assert [manager._is_kept(version) for version in (3, 5, 10, 11)] == [False, True, True, False]
    manager.record()
    SlowFileSystem.goes_on.set()
    manager.upload_rest(has_model=False)
    assert not manager._is_leaving(3)
    assert (tmp_path / "target" / "step-000003.complete").is_file()


def manager_of(run: Path, config: CheckpointConfig) -> CheckpointManager:
    journal = Journal(run / "journal", role="learner", index=0, incarnation=0)
    hooks = CheckpointHooks(lambda version, folder: None)
    return CheckpointManager(run, config, journal=journal, is_root=True, hooks=hooks)


def test_a_target_that_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = {"push_to_hub": "me/model", "at_end": False}
    for call, said in (
        (lambda: file_system("nothing://x"), 'checkpoint.upload = "nothing://x" cannot be used: Protocol not known'),
        (lambda: check_hub("model"), 'checkpoint.push_to_hub must be "USER/NAME"'),
        (lambda: check(settings(checkpoint=hub, data=PLAIN)), "set checkpoint.at_end = true"),
    ):
        with pytest.raises(ConfigError, match=said):
            call()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"offline: checkpoint.push_to_hub = .me/model. needs the hub"):
        check_hub("me/model")


def test_the_model_of_the_end_is_committed_to_a_new_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []
    hub = SimpleNamespace(
        create_repo=lambda name, *, private, **_: calls.append((name, private)),
        upload_folder=lambda **how: calls.append((how["repo_id"], Path(how["folder_path"]))),
    )
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda **_: hub)
    folder = sealed(tmp_path, 3) / "model"
    push_to_hub(folder, "me/model")
    assert calls == [("me/model", True), ("me/model", folder)]
