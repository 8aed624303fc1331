"""Files in shared memory that hold the weights on their way to a server."""

import fcntl
import os
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.engines.servers import vllm
from actors.engines.servers import weight_transfer as handover
from actors.engines.servers.connect import open_engine
from actors.engines.servers.weight_transfer import WeightFiles, sweep
from actors.models.loading import load_tokenizer
from areal_bus.errors import ConfigError, EngineLost
from tests.servers.attached import attach, config, running, update
from tests.servers.engines import context_of
from tests.servers.speaks_vllm import speaking


def test_weights_come_in_a_private_folder_of_memory_that_does_not_stay(
    folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(vllm, "WeightFiles", partial(WeightFiles, tmp_path))
    with speaking() as fake, running(folder, fake) as run:
        update(run.engine, 2)
        (taken,) = fake.taken
        assert {name: tensor.shape for name, tensor in taken.items() if name != "lm_head.weight"} == {
            name: form.shape for name, form in run.engine.parameters().items()
        }
        assert torch.equal(taken["lm_head.weight"], taken["model.embed_tokens.weight"])  # which is tied in the model
        assert fake.modes_of_folder == [0o700]
        (left,) = tmp_path.iterdir()
        assert list(left.iterdir()) == []
    assert list(tmp_path.iterdir()) == []


def test_folders_of_dead_processes_are_removed_and_no_others(tmp_path: Path) -> None:
    dead, alive = (tmp_path / f"{handover.PREFIX}{name}" for name in ("dead", "alive"))
    for path in (dead, alive):
        path.mkdir()
        (path / handover.FILE).write_bytes(b"weights")
    lock = os.open(alive, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == [alive]
    os.close(lock)
    ours = WeightFiles(tmp_path)
    with ours.holding({"a": torch.zeros(3)}) as held:
        sweep(tmp_path)
        assert list(tmp_path.iterdir()) == [held]
    ours.close()


def test_a_folder_is_not_removed_by_those_that_begin_at_the_same_time(tmp_path: Path) -> None:
    ended = threading.Event()

    def sweeps() -> None:
        while not ended.is_set():
            sweep(tmp_path)

    thread = threading.Thread(target=sweeps)
    thread.start()
    try:
        for _ in range(50):
            mine = WeightFiles(tmp_path)
            with mine.holding({"a": torch.zeros(3)}) as folder:
                assert (folder / "model.safetensors").exists()
            mine.close()
    finally:
        ended.set()
        thread.join()
    assert not list(tmp_path.iterdir())


def test_weights_that_find_no_room_after_all_lose_the_server(tmp_path: Path) -> None:
    mine = WeightFiles(tmp_path)
    with mine.holding({"a": torch.zeros(3)}) as folder:
        pass
    folder.rmdir()
    why = "weights need 1 MiB in .* on their way to the server"
    with pytest.raises(EngineLost, match=why), mine.holding({"a": torch.zeros(3)}):
        pass
    mine.close()


def test_without_room_in_memory_weights_go_through_the_temporary_folder(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ours = WeightFiles(tmp_path / "none")
    with ours.holding({"a": torch.zeros(3)}) as held:
        assert held.parent == tmp_path
    ours.close()


def shared_memory(monkeypatch: pytest.MonkeyPatch, total: int) -> None:
    monkeypatch.setattr(handover.shutil, "disk_usage", lambda path: SimpleNamespace(total=total, free=total))


def test_shared_memory_that_cannot_hold_the_weights_is_refused_with_the_flag_to_set(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared_memory(monkeypatch, 64 << 20)
    with pytest.raises(ConfigError, match=r"has 64 MiB, .* needs 14664 MiB there \(14536 MiB .* --shm-size=15g"):
        handover.check_shared_memory(14536 << 20, 128 << 20)
    handover.check_shared_memory(1 << 40, 1, Path("/no/such/folder"))
    shared_memory(monkeypatch, 100)
    with speaking() as fake, pytest.raises(ConfigError, match="shared memory too small: /dev/shm has 0 MiB"):
        attach(folder, fake)


def test_a_server_is_not_started_in_the_shared_memory_of_a_container_by_default(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 MiB at docker: too little also without weights."""
    shared_memory(monkeypatch, 64 << 20)
    settled = config(folder, "vllm", python=sys.executable)
    with pytest.raises(ConfigError, match=r"/dev/shm has 64 MiB, .*: start the container with --shm-size=1g"):
        open_engine(context_of(folder), settled, load_tokenizer(str(folder)))
