"""Memory that other processes can open: its handle, its limits, and that nothing of it is left."""

import contextlib
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_bus.errors import PushFailed
from areal_bus.weights.shared_memory import Handle, SharedMemory, cuda_handle, open_memory

CPU = torch.device("cpu")
READS = """
import json, sys, torch
from areal_bus.weights.shared_memory import open_memory
data = open_memory(json.loads(sys.argv[1]), 5, torch.device("cpu")).data
print(data.tolist())
data.zero_()
"""
CUDA = cuda_handle((0, b"\3c" + b"m" * 64, 4096, 512, b"/torch_17_4711_0", 3, b"", True))


def descriptors() -> set[str]:
    """Of memory that lives in no folder."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile, by another thread
            if "areal-bus-weights" in os.readlink(link):
                found.add(str(link))
    return found


@pytest.mark.slow
def test_another_process_reads_shared_memory_and_its_writes_stay_private() -> None:
    memory = SharedMemory(5, CPU)
    memory.data.copy_(torch.arange(5, dtype=torch.uint8))
    words = [sys.executable, "-c", READS, json.dumps(memory.handle)]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "[0, 1, 2, 3, 4]\n"
    assert memory.data.tolist() == [0, 1, 2, 3, 4]


def test_released_shared_memory_does_not_count_as_the_readers_memory() -> None:
    memory = SharedMemory(64 << 20, CPU)
    memory.data.fill_(3)
    opened, before = open_memory(memory.handle, 64 << 20, CPU), resident()
    assert int(opened.data.sum()) == 3 * (64 << 20)
    assert resident() - before > 60 << 20
    opened.release(5, (64 << 20) - 5)
    assert resident() - before < 4 << 20
    assert opened.data[100].item() == 3, "it is still there"


def resident() -> int:
    """Bytes of this process in memory that several may map."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    shared = next(line for line in status.splitlines() if line.startswith("RssShmem"))
    return int(shared.split()[1]) << 10


def test_it_is_the_users_alone_has_no_name_and_keeps_its_size() -> None:
    memory = SharedMemory(3, CPU)
    number = memory.handle["fd"]
    assert os.fstat(number).st_mode & 0o777 == 0o600
    assert os.fstat(number).st_nlink == 0
    assert not os.get_inheritable(number)
    for change in (1, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(number, change)
    with pytest.raises(PermissionError):
        fcntl.fcntl(number, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_it_goes_with_its_last_user() -> None:
    before = descriptors()
    memory = SharedMemory(3, CPU)
    handle, data = memory.handle, memory.data
    assert descriptors() - before
    del memory, data
    assert descriptors() <= before
    with pytest.raises(PushFailed, match="cannot open the shared memory of learner 0"):
        open_memory(handle, 3, CPU)


def test_a_descriptor_that_is_something_else_by_now_is_refused(tmp_path: Path) -> None:
    memory = SharedMemory(3, CPU)
    with (tmp_path / "file").open("w+b") as file:
        file.write(b"abc")
        file.flush()
        with pytest.raises(PushFailed, match="is a different file now"):
            open_memory(memory.handle | {"fd": file.fileno()}, 3, CPU)
    with pytest.raises(PushFailed, match="shared memory too small: 3 bytes, and the manifest has 4"):
        open_memory(memory.handle, 4, CPU)
    with pytest.raises(PushFailed, match="is a different file now"):
        open_memory(memory.handle | {"size": 4}, 4, CPU)


@given(
    st.dictionaries(
        st.sampled_from(["kind", "pid", "fd", "inode", "size", "memory", "counter", "counter_offset", "offset"]),
        st.none() | st.booleans() | st.integers(-2, 1 << 70) | st.text(max_size=5) | st.sampled_from(["host", "cuda"]),
    )
)
def test_an_invalid_shared_memory_handle_is_refused(handle: Handle) -> None:
    with pytest.raises(PushFailed):
        open_memory(handle, 1, CPU)


@pytest.mark.parametrize(
    "change",
    [
        {"memory": "AAAA"},
        {"memory": "not base64!"},
        {"counter": "/etc/passwd"},
        {"counter": "/torch_1/../x"},
        {"counter_offset": 10_000},
        {"counter_offset": -1},
        {"size": True},
        {"kind": "another"},
        {},  # no CUDA device to open it on
    ],
)
def test_a_cuda_handle_is_checked_before_torch_sees_it(change: dict[str, Any]) -> None:
    with pytest.raises(PushFailed, match="missing or invalid field"):
        open_memory(CUDA | change, 1, CPU)


def test_a_cuda_handle_is_plain_json_without_the_event() -> None:
    assert json.loads(json.dumps(CUDA)) == CUDA
    assert CUDA["size"] == 4096
    assert CUDA["offset"] == 512
    assert sorted(CUDA) == ["counter", "counter_offset", "kind", "memory", "offset", "size"]


def test_memory_of_nothing_can_be_opened() -> None:
    assert len(open_memory(SharedMemory(0, CPU).handle, 0, CPU).data) == 0
