"""`python -m tests.structure [ROOT]`: measures the structure of the sources (files, folders, imports, sizes).

A room (component) of a place is a folder or a module directly in it. An arrow (dependency) is an import from one room
to another of the same place. Floors (depth) count the rooms on the longest chain of arrows. Imports
for types only do not count. ROOT may be any checkout, so that two can be compared.
"""

import argparse
import ast
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

PRODUCTION = ("areal_bus", "actors", "launch")  # the ring
PRODUCT = (*PRODUCTION, "tools")  # and what reads its runs
OWN = ("areal_cpu", "areal_math", "areal_code", "areal_convert")  # packages of their own that the product calls
PACKAGES = (*PRODUCT, *OWN, "areal_lab", "areal_serve", "benchmarks")
PLACES = (*PRODUCT, "areal_bus.core", "actors.learner", "actors.rewards")
SMALL = 80  # lines
Graph = Mapping[str, set[str]]


@dataclass(frozen=True)
class Module:
    """One Python file, by its path below the root."""

    path: Path
    text: str
    tree: ast.Module = field(repr=False)

    @property
    def name(self) -> str:
        parts = self.path.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def room(self) -> str:
        """Its folder; for a module directly in its package the module itself."""
        return ".".join(self.path.parent.parts) if len(self.path.parts) > 2 else self.name

    @property
    def n_lines(self) -> int:
        return self.text.count("\n")

    def imported(self) -> Iterator[tuple[str, str]]:
        """(module, name) of every import, also inside functions, without those for types only."""
        pending: list[ast.AST] = [self.tree]
        while pending:
            node = pending.pop()
            if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
                pending += node.orelse
                continue
            if isinstance(node, ast.Import):
                yield from ((alias.name, "") for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from ((node.module or "", alias.name) for alias in node.names)
            pending += ast.iter_child_nodes(node)

    def top_level(self) -> Iterator[tuple[str, str]]:
        """`imported`, limited to imports at module level."""
        for node in self.tree.body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                yield from Module(self.path, "", ast.Module([node], [])).imported()


class Sources:
    """All modules of our packages in one checkout."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules = [
            Module(path.relative_to(root), text := path.read_text(encoding="utf-8"), ast.parse(text))
            for package in PACKAGES
            for path in sorted((root / package).rglob("*.py"))
        ]

    @cached_property
    def by_name(self) -> dict[str, Module]:
        return {module.name: module for module in self.modules}

    def ours(self, pairs: Iterable[tuple[str, str]]) -> set[str]:
        """Modules of ours among imports."""
        names = {f"{module}.{name}" if f"{module}.{name}" in self.by_name else module for module, name in pairs}
        return names & self.by_name.keys()

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """Module -> the modules of ours that it imports anywhere."""
        return {module.name: self.ours(module.imported()) - {module.name} for module in self.modules}

    def imports_at_once(self) -> dict[str, set[str]]:
        """Module -> the modules of ours that it imports at module level."""
        return {module.name: self.ours(module.top_level()) - {module.name} for module in self.modules}

    def rooms(self, place: str) -> dict[str, set[str]]:
        """Room of a place (areal_bus, areal_bus.core) -> the other rooms that it imports from, without `__init__`."""
        depth = place.count(".") + 2
        inside = {m.name: ".".join(m.name.split(".")[:depth]) for m in self.modules if m.name.startswith(f"{place}.")}
        graph: dict[str, set[str]] = {room: set() for room in inside.values()}
        for name, there in self.imports.items():
            if name in inside:
                graph[inside[name]] |= {inside[other] for other in there if other in inside} - {inside[name]}
        return graph

    def folders(self) -> dict[str, set[str]]:
        """`rooms` over all packages. A module next to folders of modules is a room of its own."""
        divided = {m.path.parent.parent for m in self.modules}
        room_of = {m.name: m.name if m.path.parent in divided else m.room for m in self.modules}
        graph: dict[str, set[str]] = {room: set() for room in room_of.values()}
        for name, there in self.imports.items():
            graph[room_of[name]] |= {room_of[other] for other in there} - {room_of[name]}
        return graph

    def classes(self) -> dict[str, list[str]]:
        """Public class name -> the modules of production code that define one."""
        found: dict[str, list[str]] = defaultdict(list)
        for module in self.modules:
            if module.path.parts[0] not in PRODUCTION:
                continue
            for node in module.tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append(module.name)
        return dict(found)

    def repeated_classes(self) -> dict[str, list[str]]:
        return {name: places for name, places in sorted(self.classes().items()) if len(places) > 1}


def cycles(graph: Graph) -> list[list[str]]:
    """Strongly connected parts of more than one node (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph.get(node, set())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            part = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(part) > 1:
                found.append(sorted(part))

    sys.setrecursionlimit(10_000)
    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def floors(graph: Graph) -> int:
    """Nodes on the longest chain; a cycle is one node."""
    of: dict[str, int] = {}

    def height(node: str, above: frozenset[str]) -> int:
        if node not in of:
            below = [height(other, above | {node}) for other in graph[node] if other not in above | {node}]
            of[node] = 1 + max(below, default=0)
        return of[node]

    return max((height(node, frozenset()) for node in sorted(graph)), default=0)


def functions(modules: Iterable[Module]) -> Iterator[tuple[int, str]]:
    """(lines, where) of every function and method."""
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield (node.end_lineno or node.lineno) - node.lineno + 1, f"{module.path}:{node.lineno} {node.name}"


def constructors(modules: Iterable[Module]) -> Iterator[tuple[int, str]]:
    """(parameters, where) of every explicit constructor, without `self`."""
    for module in modules:
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.ClassDef):
                continue
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
                    given = inner.args
                    n = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs) - 1
                    yield n, f"{module.path}:{inner.lineno} {node.name}"


