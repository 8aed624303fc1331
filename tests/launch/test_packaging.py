"""What the source distribution and the wheel hold, what their metadata says, and that the installed wheel trains."""

import os
import re
import shlex
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from areal_bus.process import commands
from tests.launch.test_bootstrap import MPIRUN

ROOT = Path(__file__).resolve().parents[2]
BUILD = "import sys; from setuptools import build_meta; print(build_meta.{}(sys.argv[1]))"
DATA = (".c", ".h", ".css", ".js", ".j2", ".html", ".toml", ".typed")  # of files that are no modules

pytestmark = pytest.mark.slow


class Built(NamedTuple):
    sources: set[str]  # names in the source distribution
    names: set[str]  # in the wheel
    metadata: bytes
    wheel: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """By the source distribution and by the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    (folder / "source").mkdir()
    archive = subprocess.run(
        ["tar", "--null", "--files-from=-", "--create"], cwd=ROOT, input=listed, check=True, capture_output=True
    )
    subprocess.run(["tar", "-x", "-C", str(folder / "source")], input=archive.stdout, check=True)

    def build(what: str, source: Path) -> Path:
        words = [sys.executable, "-c", BUILD.format(what), str(folder)]
        done = subprocess.run(words, cwd=source, check=True, capture_output=True, text=True)
        return folder / done.stdout.splitlines()[-1]

    with tarfile.open(build("build_sdist", folder / "source")) as sdist:
        sdist.extractall(folder, filter="data")
        (unpacked,) = {folder / name.split("/")[0] for name in sdist.getnames()}
        sources = {str(Path(name).relative_to(unpacked.name)) for name in sdist.getnames()}
    path = build("build_wheel", unpacked)
    with zipfile.ZipFile(path) as wheel:
        metadata = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        return Built(sources, set(wheel.namelist()), wheel.read(metadata), path)


def packages() -> set[str]:
    """Folders that pyproject.toml takes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return {pattern.rstrip("*") for pattern in project["tool"]["setuptools"]["packages"]["find"]["include"]}


def test_wheel_and_sdist_hold_every_module_and_data_file_of_our_packages(built: Built) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    wanted = {name for name in listed if name.split("/")[0] in packages() and name.endswith((".py", *DATA))}
    assert {"configs/gpus-8.toml", "configs/algorithms/dapo.toml", "tools/watch/page.html"} <= wanted
    assert any(name.endswith(".c") for name in wanted)
    assert wanted - built.names == wanted - built.sources == set()


def test_wheel_and_sdist_hold_nothing_but_our_packages(built: Built) -> None:
    for names in (built.names, built.sources):
        folders = {name.split("/")[0] for name in names if "/" in name}
        own = {name for name in folders if not re.fullmatch(r"areal_bus(-[\d.]+)?\.(dist|egg)-info", name)}
        assert own == packages()


def test_metadata_names_python_3_11_to_3_13_torch_and_every_extra(built: Built) -> None:
    metadata = message_from_bytes(built.metadata)
    python = SpecifierSet(metadata["Requires-Python"])
    assert [python.contains(f"3.{minor}") for minor in range(10, 15)] == [False, True, True, True, False]
    classified = [line for line in metadata.get_all("Classifier") or () if re.search(r":: 3\.\d+$", line)]
    assert [line.rpartition(" ")[2] for line in classified] == ["3.11", "3.12", "3.13"]
    needs = [Requirement(line) for line in metadata.get_all("Requires-Dist") or ()]
    torch = next(need for need in needs if need.name == "torch")
    assert [torch.specifier.contains(version) for version in ("2.10", "2.11", "2.13.0+cpu", "2.14")] == [
        False, True, True, False,
    ]  # fmt: skip
    extras = set(metadata.get_all("Provides-Extra") or ())
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    lines = re.findall(r"^- (`[^:]+`):", page, re.M)
    named = {name for line in lines for name in re.findall(r"`([a-z0-9-]+)`", line)}
    assert extras - named == {"test"}, "docs/install.md lists the extras that users take"
    assert metadata["Description-Content-Type"] == "text/markdown"


@pytest.fixture
def installed(built: Built, tmp_path: Path) -> Path:
    """The folder of scripts of an environment with the wheel, and the packages of this one behind it."""
    python = tmp_path / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    subprocess.run([*pip, "install", "--no-deps", "--no-index", str(built.wheel)], check=True, capture_output=True)
    where = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    ours = subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip()
    theirs = next(path for path in sys.path if Path(path).name == "site-packages" and (Path(path) / "torch").is_dir())
    (Path(ours) / "theirs.pth").write_text(f"{theirs}\n")
    return python.parent


@pytest.mark.skipif(MPIRUN is None, reason="there is no mpirun beside this Python or on the path")
def test_an_installed_wheel_trains_in_a_folder_with_packages_of_our_names(installed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "user"
    folder.mkdir()
    for name in ("actors", "launch", "tools"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise RuntimeError('the package of the user')")
    (folder / "random.py").write_text("raise RuntimeError('the module of the user')")
    left_out = ("PYTHONPATH", "VIRTUAL_ENV", *commands.AS_ROOT, *commands.MORE_RANKS_THAN_CORES)
    environ = {name: value for name, value in os.environ.items() if name not in left_out} | {
        "PATH": f"{Path(str(MPIRUN)).parent}{os.pathsep}/usr/bin{os.pathsep}/bin",
        "OMP_NUM_THREADS": "1",
    }

    def call(line: str) -> subprocess.CompletedProcess[str]:
        words = shlex.split(line)
        words[0] = str(installed / words[0]) if (installed / words[0]).exists() else words[0]
        done = subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    call("areal-bus init mine")
    short = "--set run.total_train_steps=2 --set learner.warmup.steps=5 --set data.batch_size=4 --set evaluate.limit=8"
    trained = call(f"areal-bus run mine/config.toml -np 3 {short}")
    assert re.match(r"(\w+=\S+ )+\S+/mpirun -np 3 \S+ -P -m areal_bus.launch mine/config.toml", trained.stderr)
    assert len(re.findall(r"^held-out accuracy (before|after): ", trained.stdout, re.M)) == 2
    shown = re.search(r"^run: \S+ +\((.+) shows what the model wrote\)$", trained.stdout, re.M)
    assert shown is not None, trained.stdout
    assert shown[1].startswith(f"{installed}/areal-bus samples {folder}/runs/starter")
    assert "reward" in call(shown[1]).stdout
    call("areal-bus audit")
    packaged = call("areal-bus run configs/tiny.toml --dry-run")
    assert packaged.stderr.startswith(
        f"configs/tiny.toml is not in this folder: using the installed {installed.parent}"
    )
    environ |= commands.AS_ROOT | commands.MORE_RANKS_THAN_CORES  # what the docs say to set
    call(f"{MPIRUN} -np 3 {installed}/python -m areal_bus.launch mine/config.toml --dry-run")
