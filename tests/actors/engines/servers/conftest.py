"""A model's folder for the tests of engines over servers."""

from pathlib import Path

import pytest

from tests.servers.engines import model_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a small model without weights."""
    return model_folder(tmp_path_factory.mktemp("servers") / "model")
