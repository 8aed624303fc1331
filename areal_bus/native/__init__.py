"""Compiles a folder's C sources into one cached shared library. Without a compiler torch operations are used."""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from loguru import logger

# Allows reordered sums, which vectorisation needs; NaN and infinities keep their meaning. Not -ffast-math: linking with
# it makes the whole process flush denormals to 0.
FLAGS = ("-O3", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math",
         "-ffp-contract=fast", "-fPIC", "-shared")  # fmt: skip
WIDE = ("-march=native", "-mprefer-vector-width=512")
TIMEOUT_S = 120.0


@cache
def library(sources_in: Path) -> ctypes.CDLL | None:
    """The library, or None if it cannot be compiled; the reason is logged once."""
    command = compiler()
    if command is None:
        _log_no_compiler()
        return None
    with tempfile.TemporaryDirectory(prefix="areal-bus-") as temporary:  # a loaded library may be deleted
        folder, refused = _folder() or Path(temporary), ""
        for flags in ((*FLAGS, *WIDE), (*FLAGS, "-march=native"), (*FLAGS, "-mcpu=native"), FLAGS):
            try:
                found = ctypes.CDLL(str(_compiled(sources(sources_in), command, flags, folder)))
            except subprocess.CalledProcessError as error:
                refused = refused or error.stderr.strip()
                continue
            except (OSError, subprocess.SubprocessError) as error:
                refused = str(error)
                break
            if refused:
                used = " ".join(flags)
                logger.info("the C sources of {} were compiled with {} only: {}", sources_in.name, used, refused)
            return found
    what = "the C sources of {} could not be compiled; slower torch operations are used: {}"
    logger.warning(what, sources_in.name, refused)
    return None


def function(sources_in: Path, name: str, *kinds: type) -> Callable[..., None]:
    """A function of the library, with these argument types. The library must exist."""
    found = library(sources_in)
    if found is None:
        raise RuntimeError("a C function needs a compiled library")
    call = found[name]
    call.argtypes, call.restype = kinds, None
    return call


def sources(sources_in: Path) -> list[Path]:
    """C sources of the folder, headers first."""
    return [*sorted(sources_in.glob("*.h")), *sorted(sources_in.glob("*.c"))]


@cache
def _log_no_compiler() -> None:
    logger.info("C compiler not found (cc, gcc, clang or $CC): slower torch operations are used")


def compiler() -> list[str] | None:
    if chosen := os.environ.get("CC"):
        return shlex.split(chosen)
    found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    return None if found is None else [found]


def _compiled(files: list[Path], compiler: list[str], flags: tuple[str, ...], folder: Path) -> Path:
    """Path of the library; compiles it if needed. Raises OSError or SubprocessError."""
    key = _key(files, compiler, flags)
    for path in folder.glob(f"kernels-{key}-*.so"):
        if path.stem.endswith(_digest(path)):
            return path
        path.unlink(missing_ok=True)  # loading an incomplete library would crash this process
    handle, name = tempfile.mkstemp(dir=folder, suffix=".so")
    try:
        given = [str(file) for file in files if file.suffix == ".c"]
        subprocess.run(
            [*compiler, *flags, "-o", name, *given, "-lm"],
            check=True, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S,
            encoding="utf-8",
        )  # fmt: skip
        path = folder / f"kernels-{key}-{_digest(Path(name))}.so"
        os.replace(name, path)  # concurrent processes write the same file
        return path
    finally:
        os.close(handle)
        Path(name).unlink(missing_ok=True)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _key(files: list[Path], compiler: list[str], flags: tuple[str, ...]) -> str:
    """Cache key. Includes the processor, because different machines may share a home directory."""
    inputs = [*compiler, *flags, platform.machine(), _processor()]
    parts = [text.encode() for text in inputs] + [file.read_bytes() for file in files]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def _folder() -> Path | None:
    """Cache folder. Only this user may write to it, because its code is loaded. None if there is none."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        path = base / "areal-bus"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = path.stat()
    except (OSError, RuntimeError):
        return None
    is_ours = state.st_uid == os.getuid() and not state.st_mode & 0o022
    return path if is_ours and os.access(path, os.W_OK) else None
