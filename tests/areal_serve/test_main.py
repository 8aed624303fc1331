import json
import os
import sys
from pathlib import Path

import pytest

from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError
from areal_bus.process.isolation import ROOT
from areal_bus.transport.web_server import HOST
from areal_serve.__main__ import checked_key, find_key, free_port, listening_address, main, new_run, supervise
from areal_serve.process import KEY
from launch.commands.main import load_settings
from launch.plan.network import interfaces
from launch.run.runs import Lock


def test_folder_of_a_server_holds_what_it_needs_to_resume(tmp_path: Path) -> None:
    config, file = load_settings(
        [str(ROOT / "configs" / "tiny.toml")], None, [f"run.folder={tmp_path}", "serve.save_every=7"]
    )
    run, second = new_run(config, file), new_run(config, file)
    assert [run.name, second.name] == ["tiny", "tiny-2"]
    again, origin = load_settings([], str(run), [])
    assert (again.serve.save_every, again.model, origin) == (7, config.model, file.resolve())
    assert json.loads((run / "scratch-model" / "config.json").read_text())["hidden_size"] == 128


def test_folder_that_a_server_uses_is_refused(tmp_path: Path) -> None:
    config, file = load_settings([str(ROOT / "configs" / "tiny.toml")], None, [f"run.folder={tmp_path}"])
    run = new_run(config, file)
    lock = Lock(run)
    with pytest.raises(ConfigError, match="one job at a time"):
        main(["--resume", str(run)])
    lock.release()


def test_several_learners_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unsupported topology\.learners = 2"):
        main([str(ROOT / "configs" / "tiny.toml"), "--set", "topology.learners=2", "--set", f"run.folder={tmp_path}"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("key", ["", "abc", "tml-short", "tml-käse-käse-käse"])
def test_key_that_the_sdk_does_not_take_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="must begin with tml-"):
        checked_key(key)


def test_server_listens_on_loopback_unless_an_interface_of_this_host_is_given() -> None:
    own = interfaces()
    assert listening_address("") == "127.0.0.1"
    assert listening_address("127.0.0.2") == "127.0.0.2"
    assert {name: listening_address(name) for name in own} == own
    for absent in ("0.0.0.0", "203.0.113.7", "no-such-interface"):
        with pytest.raises(ConfigError, match="must match a network interface of every host"):
            listening_address(absent)


def test_server_for_other_hosts_always_has_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert find_key({KEY: ""}, "127.0.0.1").startswith("tml-")
    assert not capsys.readouterr().err
    assert find_key({}, "192.0.2.7").startswith("tml-")
    assert "192.0.2.7 is served without TLS" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=f"invalid {KEY}"):
        find_key({KEY: ""}, "192.0.2.7")


def test_server_needs_two_processes() -> None:
    with pytest.raises(ConfigError, match="-np must be at least 2"):
        main(["configs/tiny.toml", "-np", "1"])


@pytest.mark.slow
def test_a_front_whose_worker_does_not_stay_up_is_not_started_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(Config().model_dump_json(), encoding="utf-8")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"max_position_embeddings": 64}', encoding="utf-8")
    words = [str(tmp_path), HOST, str(free_port(HOST)), "1", str(model), "name", "", str(os.getpid())]
    command = [sys.executable, "-P", "-m", "areal_serve.process", *words]
    assert supervise(command, {KEY: "tml-" + "x" * 20}) == 1
    said = capfd.readouterr().err
    assert " ended 3 times before it was ready" in said
    assert "the front ended with code" not in said
