"""Fixtures of tests of tools."""

import tarfile
from pathlib import Path

import pytest

PROFILING = Path(__file__).parents[2] / "docs" / "profiling"


@pytest.fixture(scope="session")
def journals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The three real runs of docs/profiling.md: generation-bound, learner-bound, push-bound. Not to be changed."""
    folder = tmp_path_factory.mktemp("journals")
    for packed in PROFILING.glob("*.tar.gz"):
        with tarfile.open(packed) as archive:
            archive.extractall(folder, filter="data")
    return folder
