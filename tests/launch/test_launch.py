"""The command line: refused input with its error line and exit code, and the dry run."""

import ipaddress
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from areal_bus.config.loader import load
from areal_bus.config.sections import BusConfig
from areal_bus.core.parts.split import Split
from areal_bus.errors import ConfigError
from areal_bus.process.commands import script
from areal_bus.transport.bus import Bus
from launch.commands.main import main
from launch.memory.shape import KNOWN_SHAPES
from launch.plan.network import (
    HostFacts,
    choose_interfaces,
    describe,
    local_facts,
    lock_name,
    made_folder,
    named_apart,
    open_endpoint,
    transport,
)
from launch.plan.topology import plan
from launch.run.bootstrap import RANK_VARIABLES, EnvBootstrap
from launch.run.rank import actor_contexts, report_error
from launch.run.runs import make_run_folder

ROOT = Path(__file__).parents[2]
SMALL = """
[model.scratch]
[data]
task = "reverse"
prompt = "{question}>"
chat_template = false
[gconfig]
n_samples = 2
max_new_tokens = 16
[reward]
function = "reverse"
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small config in a working directory of its own, as rank 0 of 4."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for names in RANK_VARIABLES:
        for name in names:
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    (tmp_path / "small.toml").write_text(SMALL)
    return tmp_path / "small.toml"


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The error line of the command."""
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1
    return output.err


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["smal.toml"], "did you mean small.toml?"),
        ([], "give a config file"),
        (["small.toml", "--dryrun"], "error: unknown option --dryrun: the nearest is --dry-run\n"),
        (["small.toml", "--bogus"], "unknown option --bogus: settings are given as --set SECTION.KEY=VALUE"),
        (["small.toml", "--set", "actor.lr=1", "more.toml"], "one after the other: more.toml is apart from the others"),
        (["small.toml", "--resume"], "argument --resume: expected one argument"),
        (["small.toml", "--set", "actor.lrr=1"], "the nearest is actor.lr"),
        (["small.toml", "--set", "topology.rewards=5"], "too few ranks: 4 started, and the topology needs at least 7"),
        (["small.toml", "--set", "topology.tensor_parallel=2"], "computes on one GPU: topology.tensor_parallel is 2"),
    ],
)
@pytest.mark.usefixtures("file")
def test_a_start_with_wrong_words_or_settings_is_refused_with_one_line(
    words: list[str], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fault in refused(capsys, *words)


def test_a_start_without_mpirun_is_refused_with_the_command_to_run(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert f"run {script()} run {file} -np 3" in refused(capsys, str(file))


def test_only_rank_0_prints_an_error_in_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_error(2, ConfigError("x"), wait_s=0.0) == 2
    assert capsys.readouterr().err == ""


def test_a_run_folder_is_never_overwritten(tmp_path: Path) -> None:
    folders = [make_run_folder(tmp_path, "demo") for _ in range(3)]
    assert [folder.name for folder in folders] == ["demo", "demo-2", "demo-3"]
    assert (tmp_path / "latest").resolve() == folders[-1]


def test_on_one_host_the_head_listens_in_a_private_folder_that_is_removed() -> None:
    endpoint = open_endpoint(BusConfig(), [local_facts()], "127.0.0.1")
    folder = Path(endpoint.folder)
    assert endpoint.url == f"ipc://{folder}/head.sock"
    assert folder.stat().st_mode & 0o777 == 0o700
    endpoint.remove()
    assert not folder.exists()


def test_a_folder_of_a_killed_process_is_removed_at_the_next_start(monkeypatch: pytest.MonkeyPatch) -> None:
    make = "from launch.plan.network import made_folder; print(made_folder('areal-bus-serve-'), flush=True); input()"
    with tempfile.TemporaryDirectory(prefix="f-", dir="/tmp") as parent:  # short enough for sockets
        monkeypatch.setattr(tempfile, "tempdir", parent)
        run = Path(parent) / "areal-bus-run"  # of a job, with the job's own lock
        run.mkdir()
        (run / "lock").touch()
        for name, lock in ("waits", lock_name()), ("other-host", "sockets-another-kernel.lock"):
            (Path(parent) / f"areal-bus-{name}").mkdir()
            os.mkfifo(Path(parent) / f"areal-bus-{name}" / lock)  # an opening must not wait for its writer
        kept = {run, Path(parent) / "areal-bus-other-host"}
        words, inside = [sys.executable, "-c", make], os.environ | {"TMPDIR": parent}
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=inside) as maker:
            assert maker.stdout is not None
            folder, ours = Path(maker.stdout.readline().strip()), made_folder("areal-bus-")
            found = set(Path(parent).iterdir())
            maker.kill()
        assert found == kept | {folder, ours}
        made = made_folder("areal-bus-")
        assert set(Path(parent).iterdir()) == kept | {ours, made}


def host(name: str, machine: str = "", **interfaces: str) -> HostFacts:
    """`interfaces`: ADDRESS/PREFIX by name."""
    found = {name: ipaddress.ip_interface(text) for name, text in interfaces.items()}
    return HostFacts(
        name,
        {name: str(one.ip) for name, one in found.items()},
        machine=machine,
        masks={name: str(one.netmask) for name, one in found.items()},
    )


def test_the_only_network_that_all_hosts_share_is_taken() -> None:
    docker = "172.17.0.1/16"  # the same address on every host
    a = host("a", lo="127.0.0.1/8", eth0="10.0.0.1/24", docker0=docker, flannel="10.9.0.0/32", ib0="10.1.0.1/16")
    b = host("b", lo="127.0.0.1/8", ens3="10.0.0.2/24", docker0=docker, flannel="10.9.1.0/32")
    assert choose_interfaces("", [a, a, b]) == [("eth0", "10.0.0.1"), ("eth0", "10.0.0.1"), ("ens3", "10.0.0.2")]
    assert describe(("eth0", "10.0.0.1"), [a, b]) == "eth0 (10.0.0.0/24), the only network that all hosts share"


def test_machines_with_one_host_name_are_several_hosts() -> None:
    facts = [host("node", boot, eth0=f"10.0.0.{i}/24") for i, boot in enumerate(("A", "B", "A", "C"), 1)]
    assert [fact.host for fact in named_apart(facts)] == ["node", "node (2)", "node", "node (3)"]
    assert transport(BusConfig(), named_apart(facts)) == "tcp"
    here = [local_facts(), local_facts()]
    assert named_apart(here) == here
    assert here[0].machine
    assert here[0].masks["lo"] == "255.0.0.0"


@pytest.mark.parametrize(
    ("setting", "fault"),
    [
        ("launch.rendezvous=tcp://[::1]:5000", "launch.rendezvous is 'tcp://\\[::1\\]:5000'"),
        ("bus.interface=fe80::1", "bus.interface is 'fe80::1'"),
        ("bus.interface=2001:db8::/32", "bus.interface is '2001:db8::/32'"),
    ],
)
def test_ipv6_is_refused_by_the_settings(file: Path, setting: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=f"IPv6 is not supported: {fault}"):
        load(file, [setting], {})


@pytest.mark.parametrize("folder", ["d" * 30, "d" * 70, "目" * 57])
def test_sockets_fit_into_any_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    parent = tmp_path / folder
    parent.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(parent))
    endpoint = open_endpoint(BusConfig(), [local_facts()], "127.0.0.1")
    for url in (endpoint.url, f"ipc://{endpoint.folder}/reward-4095.999"):
        Bus("head", job="j", listen=url).close()
    endpoint.remove()
    environ = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": str(parent)}
    alone = EnvBootstrap("", 5, environ)
    assert alone.allgather(b"x") == [b"x"]
    alone.close()
    with pytest.raises(ConfigError, match=r"launch.rendezvous is too long: .* at most 107 bytes: .* has 108"):
        EnvBootstrap(f"ipc:///{'d' * 107}", 5, environ)


