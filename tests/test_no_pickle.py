"""Nothing of ours pickles, nor calls what pickles inside: bytes from another process never become code."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path for package in ("areal_bus", "actors", "launch", "tools") for path in (ROOT / package).rglob("*.py")
)
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "multiprocessing"}
ATTRIBUTES = {
    "recv_pyobj", "send_pyobj",  # pyzmq
    "recv_serialized", "send_serialized",
    "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list",
    "recv_object_list",  # torch.distributed
    "allow_pickle",
}  # fmt: skip
LOWER_MPI = {  # mpi4py's calls on Python objects; on a communicator only the upper-case ones are ours
    "send", "recv", "isend", "irecv", "ssend", "bcast", "gather", "scatter", "allgather", "alltoall", "reduce",
    "allreduce", "sendrecv",
}  # fmt: skip


def faults(source: str, *, mpi: bool = False) -> list[str]:
    """What in a source pickles."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom):
            named = {str(node.module).partition(".")[0], *(alias.name for alias in node.names)}
            found += sorted(named & (MODULES | ATTRIBUTES))
        elif isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
            found.append(node.attr)
        elif isinstance(node, ast.Call):
            found += call_faults(node, mpi=mpi)
    return found


def call_faults(node: ast.Call, *, mpi: bool) -> list[str]:
    called = ast.unparse(node.func)
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    found = [called] if called == "torch.load" and given.get("weights_only") != "True" else []
    if given.get("allow_pickle", "False") != "False":
        found.append(f"{called}(allow_pickle=...)")
    if mpi and isinstance(node.func, ast.Attribute) and node.func.attr in LOWER_MPI:
        owner = ast.unparse(node.func.value)
        found += [called] if owner.endswith(("_world", "COMM_WORLD", "comm")) else []
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_source_of_ours_pickles(path: Path) -> None:
    text = path.read_text()
    assert faults(text, mpi="mpi4py" in text) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from multiprocessing import Queue",
        "socket.recv_pyobj()",
        "torch.load('x')",
        "torch.load('x', weights_only=False)",
        "dist.all_gather_object(a, b)",
        "numpy.load('x', allow_pickle=True)",
        "COMM_WORLD.bcast(x)",
    ],
)
def test_what_pickles_is_found(source: str) -> None:
    assert faults(source, mpi=True)


@pytest.mark.parametrize("source", ["torch.load('x', weights_only=True)", "COMM_WORLD.Bcast(x)", "bus.send('a', m)"])
def test_what_does_not_pickle_is_left_alone(source: str) -> None:
    assert not faults(source, mpi=True)
