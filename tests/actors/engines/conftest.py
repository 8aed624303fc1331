"""Warnings that engines log."""

from collections.abc import Iterator

import pytest
from loguru import logger


@pytest.fixture
def warned() -> Iterator[list[str]]:
    """The text of each warning."""
    lines: list[str] = []
    number = logger.add(lambda line: lines.append(str(line)), level="WARNING", format="{message}")
    yield lines
    logger.remove(number)
