"""What all tests share: the same examples every time, and no gpu tests where there is no CUDA device.

`HYPOTHESIS_PROFILE=new` draws examples that are new each time. No example has a deadline: nothing here is timed.
"""

import os
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as every actor on CPU; before torch is imported

settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("new", derandomize=False, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for kind, name in (("sglang", "SGLang"), ("vllm", "vLLM")):
        if kind not in config.getoption("markexpr"):
            for item in items:
                if item.get_closest_marker(kind):
                    item.add_marker(pytest.mark.skip(reason=f"needs a real {name} server: make test-{kind}"))
    if not Path("/dev/nvidia0").exists():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))
