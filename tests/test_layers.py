"""Which package may import which, read from the sources."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = ("areal_bus", "actors", "launch", "tools")
MAY = {
    "areal_bus": {"areal_bus"},
    "actors": {"areal_bus", "actors"},
    "launch": {"areal_bus", "actors", "launch"},
    "tools": {"areal_bus", "tools"},
}
CORE = ("errors", "messages", "effects", "rules", "gate", "ledger", "membership", "pushes", "staleness", "evaluation",
        "sharding", "speakers", "partials", "head")  # fmt: skip
TORCH_IN_BUS = {  # the weight push
    f"{name}.py"
    for name in (
        *("weights", "member", "push_words", "reports", "manifest", "snapshot"),
        *("checksum", "collective", "landing", "shared_memory"),
    )
}
MEASURING = ROOT / "tools" / "bench" / "ours"
SOURCES = sorted(path for package in OURS for path in (ROOT / package).rglob("*.py"))


def imports(path: Path) -> set[str]:
    """First parts of all modules that a file imports, wherever in it; those for types only left out."""
    found: set[str] = set()
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            pending += node.orelse
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(path.relative_to(ROOT).parts[0] if node.level else str(node.module).partition(".")[0])
        pending += ast.iter_child_nodes(node)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    measured = (
        {"actors"} if path.is_relative_to(MEASURING) else set()
    )  # in a process of their own, by what they measure
    assert imports(path) & set(OURS) <= MAY[package] | measured


@pytest.mark.parametrize("name", CORE)
def test_the_core_knows_only_itself_and_the_standard_library(name: str) -> None:
    path = ROOT / "areal_bus" / f"{name}.py"
    assert imports(path) <= {"areal_bus", *sys.stdlib_module_names}
    inside = {"bus", "wire", "journal", "config", "cross_checks", "settings", "weights", "snapshot"}
    world = {f"areal_bus.{module}" for module in inside} - {"areal_bus.journal"}  # event names are the core's, too
    modules = {node.module for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)}
    assert not modules & world


def test_torch_is_imported_by_actors_and_the_weight_push_only() -> None:
    torch = {path for path in SOURCES if "torch" in imports(path)}
    outside = {path for path in torch if path.relative_to(ROOT).parts[0] not in ("actors", "tools")}
    assert {path.name for path in outside} <= TORCH_IN_BUS


def test_mpi_is_imported_by_the_bootstrap_only() -> None:
    assert [path.name for path in SOURCES if "mpi4py" in imports(path)] == ["bootstrap.py"]


def test_the_launcher_and_its_children_that_need_none_bring_no_torch() -> None:
    code = "import sys, actors.start, actors.head, actors.reward, launch.prepare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_no_module_is_named_like_one_of_the_standard_library() -> None:
    names = {path.stem for path in SOURCES} - {"__init__", "__main__"}
    assert not names & set(sys.stdlib_module_names)
