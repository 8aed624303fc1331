"""Elastic join: which generators may join a running job, and with which index."""

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from actors.models.scratch import write_scratch_folder
from actors.runtime.context import Context
from areal_bus.config.sections import Config, ScratchConfig
from areal_bus.errors import ConfigError
from launch.commands.main import main
from launch.plan.environment import actor_environment
from launch.plan.network import local_facts, toward
from launch.run import elastic
from launch.run.elastic import (
    INVITATION,
    check_endpoint,
    claim_index,
    guest_context,
    join_job,
    load_invitation,
    parse_invitation,
    write_invitation,
)
from launch.run.runs import Lock, is_locked

ROOT = Path(__file__).parents[2]


def template(run: Path, **changes: object) -> Context:
    context = Context(
        role="generator", index=0, incarnation=3, rank=4, job="j", head="tcp://127.0.0.1:4000", address="127.0.0.1",
        interface="lo", device="cpu", n_generators=2, n_rewards=1, n_learners=1, run_folder=str(run),
        config_folder=str(run), model_folder="", public_key="p" * 40, secret_key="s" * 40,
    )  # fmt: skip
    return replace(context, **changes)  # type: ignore[arg-type]


@pytest.fixture
def dead_run(tmp_path: Path) -> Path:
    """The run of a killed job."""
    folder = tmp_path / "run"
    folder.mkdir()
    settings = {"model": {"scratch": {}}, "data": {"task": "reverse", "chat_template": False}}
    (folder / "config.json").write_text(Config.model_validate(settings).model_dump_json())
    return folder


@pytest.fixture
def run(dead_run: Path) -> Iterator[Path]:
    """The run of a running job."""
    lock = Lock(dead_run)
    yield dead_run
    lock.release()


def test_an_invitation_is_readable_by_its_owner_only_and_gives_a_generators_context(run: Path) -> None:
    write_invitation(template(run))
    write_invitation(replace(template(run), lease_secret="head secret"))  # a resumed job writes a new one
    path = run / INVITATION
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in run.iterdir() if file.name.startswith(".")] == []
    context = guest_context(parse_invitation(path))
    assert (context.name, context.rank, context.interface) == ("generator-2.0", 6, "lo")
    assert context.secret_key == "s" * 40
    assert "head secret" not in path.read_text()  # 32, 20


def test_a_guest_uses_the_interface_that_leads_to_the_head() -> None:
    facts = local_facts()
    assert toward("tcp://127.0.0.1:5", facts) == ("lo", "127.0.0.1")
    for name, address in facts.addresses.items():
        assert toward(f"tcp://{address}:5", facts)[1] in {address, "127.0.0.1"}, name
    with pytest.raises(ConfigError, match=r"no network of this host leads to the head: tcp://255\.255\.255\.255:5: "):
        toward("tcp://255.255.255.255:5", facts)


def test_each_guest_gets_its_own_index(run: Path) -> None:
    write_invitation(template(run))
    assert [guest_context(parse_invitation(run / INVITATION)).index for _ in range(3)] == [2, 3, 4]
    assert claim_index(run, 9) == 9  # the job was resumed with more generators of its own


