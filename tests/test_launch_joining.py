"""Who may join a running job, and as whom."""

import json
import socket
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from actors.context import Context
from areal_bus.config import Config
from areal_bus.errors import ConfigError
from launch import joining
from launch.joining import INVITATION, guest, invite, join, read, seat


def template(run: Path, **changes: object) -> Context:
    context = Context(
        role="generator", index=0, incarnation=3, rank=4, job="j", head="tcp://127.0.0.1:4000", address="127.0.0.1",
        interface="lo", device="cpu", n_generators=2, n_rewards=1, n_learners=1, run_folder=str(run),
        config_folder=str(run), model_folder="", public_key="p" * 40, secret_key="s" * 40,
    )  # fmt: skip
    return replace(context, **changes)  # type: ignore[arg-type]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(Config.model_validate({"model": {"scratch": {}}}).model_dump_json())
    return folder


def test_an_invitation_is_for_its_owner_and_makes_a_generator(run: Path) -> None:
    invite(template(run))
    invite(template(run))  # a job that is resumed writes it anew
    path = run / INVITATION
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in run.iterdir() if file.name.startswith(".")] == []
    context = guest(read(path))
    assert (context.name, context.rank, context.interface) == ("generator-2.0", 6, "lo")
    assert context.secret_key == "s" * 40


def test_every_guest_is_another_generator(run: Path) -> None:
    invite(template(run))
    assert [guest(read(run / INVITATION)).index for _ in range(3)] == [2, 3, 4]
    assert seat(run, 9) == 9  # the job was resumed with more generators of its own


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"run_folder": "/not/there"}, "is not there"),
        ({"head": "ipc:///tmp/x"}, 'bus.transport = "tcp"'),
    ],
)
def test_who_cannot_join_is_told_why(
    run: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], sentence: str
) -> None:
    invite(template(run))
    about = read(run / INVITATION) | changes
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    with pytest.raises(ConfigError, match=sentence):
        guest(about)


def test_a_job_that_has_ended_is_not_joined(run: Path) -> None:
    invite(template(run))
    (run / "summary.json").write_text("{}")
    with pytest.raises(ConfigError, match="has ended"):
        join(str(run), None)


def test_fixed_shares_take_no_guest(run: Path) -> None:
    invite(template(run))
    settings = {"model": {"scratch": {}}, "rollout": {"max_head_offpolicyness": 0}}
    (run / "config.json").write_text(Config.model_validate(settings).model_dump_json())
    with pytest.raises(ConfigError, match="shares are fixed"):
        guest(read(run / INVITATION))


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"role": "generator"})])
def test_what_is_no_invitation_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "join.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"takes the join\.json of a running job"):
        read(path)


def test_an_endpoint_is_one_or_a_folder(run: Path) -> None:
    invite(template(run))
    with pytest.raises(ConfigError, match="is neither"):
        join("somewhere", str(run / INVITATION))


def test_a_guest_takes_the_first_gpu_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert joining.gpus() == [3]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert joining.gpus() == []
