"""What the source distribution and the wheel hold, and what their metadata says."""

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[2]
BUILD = "import sys; from setuptools import build_meta; print(build_meta.{}(sys.argv[1]))"
DATA = (".c", ".h", ".css", ".js", ".j2", ".html", ".toml", ".typed")  # of files that are no modules

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], set[str], bytes]:
    """Names in the source distribution and in the wheel that is built from it, and the wheel's metadata."""
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
    with zipfile.ZipFile(build("build_wheel", unpacked)) as wheel:
        metadata = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        return sources, set(wheel.namelist()), wheel.read(metadata)


def packages() -> set[str]:
    """Folders that pyproject.toml takes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return {pattern.rstrip("*") for pattern in project["tool"]["setuptools"]["packages"]["find"]["include"]}


def test_wheel_and_sdist_hold_every_module_and_data_file_of_our_packages(
    built: tuple[set[str], set[str], bytes],
) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    wanted = {name for name in listed if name.split("/")[0] in packages() and name.endswith((".py", *DATA))}
    assert {"configs/gpus-8.toml", "configs/algorithms/dapo.toml", "tools/watch/page.html"} <= wanted
    assert any(name.endswith(".c") for name in wanted)
    sources, wheel, _ = built
    assert wanted - wheel == wanted - sources == set()


def test_wheel_and_sdist_hold_nothing_but_our_packages(built: tuple[set[str], set[str], bytes]) -> None:
    sources, wheel, _ = built
    for names in (wheel, sources):
        folders = {name.split("/")[0] for name in names if "/" in name}
        own = {name for name in folders if not re.fullmatch(r"areal_bus(-[\d.]+)?\.(dist|egg)-info", name)}
        assert own == packages()


def test_metadata_names_python_3_11_to_3_13_torch_and_every_extra(built: tuple[set[str], set[str], bytes]) -> None:
    metadata = message_from_bytes(built[2])
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
    assert extras - named == {"test", "perfetto"}, "docs/install.md lists the extras that users take"
    assert metadata["Description-Content-Type"] == "text/markdown"