def test_a_machine_of_the_same_host_name_is_another_machine(dead_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clones and pods share host names: the lock of the job is not seen there, nor are its sockets."""
    write_invitation(template(dead_run))
    about = parse_invitation(dead_run / INVITATION)
    monkeypatch.setattr("launch.run.elastic.machine", lambda: "another machine")
    assert guest_context(dict(about)).index == 2
    for changes, why in (
        ({"head": "ipc:///tmp/x"}, r'bus\.transport = "tcp"'),
        ({"run_folder": "/no"}, "missing run folder"),
    ):
        with pytest.raises(ConfigError, match=why):
            guest_context(about | changes)


AT_ETA_0 = Config.model_validate({"model": {"scratch": {}}, "rollout": {"max_head_offpolicyness": 0}})


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("summary.json", "{}", "has ended"),
        ("config.json", "{", r"invalid settings in .*config\.json, of another version"),
        ("config.json", AT_ETA_0.model_dump_json(), "share is fixed"),
    ],
)
def test_a_job_that_has_ended_or_takes_no_guests_is_not_joined(run: Path, name: str, text: str, fault: str) -> None:
    write_invitation(template(run))
    (run / name).write_text(text)
    with pytest.raises(ConfigError, match=fault):
        join_job(str(run), None)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("host", None, "host is missing"),
        ("host", 3, "host must be of type str: got int"),
        ("n_generators", True, "n_generators must be of type int: got bool"),
        ("rank", -1, "rank must not be negative: got -1"),
        ("is_guest", 1, "is_guest must be of type bool: got int"),
        ("keys", 5, "keys must be an object of strings: got int"),
        ("keys", {"head-0": 5}, "keys must be an object of strings: got dict"),
        ("more", 5, "more is an unknown field"),
    ],
)
def test_a_damaged_invitation_is_refused_by_file_and_field(
    run: Path, capsys: pytest.CaptureFixture[str], field: str, value: object, message: str
) -> None:
    """None: the field is missing."""
    write_invitation(template(run))
    path = run / INVITATION
    changed = json.loads(path.read_text()) | {field: value}
    path.write_text(json.dumps({name: known for name, known in changed.items() if known is not None}))
    output = refused(capsys, "--join", str(run))
    assert output == f"--join takes the unchanged join.json of a running job: {path}: {message}\n"
    assert not (run / "guests").exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"role": "generator"})])
def test_a_file_that_is_no_invitation_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "join.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"takes the (unchanged )?join\.json of a running job"):
        parse_invitation(path)


def test_join_takes_an_endpoint_or_the_folder_of_a_run_with_an_invitation(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"join.json of a running job: .*run/join.json: No such file or directory"):
        load_invitation(str(run), None)
    write_invitation(template(run))
    with pytest.raises(ConfigError, match="'somewhere' is not a folder"):
        join_job("somewhere", str(run / INVITATION))
    with pytest.raises(ConfigError, match=r"--join takes the folder of a run: .* has no config.json"):
        load_invitation(str(run.parent), None)
    assert load_invitation(str(run), None)["head"] == "tcp://127.0.0.1:4000"
    assert load_invitation("tcp://127.0.0.1:5000", str(run / INVITATION))["head"] == "tcp://127.0.0.1:5000"


FORMS = 'the head\'s endpoint must be tcp://HOST:PORT or ipc:///PATH \\("head" in RUN/join.json\\): got '


@pytest.mark.parametrize(
    ("url", "why"),
    [
        *(
            (url, FORMS)
            for url in ("http://a:1", "tcp://a", "tcp://a:0", "tcp://a:65536", "tcp://*:5", "ipc://x", "://")
        ),
        *(
            (f"tcp://{host}:5", "a guest needs the address of one host")
            for host in ("0.0.0.0", "0", "[::]", "[0:0::0]")
        ),
        ("tcp://[::1]:5000", r"IPv6 is not supported: tcp://\[::1\]:5000; give the IPv4 address"),
        ("ipc:///nowhere", "no head listens at ipc:///nowhere"),
        (f"ipc://{__file__}", f"no head listens at ipc://{__file__}"),
    ],
)
def test_an_endpoint_of_no_head_is_refused_with_the_fault(url: str, why: str) -> None:
    check_endpoint("tcp://localhost:5000")
    with pytest.raises(ConfigError, match=why):
        check_endpoint(url)


def test_a_job_that_was_killed_is_not_joined_on_its_host(dead_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_invitation(template(dead_run))
    for _ in range(2):
        assert is_locked(dead_run) is False
        with pytest.raises(
            ConfigError, match=rf"the job of {dead_run} is not running: .* \(--resume {dead_run} continues it"
        ):
            join_job(str(dead_run), None)
        Lock(dead_run).release()
    assert not (dead_run / "guests").exists()
    monkeypatch.setattr(elastic, "is_locked", lambda _: None)  # without file locks a guest tries to join
    assert guest_context(parse_invitation(dead_run / INVITATION)).is_guest


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The error line of the command."""
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert (output.out, output.err.count("\n")) == ("", 1)
    return output.err.removeprefix("error: ")


JOIN = ["--join", "runs/latest"]


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--join", "tcp://127.0.0.1:4000"], "needs --key, the invitation in the run's folder: --key RUN/join.json"),
        ([*JOIN, "c.toml"], "takes all settings from the job that it joins: leave out CONFIG.toml\n"),
        ([*JOIN, "--set", "actor.lr=1", "--dry-run"], "leave out --set, --dry-run\n"),
        ([*JOIN, "--resume", "auto"], "leave out --resume\n"),
        ([*JOIN, "--resume", ""], "leave out --resume\n"),
        (["c.toml", "--resume", ""], '--resume takes the folder of a run, or auto: got ""\n'),
        (["--join", ""], "--join takes the folder of a running job"),
        (["--explain", ""], "--explain takes a setting"),
        (["--explain", "actor.lr", "--dry-run"], "leave out --dry-run\n"),
    ],
)
def test_options_that_are_empty_or_would_be_ignored_are_refused(
    words: list[str], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fault in refused(capsys, *words)


@pytest.mark.slow
def test_a_guest_without_a_head_leaves_at_once_on_sigterm(run: Path) -> None:
    """The real command: both the process and its actor end."""
    listening = socket.socket()  # accepts connections, but is no head
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    write_scratch_folder(run / "model", ScratchConfig())
    head = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
    write_invitation(template(run, head=head, model_folder=str(run / "model"), public_key="", secret_key=""))
    line = [sys.executable, "-m", "areal_bus.launch", "--join", str(run)]
    pipe = subprocess.PIPE
    with listening, subprocess.Popen(line, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            assert re.fullmatch(r"joins .*run as generator-2; .*\n", process.stdout.readline())
            listening.accept()[0].close()  # the actor has connected
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert "asked to leave, with no head there" in (run / "journal" / "generator-2.0.jsonl").read_text()


def test_a_guest_takes_the_first_gpu_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert elastic.first_visible_gpu() == [0]
    assert actor_environment(os.environ, gpus=[0], cpu=False)["CUDA_VISIBLE_DEVICES"] == "3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert elastic.first_visible_gpu() == []
