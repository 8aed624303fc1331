"""Folders for Unix sockets, whose paths are short: at most 107 bytes, whatever TMPDIR is."""

import os
import tempfile
from pathlib import Path

MAX_PATH_BYTES = 107  # Linux: sun_path without its final zero
NAME_BYTES = 40  # of a socket in such a folder: generator-4095.1000000
FALL_BACK = "/tmp"


def temporary_parent(name_bytes: int) -> Path:
    """TMPDIR, or /tmp where a folder with a name of `name_bytes` would have too long a path for its sockets.

    The same on all ranks of a host that have the same TMPDIR.
    """
    parent = tempfile.gettempdir()
    longest = len(os.fsencode(parent)) + 1 + name_bytes + 1 + NAME_BYTES
    return Path(parent if longest <= MAX_PATH_BYTES else FALL_BACK)


def made_folder(prefix: str) -> Path:
    """A new folder for sockets, mode 0700. Raises OSError."""
    parent = temporary_parent(len(prefix) + 8)  # mkdtemp appends 8 characters
    return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))


def too_long(url: str) -> str:
    """Why no socket can have this address; "" if one can."""
    n_bytes = len(os.fsencode(url.removeprefix("ipc://")))
    if not url.startswith("ipc://") or n_bytes <= MAX_PATH_BYTES:
        return ""
    return f"the path of a socket may have at most {MAX_PATH_BYTES} bytes: {url} has {n_bytes}"
