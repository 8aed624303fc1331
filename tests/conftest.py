"""What all tests share: tests marked gpu are skipped where there is no CUDA device."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not Path("/dev/nvidia0").exists():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))
