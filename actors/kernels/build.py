"""The C sources beside this file as one shared library, compiled once a machine; knows none of its functions.

It is kept by sources, flags, compiler and processor in a cache folder of the user, so later processes only load it.
Without a compiler there is none, and torch's operations do the same, more slowly.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from loguru import logger

# Sums in any order, as a vector needs; NaN and infinities stay what they are. Not -ffast-math: a library linked with it
# makes its whole process flush small numbers to 0.
FLAGS = ("-O3", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math",
         "-ffp-contract=fast", "-fPIC", "-shared")  # fmt: skip
WIDE = ("-march=native", "-mprefer-vector-width=512")
TIMEOUT_S = 120.0
HERE = Path(__file__).parent


@cache
def library() -> ctypes.CDLL | None:
    """The functions, or None where they cannot be compiled; says why once."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        logger.info("no C compiler was found (cc, gcc, clang or $CC): torch's operations are used, which are slower")
        return None
    for flags in ((*FLAGS, *WIDE), (*FLAGS, "-march=native"), (*FLAGS, "-mcpu=native"), FLAGS):
        why = ""
        try:
            return ctypes.CDLL(str(_compiled(compiler, flags)))
        except (OSError, subprocess.SubprocessError) as error:
            why = getattr(error, "stderr", None) or str(error)
    logger.warning("the C kernels were not compiled, torch's operations are used, which are slower: {}", why.strip())
    return None


def applies(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels compute such tensors: float32 on a CPU, with one thread a process, as torch is told."""
    is_theirs = dtype is torch.float32 and device.type == "cpu" and torch.get_num_threads() == 1
    return is_theirs and library() is not None


def function(name: str, *kinds: type) -> Callable[..., None]:
    """One of the library's, which there must be, by the types of its arguments."""
    found = library()
    if found is None:
        raise RuntimeError("a C kernel is asked for only where the library was compiled")
    call = found[name]
    call.argtypes, call.restype = kinds, None
    return call


def sources() -> list[Path]:
    """Headers first."""
    return [*sorted(HERE.glob("*.h")), *sorted(HERE.glob("*.c"))]


def _compiled(compiler: str, flags: tuple[str, ...]) -> Path:
    """Where the library is, compiled if it was not. Raises OSError or SubprocessError."""
    path = _folder() / f"kernels-{_key(compiler, flags)}.so"
    if not path.exists():
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".so")
        os.close(handle)
        files = [str(file) for file in sources() if file.suffix == ".c"]
        try:
            subprocess.run(
                [*compiler.split(), *flags, "-o", name, *files, "-lm"],
                check=True, capture_output=True, text=True, timeout=TIMEOUT_S,
            )  # fmt: skip
            os.replace(name, path)  # whoever is first; others put the same there
        finally:
            Path(name).unlink(missing_ok=True)
    return path


def _key(compiler: str, flags: tuple[str, ...]) -> str:
    """Of all that the library depends on: a home directory may be shared by unlike machines."""
    said = [compiler, *flags, platform.machine(), _processor()]
    parts = [text.encode() for text in said] + [file.read_bytes() for file in sources()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _processor() -> str:
    """What it is and can."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def _folder() -> Path:
    """Of this user alone; a new one where there can be none that stays."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    path = Path(base) / "areal-bus"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.stat().st_uid == os.getuid() and os.access(path, os.W_OK):
            return path
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="areal-bus-"))