def test_ranks_on_several_hosts_need_an_interface_that_they_share() -> None:
    a = HostFacts("a", {"lo": "127.0.0.1", "eth0": "10.0.0.1", "ib0": "10.1.0.1"})
    b = HostFacts("b", {"lo": "127.0.0.1", "eth0": "10.0.0.2"})
    c = HostFacts("c", a.addresses | {"eth0": "10.0.0.3", "ib0": "10.1.0.3"})
    for others, names in (([b], "eth0"), ([c], "eth0, ib0"), ([HostFacts("d", {"x": "10.2.0.2"})], "none")):
        with pytest.raises(ConfigError, match=rf"set bus\.interface to one that they share \({names}\)"):
            choose_interfaces("", [a, *others])
    with pytest.raises(ConfigError, match="'ib0' is not on b"):
        choose_interfaces("ib0", [a, b])
    with pytest.raises(ConfigError, match="cannot use a loopback address"):
        choose_interfaces("lo", [a, b])
    with pytest.raises(ConfigError, match='set "tcp"'):
        open_endpoint(BusConfig(transport="ipc"), [a, b], "10.0.0.1")
    assert (
        choose_interfaces("eth0", [a, b])
        == choose_interfaces("10.0.0.0/24", [a, b])
        == [("eth0", "10.0.0.1"), ("eth0", "10.0.0.2")]
    )
    assert choose_interfaces("", [a, a]) == [("lo", "127.0.0.1")] * 2


def test_each_actor_gets_its_context(file: Path) -> None:
    config = load(file, ["topology.gpus_per_host=2", "topology.reward=beside"], {})
    places = plan(config.topology, ["a", "a"])
    start = {"job": "j", "head": "ipc:///x", "run_folder": "/r", "model_folder": "/m"} | {"incarnation": 3}
    told = [c for p in places for c in actor_contexts(config, file, p, Split(1, 1), ("lo", "127.0.0.1"), start)]
    assert [(c.name, c.rank, c.device) for c in told] == [
        ("head-0.3", 0, "cpu"),
        ("learner-0.3", 0, "cuda"),
        ("generator-0.3", 1, "cuda"),
        ("reward-0.3", 1, "cpu"),
    ]


def test_parameters_are_counted_as_published() -> None:
    sizes = {name.partition("/")[2]: shape.n_parameters / 1e9 for name, shape in KNOWN_SHAPES.items()}
    distilled = {"Qwen-1.5B": 1.777, "Qwen-7B": 7.615, "Qwen-14B": 14.77, "Qwen-32B": 32.76, "Llama-8B": 8.030}
    published = {f"DeepSeek-R1-Distill-{name}": size for name, size in distilled.items()}
    published |= {"Qwen2.5-0.5B-Instruct": 0.494, "Qwen2.5-1.5B-Instruct": 1.544, "Qwen2.5-7B-Instruct": 7.615}
    assert sizes == pytest.approx(published, rel=2e-3)


def test_foreign_packages_with_our_names_are_no_obstacle_unless_loaded(tmp_path: Path) -> None:
    for name in ("actors", "launch", "tools"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('the foreign package')")
    environ = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    line = [sys.executable, "-m", "areal_bus.launch", "tiny", "--dry-run"]
    done = subprocess.run(line, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == f"tiny is not in this folder: using the installed {ROOT / 'configs/tiny.toml'}\n"
    (tmp_path / "tools" / "__init__.py").write_text("")
    code = "import sys, tools; from areal_bus.launch import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == f"error: package 'tools' must be {ROOT / 'tools'}: Python has loaded another\n"
