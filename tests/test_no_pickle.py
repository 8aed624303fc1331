"""No module pickles or calls functions that pickle, so bytes from another process never become code."""

import ast
import pickle
from pathlib import Path

import pytest

from areal_bus.messages import Failure
from areal_bus.transport.bus import Bus
from areal_bus.wire import codec
from launch.run.bootstrap import EnvBootstrap
from tests.structure import PACKAGES
from tests.support.polling import wait_until
from tests.support.strangers import JOB, canary, dealer, next_of, say_raw, word

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
MODULES = {
    "pickle", "cPickle", "_pickle", "pickletools", "dill", "cloudpickle", "joblib", "shelve", "marshal",
    "multiprocessing", "ProcessPoolExecutor",
}  # fmt: skip
INSIDE = ("torch.distributed.checkpoint", "torch.distributed.rpc")  # the metadata of the one, the calls of the other
PLAIN = ("default_planner", "hf_storage", "metadata")  # of the one: plans of one rank, safetensors
ATTRIBUTES = {
    "recv_pyobj", "send_pyobj",  # pyzmq
    "recv_serialized", "send_serialized",
    "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list",
    "recv_object_list",  # torch.distributed
    "allow_pickle", "read_pickle", "to_pickle", "ProcessPoolExecutor",
}  # fmt: skip
LOWER_MPI = {  # mpi4py's calls on Python objects; on a communicator only the upper-case ones are ours
    "send", "recv", "isend", "irecv", "ssend", "bcast", "gather", "scatter", "allgather", "alltoall", "reduce",
    "allreduce", "sendrecv",
}  # fmt: skip


def faults(source: str, *, mpi: bool = False) -> list[str]:
    """Uses of pickle in a source."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if pickles(alias.name)]
        elif isinstance(node, ast.ImportFrom):
            found += [x.name for x in node.names if pickles(f"{node.module}.{x.name}") or x.name in ATTRIBUTES]
        elif isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
            found.append(node.attr)
        elif isinstance(node, ast.Call):
            found += call_faults(node, mpi=mpi)
    return found


def pickles(name: str) -> bool:
    """Whether a dotted name is a pickling module or inside one."""
    is_plain = name.removeprefix(f"{INSIDE[0]}.").startswith(PLAIN)
    return bool(MODULES & set(name.split("."))) or (name.startswith(INSIDE) and not is_plain)


def call_faults(node: ast.Call, *, mpi: bool) -> list[str]:
    called = ast.unparse(node.func)
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    found = [called] if called == "torch.load" and given.get("weights_only") != "True" else []
    if called.endswith(("import_module", "__import__")) and node.args:
        found += sorted({ast.unparse(node.args[0]).strip("'")} & MODULES)
    if given.get("allow_pickle", "False") != "False":
        found.append(f"{called}(allow_pickle=...)")
    if mpi and isinstance(node.func, ast.Attribute) and node.func.attr in LOWER_MPI:
        owner = ast.unparse(node.func.value)
        found += [called] if owner.endswith(("_world", "COMM_WORLD", "comm")) else []
    return found


def test_no_source_of_ours_pickles() -> None:
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in SOURCES}
    found = {name: faults(text, mpi="mpi4py" in text) for name, text in texts.items()}
    assert len(found) > 300
    assert {name: uses for name, uses in found.items() if uses} == {}


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
        "importlib.import_module('pickle')",
        "from concurrent.futures import ProcessPoolExecutor",
        "import torch.multiprocessing as mp",
        "from torch.distributed import checkpoint",
        "from torch.distributed.checkpoint import FileSystemReader",
        "from torch.distributed.checkpoint.state_dict_saver import save",
    ],
)
def test_uses_of_pickle_are_found(source: str) -> None:
    assert faults(source, mpi=True)


@pytest.mark.parametrize(
    "source",
    [
        "torch.load('x', weights_only=True)",
        "COMM_WORLD.Bcast(x)",
        "bus.send('a', m)",
        "import torch.utils.checkpoint",
        "from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader",
    ],
)
def test_code_without_pickle_is_accepted(source: str) -> None:
    assert not faults(source, mpi=True)


def test_the_canary_sings_when_it_is_unpickled(tmp_path: Path) -> None:
    pickle.loads(canary(tmp_path / "sung"))  # noqa: S301 - our own, and that it is dangerous is the point
    assert (tmp_path / "sung").exists()


def test_a_pickle_sent_to_every_listening_socket_is_never_loaded(tmp_path: Path) -> None:
    """The head's and a reward's ROUTER, and the rendezvous: raw, as a message, and in every place of a good one."""
    cage = tmp_path / "cage"
    cage.mkdir()
    bird = canary(cage / "sung")
    head = Bus("head", job=JOB, listen="tcp://127.0.0.1:0")
    reward = Bus("reward-0.0", job=JOB, listen=f"ipc://{tmp_path}/reward")
    reward.connect("head", head.endpoint)
    meeting = EnvBootstrap(f"ipc://{tmp_path}/meeting", 0.5, {"RANK": "0", "WORLD_SIZE": "1"})
    good = codec.encode(word(1), job=JOB)
    for bus in (head, reward):
        with dealer(bus.endpoint) as stranger, dealer(bus.endpoint, bird[:250]) as nameless:
            for frames in ([bird], [b"", bird], [*good, bird], [bird, *good]):
                stranger.send(*frames)
                nameless.send(*frames)
            wait_until(lambda bus=bus: bus.refused.total() >= 8, "all messages are refused")  # type: ignore[misc]
            say_raw(bus.endpoint, [bird])  # after those: whoever comes next may get the number of a file that is closed
            wait_until(lambda bus=bus: bus.refused.total() >= 9, "all of it is refused")  # type: ignore[misc]
    with dealer(f"ipc://{tmp_path}/meeting") as stranger:
        stranger.send(bird)
        say_raw(f"ipc://{tmp_path}/meeting", [bird])
        assert meeting.allgather(b"zero") == [b"zero"]
    meeting.close()
    reward.send("head", Failure("x"))
    assert next_of(head) == ("reward-0.0", Failure("x"))
    assert list(cage.iterdir()) == []
    reward.close(0)
    head.close(0)
