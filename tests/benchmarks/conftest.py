"""Tests of the benches begin at the full pace: `--quick` is a state of the process."""

from collections.abc import Iterator

import pytest

from benchmarks.harness import pace


@pytest.fixture(autouse=True)
def _full_pace() -> Iterator[None]:
    yield
    pace.begin(quick=False)