def non_python(root: Path) -> list[Module]:
    return [
        Module(path.relative_to(root), path.read_text(encoding="utf-8"), ast.Module([], []))
        for package in PACKAGES
        for path in sorted((root / package).rglob("*"))
        if path.suffix in (".c", ".h", ".sh") and path.is_file()
    ]


def measure(root: Path) -> dict[str, Any]:
    """All figures of one checkout."""
    sources = Sources(root)
    others = non_python(root)
    real = [module for module in sources.modules if module.text.strip()]
    sized = [module for module in real if module.path.name != "__init__.py"]
    figures: dict[str, Any] = {
        "source files": len(sources.modules) + len(others),
        "lines": sum(m.n_lines for m in [*sources.modules, *others]),
    }
    for name, packages in (("product", PRODUCT), ("ring", PRODUCTION), ("own packages", OWN)):
        mine = [m for m in [*sources.modules, *others] if m.path.parts[0] in packages]
        figures[f"{name}: files"] = len(mine)
        figures[f"{name}: lines"] = sum(m.n_lines for m in mine)
    for place in PLACES:
        rooms = sources.rooms(place)
        figures[f"{place}: rooms"] = len(rooms)
        figures[f"{place}: floors"] = floors(rooms)
        figures[f"{place}: arrows"] = sum(map(len, rooms.values()))
    n_files = Counter(str(m.path.parent) for m in sources.modules if m.path.name != "__init__.py")
    folder, n_most = n_files.most_common(1)[0]
    largest = max(sized, key=lambda module: module.n_lines)
    n_function, function = max(functions(real))
    n_constructor, constructor = max(constructors(real))
    figures |= {
        "largest folder": f"{n_most} ({folder})",
        f"modules under {SMALL} lines": sum(module.n_lines < SMALL for module in sized),
        "largest module": f"{largest.n_lines} ({largest.path})",
        "largest function": f"{n_function} ({function})",
        "most constructor parameters": f"{n_constructor} ({constructor})",
        "class names with two meanings": len(sources.repeated_classes()),
        "import cycles": len(cycles(sources.imports)),
        "folder cycles": len(cycles(sources.folders())),
    }
    return figures


def as_table(figures: Mapping[str, Any]) -> str:
    """Figures for docs/architecture.md, rounded so that they do not change with every commit."""
    sizes = ["| | files | lines |", "|---|---|---|"]
    sizes += [
        f"| {name} | about {round(figures[f'{name}: files'], -1)} | about {round(figures[f'{name}: lines'], -3):,} |"
        for name in ("product", "ring", "own packages")
    ]
    return "\n".join(sizes)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser("python -m tests.structure", description=(__doc__ or "").partition("\n")[0])
    p.add_argument("root", nargs="?", type=Path, default=Path(__file__).parents[1], help="a checkout (this one)")
    p.add_argument("--json", action="store_true", help="one JSON object")
    p.add_argument("--names", action="store_true", help="list repeated class names and cycles, too")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    figures = measure(args.root)
    if args.json:
        print(json.dumps(figures))
        return 0
    width = max(map(len, figures))
    print("\n".join(f"{name.ljust(width)}  {value}" for name, value in figures.items()))
    if args.names:
        sources = Sources(args.root)
        print("\n".join(f"{name}: {', '.join(places)}" for name, places in sources.repeated_classes().items()))
        for kind, graph in (("import", sources.imports), ("folder", sources.folders())):
            print("\n".join(f"{kind} cycle: {', '.join(part)}" for part in cycles(graph)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
