"""Which folder may import which, read from the sources."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.structure import PACKAGES, Sources, constructors, cycle

ROOT = Path(__file__).parents[1]
MAY = {  # package -> what it imports of ours
    "areal_bus": {"areal_bus"},
    "actors": {"areal_bus", "areal_cpu", "areal_math", "actors"},
    "launch": {"areal_bus", "actors", "launch"},
    "tools": {"areal_bus", "tools"},
    "areal_cpu": {"areal_bus", "areal_cpu"},
    "areal_math": {"areal_math"},
    "areal_code": {"areal_bus", "actors", "areal_code"},  # the reward "code", found by its name
    "areal_convert": {"areal_bus", "tools", "areal_convert"},
    "areal_lab": {"areal_bus", "actors", "launch", "tools", "areal_lab"},
    "areal_serve": {"areal_bus", "actors", "launch", "tools", "areal_serve"},
    "benchmarks": {"areal_bus", "areal_math", "areal_code", "actors", "launch", "tools", "areal_lab", "benchmarks"},
}
OFFLINE = "tools.offline"  # programs that train, sample and score without a ring: of tools, these import actors
TORCH = ("areal_bus.weights", "areal_cpu", "actors.engines", "actors.generator", "actors.learner", "actors.models",
         "actors.rewards.functions.model", "actors.runtime.torch_profiler",
         "tools.offline", "areal_lab.loops", "areal_lab.ring", "areal_serve", "benchmarks")  # fmt: skip
SHARED = {
    "messages",
    "errors",
    "authorization",
    "foreign_text",
    "sample_fields",
    "trajectories",
}  # modules beside these folders
BUS = {  # folder of areal_bus -> the other ones that it imports; each may import the modules of SHARED
    "core": set[str](),
    "wire": set[str](),
    "transport": {"wire", "process"},
    "native": set[str](),
    "config": {"process"},
    "weights": {"config", "native", "process"},
    "storage": {"core", "wire"},
    "process": set[str](),
}
MOST_PARAMETERS = 6  # of a constructor
MOST_FILES = 15  # of a folder, without its __init__.py
CPU = ("areal_cpu", "actors.learner", "actors.models", "actors.engines.builtin")


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources(ROOT)


def within(name: str, *folders: str) -> bool:
    return any(name == folder or name.startswith(f"{folder}.") for folder in folders)


def test_packages_import_downwards(sources: Sources) -> None:
    for name, there in sources.imports.items():
        package = name.partition(".")[0]
        allowed = MAY[package] | ({"actors"} if within(name, OFFLINE) else set())
        wrong = {other for other in there if other.partition(".")[0] not in allowed}
        assert not wrong, f"{name} must not import {wrong}"


def test_the_core_imports_the_standard_library_messages_and_errors(sources: Sources) -> None:
    core = [module for module in sources.modules if within(module.name, "areal_bus.core")]
    assert core
    for module in core:
        ours = {name for name in sources.ours(module.imported()) if not within(name, "areal_bus.core")}
        allowed = {
            "areal_bus",
            *(f"areal_bus.{name}" for name in ("authorization", "messages", "errors", "foreign_text", "trajectories")),
        }
        assert ours <= allowed, module.name
        packages = {name.partition(".")[0] for name, _ in module.imported()}
        assert packages <= {"areal_bus", *sys.stdlib_module_names}, module.name


def test_folders_of_the_bus_import_downwards(sources: Sources) -> None:
    rooms = sources.rooms("areal_bus")
    for folder, below in BUS.items():
        there = {room.partition(".")[2] for room in rooms[f"areal_bus.{folder}"]}
        assert there <= below | SHARED, folder


def test_torch_is_imported_where_it_belongs(sources: Sources) -> None:
    torch = {m.name for m in sources.modules if any(name.partition(".")[0] == "torch" for name, _ in m.imported())}
    assert {name for name in torch if not within(name, *TORCH)} == set()


def test_the_fast_paths_of_a_cpu_are_imported_by_learner_models_and_builtin_engine_only(sources: Sources) -> None:
    users = {name for name, there in sources.imports.items() if any(within(other, "areal_cpu") for other in there)}
    assert {name for name in users if not within(name, *CPU)} == set()


def test_mpi_is_imported_by_the_bootstrap_only(sources: Sources) -> None:
    mpi = [m.name for m in sources.modules if any(name.partition(".")[0] == "mpi4py" for name, _ in m.imported())]
    assert mpi == ["launch.run.bootstrap"]


def test_no_imports_go_round(sources: Sources) -> None:
    assert cycle(sources.imports) == []
    assert cycle(sources.folders()) == []
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})


def test_a_folder_holds_at_most_fifteen_files(sources: Sources) -> None:
    n_files = Counter(m.path.parent for m in sources.modules if m.path.name != "__init__.py")
    assert {str(folder): n for folder, n in n_files.items() if n > MOST_FILES} == {}


def test_a_name_means_one_class(sources: Sources) -> None:
    assert sources.repeated_classes() == {}


def test_constructors_take_at_most_six_parameters(sources: Sources) -> None:
    assert [where for n, where in constructors(sources.modules) if n > MOST_PARAMETERS] == []


def test_the_launcher_and_its_children_that_need_none_bring_no_torch() -> None:
    names = "actors.runtime.start, actors.head.shell, actors.rewards.actor, launch.run.prepare"
    code = f"import sys, {names}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_no_module_is_named_like_one_of_the_standard_library(sources: Sources) -> None:
    names = {module.path.stem for module in sources.modules} - {"__init__", "__main__"}
    assert not names & set(sys.stdlib_module_names)
    assert tuple(MAY) == PACKAGES


def test_the_docs_name_files_that_exist() -> None:
    places = [ROOT, *(ROOT / package for package in (*PACKAGES, "tests"))]
    for page in sorted((ROOT / "docs").glob("*.md")):
        named = re.findall(r"`([\w./-]+/[\w./-]+\.(?:py|toml|c|sh))`", page.read_text(encoding="utf-8"))
        gone = [name for name in named if not any((place / name).exists() for place in places)]
        assert gone == [], page.name
