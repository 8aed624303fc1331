"""The registry with a trainer that adds up what it is told: its state is the sum of all steps since it began."""

import json
import resource
from pathlib import Path
from typing import Any

import pytest

from areal_serve.registry import CALL_BYTES, Model, Registry
from areal_serve.rejection import Rejected
from areal_serve.worker import Frame


class Adder:
    """A trainer of numbers, with the registry's own frames. It answers when it is asked to, and can be killed."""

    def __init__(self) -> None:
        self.values: dict[str, int] = {}
        self.frames: list[Frame] = []
        self.registry: Registry | None = None
        self.n_answered = 0

    def answer(self, n: int = 1000) -> None:
        """Up to n frames, those that come meanwhile included."""
        for _ in range(n):
            if not self.frames:
                return
            frame = self.frames.pop(0)
            self.n_answered += 1
            assert self.registry is not None
            self.registry.on_trainer({"id": frame["id"], **self.carried_out(frame)})

    def carried_out(self, frame: Frame) -> dict[str, Any]:
        id = frame["model_id"]
        if frame["op"] in ("create", "load"):
            folder = frame["folder"]
            self.values[id] = 0 if folder is None else json.loads((Path(folder) / "meta.json").read_text())["value"]
        elif frame["op"] == "step":
            if frame["params"] < 0:
                return {"error": "negative"}
            self.values[id] += frame["params"]
        elif frame["op"] == "pass":
            self.values[id] += len(frame["body"])
        elif frame["op"] == "save":
            Path(frame["folder"]).mkdir(parents=True, exist_ok=True)
            (Path(frame["folder"]) / "meta.json").write_text(json.dumps({"value": self.values[id]}))
        elif frame["op"] == "drop":
            self.values.pop(id, None)
        return {"result": str(self.values.get(id)).encode()}

    def die(self) -> None:
        """The process ends, with what it was told; another one starts."""
        self.values.clear()
        self.frames.clear()
        assert self.registry is not None
        self.registry.on_trainer_start()


def opened(folder: Path, *, save_every: int = 1000) -> tuple[Registry, Adder]:
    adder = Adder()
    adder.registry = Registry(folder, save_every=save_every, to_trainer=adder.frames.append)
    adder.registry.on_trainer_start()
    return adder.registry, adder


def model(registry: Registry, number: int = 0, *, session: str = "") -> str:
    session = session or registry.open_session({})
    id = f"{session}:train:{number}"
    registry.create(Model(id, session, "base", {"rank": 1}, 0.0), folder=None, optimizer=False, reply={})
    return id


def step(registry: Registry, id: str, seq: int, value: int | None = None) -> str:
    return registry.call(id, seq, {"op": "step", "params": seq if value is None else value})


def test_calls_are_carried_out_once_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    registry, adder = opened(tmp_path)
    id = model(registry)
    for seq in (3, 2, 4, 3):
        step(registry, id, seq)
    adder.answer()
    assert not registry.futures[f"{id}:2"].done.is_set()
    for _ in range(3):
        assert step(registry, id, 1) == f"{id}:1"
        adder.answer()
    assert [registry.futures[f"{id}:{seq}"].result for seq in (1, 2, 3, 4)] == [b"1", b"3", b"6", b"10"]
    assert adder.values[id] == 10


def test_checkpoint_that_was_loaded_may_be_deleted_or_overwritten(tmp_path: Path) -> None:
    registry, adder = opened(tmp_path)
    id, folder = model(registry), tmp_path / "kept"
    step(registry, id, 1, 5)
    registry.call(id, 2, {"op": "save", "folder": str(folder)})
    step(registry, id, 3, 70)
    registry.call(id, 4, {"op": "load", "folder": str(folder)})
    adder.answer()
    other = Model(f"{id}x", registry.runs[id].model.session_id, "base", {"rank": 1}, 0.0)
    registry.create(other, folder=folder, optimizer=False, reply={})
    adder.answer()
    (folder / "meta.json").write_text(json.dumps({"value": 900}))
    adder.die()
    adder.answer()
    assert adder.values == {id: 5, other.id: 5}


def test_models_take_turns(tmp_path: Path) -> None:
    registry, adder = opened(tmp_path)
    first, second = model(registry), model(registry)
    for seq in range(1, 4):
        step(registry, first, seq)
    step(registry, second, 1)
    seen = []
    while adder.frames:
        seen.append(adder.frames[0]["id"])
        adder.answer(1)
    assert seen.index(f"{second}:1") < seen.index(f"{first}:2")


@pytest.mark.parametrize("save_every", [1, 2, 1000])
@pytest.mark.parametrize("restart", ["trainer", "front"])
def test_state_is_the_same_after_the_end_of_a_process_at_any_point(
    tmp_path: Path, restart: str, save_every: int
) -> None:
    for n_answered in range(14):
        folder = tmp_path / f"{n_answered}"
        registry, adder = opened(folder, save_every=save_every)
        id = model(registry)
        for seq in range(1, 6):
            step(registry, id, seq, -1 if seq == 3 else seq)  # the third one fails
        adder.answer(n_answered)
        known = {key: future.result for key, future in registry.futures.items() if future.done.is_set()}
        if restart == "trainer":
            adder.die()
        else:
            registry, adder = opened(folder, save_every=save_every)
        step(registry, id, 5)  # its client asks again
        step(registry, id, 6)
        adder.answer()
        assert adder.values[id] == 1 + 2 + 4 + 5 + 6
        assert registry.futures[f"{id}:6"].result == b"18"
        assert registry.futures[f"{id}:3"].error == "negative"
        assert {key: registry.futures[key].result for key in known} == known


