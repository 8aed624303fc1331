"""Shared pytest set-up: fixed hypothesis examples, skips for absent hardware and servers, fixtures.

`HYPOTHESIS_PROFILE=new` draws new examples in each run. No example has a deadline.
"""

import gc
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from loguru import logger

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as every actor on CPU; before torch is imported

settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("new", derandomize=False, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


MOST_LEFT_OPEN = 64  # descriptors that a test file may leave: groups of gloo with a stuck operation stay until they end
LONGEST = "tests/test_tiny.py"  # the real ring of `make test`


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    start_long_files_first(items)
    for kind, name in (
        ("sglang", "a real SGLang server"),
        ("vllm", "a real vLLM server"),
        ("tinker", "the tinker SDK"),
    ):
        if kind not in config.getoption("markexpr"):
            for item in items:
                if item.get_closest_marker(kind):
                    item.add_marker(pytest.mark.skip(reason=f"needs {name}: make test-{kind}"))
    if not Path("/dev/nvidia0").exists():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


def start_long_files_first(items: list[pytest.Item]) -> None:
    """Files with the most slow tests come first, so that no worker of xdist waits long for the other one at the end."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: (not item.nodeid.startswith(LONGEST), -slow[item.path]))  # stable: files stay whole


@pytest.fixture(scope="module", autouse=True)
def no_stale_mpirun_sessions() -> None:
    """Removes what a killed mpirun leaves in its session folder ompi.PID: a later mpirun with this process id would
    find its rendezvous file there and end with "The PMIx server's listener thread failed to start".
    """
    for folder in Path(tempfile.gettempdir()).glob("ompi.*"):
        if not Path("/proc", folder.suffix[1:]).exists():
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def few_descriptors_are_left() -> Iterator[None]:
    """A worker of xdist runs a hundred files: what each leaves open adds up, and select takes 1,023 descriptors."""
    before = n_descriptors()
    yield
    if n_descriptors() - before > MOST_LEFT_OPEN:
        gc.collect()  # owners in cycles
        left = n_descriptors() - before
        assert left <= MOST_LEFT_OPEN, f"this file leaves {left} descriptors open: close journals, sockets and groups"


def n_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def as_kernels_run() -> Iterator[None]:
    """One thread, as kernels require. Uninitialised memory holds NaN, so that reading it fails the test."""
    import torch

    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before[1])
    torch.set_num_threads(before[0])


@pytest.fixture
def warned() -> Iterator[list[str]]:
    """The text of each warning that is logged."""
    lines: list[str] = []
    number = logger.add(lambda line: lines.append(str(line)), level="WARNING", format="{message}")
    yield lines
    logger.remove(number)
