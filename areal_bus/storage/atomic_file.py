"""Replaces a small text file atomically and durably: a reader, or a power cut, leaves the old text or the new one."""

import json
import os
from pathlib import Path
from typing import Any

from areal_bus.errors import ConfigError


def write_atomic(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Write a temporary file, sync it, rename it, sync the folder. Each file has one writer. Raises OSError."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # of a writer that was killed; its mode may be another
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync(path.parent)


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object; {} without the file. Raises ConfigError when the file holds anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"a run's files must be readable: {path}: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold one JSON object, not a {type(value).__name__}")
    return value


def sync(path: Path) -> None:
    """Make a file durable, or the renames and deletions in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