def test_call_that_ends_the_trainer_gets_an_error_and_the_other_models_go_on(tmp_path: Path) -> None:
    """It is the first one that the trainer has; what it has changed is gone with its process."""
    registry, adder = opened(tmp_path, save_every=2)
    id, other = model(registry), model(registry)
    adder.answer()
    step(registry, other, 1)
    adder.answer()
    step(registry, id, 1)
    step(registry, other, 2)
    for _ in range(3):
        while adder.frames[0]["id"] != f"{id}:1":
            adder.answer(1)
        adder.die()
    adder.answer()
    assert "ended the trainer 3 times" in registry.futures[f"{id}:1"].error
    for _ in range(2):
        step(registry, id, 2)
        adder.answer()
        assert (adder.values[id], adder.values[other]) == (2, 3)
        registry, adder = opened(tmp_path, save_every=2)
        adder.answer()


def test_full_disk_refuses_a_call_and_leaves_its_log_whole(tmp_path: Path) -> None:
    registry, adder = opened(tmp_path)
    id = model(registry)
    step(registry, id, 1)
    adder.answer()
    size = (tmp_path / "models" / id / "calls.log").stat().st_size
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, resource.RLIM_INFINITY))
        with pytest.raises(OSError, match="No space left"):
            step(registry, id, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert (tmp_path / "models" / id / "calls.log").stat().st_size == size
    step(registry, id, 2)
    registry, adder = opened(tmp_path)
    adder.answer()
    assert adder.values[id] == 3


def test_log_that_was_cut_off_goes_on_behind_its_last_whole_record(tmp_path: Path) -> None:
    registry, adder = opened(tmp_path)
    id = model(registry)
    step(registry, id, 1)
    step(registry, id, 2)
    log = tmp_path / "models" / id / "calls.log"
    log.write_bytes(log.read_bytes()[:-3])
    registry, adder = opened(tmp_path)
    step(registry, id, 2)
    registry, adder = opened(tmp_path)
    adder.answer()
    assert adder.values[id] == 3


def test_snapshot_drops_the_calls_before_it(tmp_path: Path) -> None:
    registry, adder = opened(tmp_path, save_every=10)
    id = model(registry)
    for seq in range(1, 320):
        step(registry, id, seq, 1)
        adder.answer()
    folder = tmp_path / "models" / id
    assert len(list(folder.glob("snapshot-*"))) == 1
    assert len(registry.runs[id].accepted) < 10
    assert len([key for key in registry.futures if key.startswith(id)]) < 300
    with pytest.raises(Rejected, match="no longer kept") as refusal:
        step(registry, id, 1)
    assert refusal.value.status == 410
    registry, adder = opened(tmp_path)
    adder.answer()
    assert adder.values[id] == 319
    assert adder.n_answered < 12


def test_model_that_never_steps_keeps_a_bounded_number_of_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its passes are in a snapshot, too: their gradients add up."""
    limit = 1 << 20
    monkeypatch.setattr("areal_serve.registry.SNAPSHOT_BYTES", limit)
    registry, adder = opened(tmp_path)
    id = model(registry)
    small, large = b"1", bytes(limit // 4)
    most = n_bytes = 0
    for seq in range(1, 300):
        body = large if seq % 100 < 9 else small
        registry.call(id, seq, {"op": "pass", "body": body, "forward_only": False})
        adder.answer()
        n_bytes += len(body)
        held = [len(frame.get("body", b"")) for frame in registry.runs[id].accepted.values()]
        most = max(most, sum(held))
        assert len(held) <= limit // CALL_BYTES
    assert most <= limit + len(large)
    assert (tmp_path / "models" / id / "calls.log").stat().st_size < 2 * limit
    registry, adder = opened(tmp_path)
    adder.answer()
    assert adder.values[id] == n_bytes


@pytest.mark.parametrize("restart", ["trainer", "front"])
def test_steps_before_a_restart_count_for_the_next_snapshot(tmp_path: Path, restart: str) -> None:
    registry, adder = opened(tmp_path, save_every=4)
    id = model(registry)
    for seq in range(1, 5):
        step(registry, id, seq)
        adder.answer()
        if restart == "trainer":
            adder.die()
        else:
            registry, adder = opened(tmp_path, save_every=4)
        adder.answer()
    step(registry, id, 5)
    adder.answer()
    assert [path.name for path in (tmp_path / "models" / id).glob("snapshot-*")] == ["snapshot-4"]
    assert adder.values[id] == 15


def test_session_that_ends_takes_its_models_along(tmp_path: Path) -> None:
    registry, adder = opened(tmp_path)
    session = registry.open_session({})
    id, other = model(registry, session=session), model(registry)
    adder.answer()
    step(registry, id, 2)
    registry.end_session(session, "finished")
    adder.answer()
    assert id not in adder.values
    assert other in adder.values
    with pytest.raises(Rejected, match="unknown model"):
        step(registry, id, 1)
    with pytest.raises(Rejected, match="has ended: finished") as refusal:
        registry.session(session)
    assert refusal.value.status == 410
    registry, adder = opened(tmp_path)
    assert list(registry.runs) == [other]


def test_silent_session_ends(tmp_path: Path) -> None:
    registry, adder = opened(tmp_path)
    id, other = model(registry), model(registry)
    registry.sessions[registry.runs[id].model.session_id]["seen"] -= 1000
    registry.end_silent_sessions()
    adder.answer()
    assert list(registry.runs) == [other]
    assert list(adder.values) == [other]
