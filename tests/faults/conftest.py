"""Adds to the report of a failed fault test: the output of its rings, their journals and the wait graph."""

from collections.abc import Generator

import pytest

from tests.faults.ring import Ring


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for name, value in getattr(item, "funcargs", {}).items():
            if isinstance(value, Ring):
                report.sections.append((f"{name}: a ring", value.report()))
    return report
