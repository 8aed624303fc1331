"""Structure of the sources: their modules, imports and sizes.

A room (component) of a place is a folder or a module directly in it. Imports for types only do not count.
"""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PRODUCTION = ("areal_bus", "actors", "launch")  # the ring
PRODUCT = (*PRODUCTION, "tools")  # and what reads its runs
OWN = ("areal_cpu", "areal_math", "areal_code", "areal_convert")  # packages of their own that the product calls
PACKAGES = (*PRODUCT, *OWN, "areal_lab", "areal_serve", "benchmarks")
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


def cycle(graph: Graph) -> list[str]:
    """A chain of imports that goes round; none: an empty list."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


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


def measure(root: Path) -> dict[str, int]:
    """Files and lines of the packages, Python and C."""
    sources, figures = [*Sources(root).modules, *non_python(root)], {}
    for name, packages in (("product", PRODUCT), ("ring", PRODUCTION), ("own packages", OWN)):
        mine = [m for m in sources if m.path.parts[0] in packages]
        figures |= {f"{name}: files": len(mine), f"{name}: lines": sum(m.n_lines for m in mine)}
    return figures


def as_table(figures: Mapping[str, int]) -> str:
    """Figures for docs/architecture.md, rounded so that they do not change with every commit."""
    sizes = ["| | files | lines |", "|---|---|---|"]
    sizes += [
        f"| {name} | about {round(figures[f'{name}: files'], -1)} | about {round(figures[f'{name}: lines'], -3):,} |"
        for name in ("product", "ring", "own packages")
    ]
    return "\n".join(sizes)
