"""The C sources of a folder as one shared library, compiled once a machine; knows none of its functions.

It is kept by sources, flags, compiler and processor in a cache folder of the user, so later processes only load it.
Without a compiler there is none, and torch's operations do the same, more slowly.
"""

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

# Sums in any order, as a vector needs; NaN and infinities stay what they are. Not -ffast-math: a library linked with it
# makes its whole process flush small numbers to 0.
FLAGS = ("-O3", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math",
         "-ffp-contract=fast", "-fPIC", "-shared")  # fmt: skip
WIDE = ("-march=native", "-mprefer-vector-width=512")
TIMEOUT_S = 120.0


@cache
def library(sources_in: Path) -> ctypes.CDLL | None:
    """The functions, or None where they cannot be compiled; says why once."""
    compiler = _compiler()
    if compiler is None:
        _say_there_is_none()
        return None
    with tempfile.TemporaryDirectory(prefix="areal-bus-") as passing:  # a library that is loaded may be gone
        folder, refused = _folder() or Path(passing), ""
        for flags in ((*FLAGS, *WIDE), (*FLAGS, "-march=native"), (*FLAGS, "-mcpu=native"), FLAGS):
            try:
                found = ctypes.CDLL(str(_compiled(sources(sources_in), compiler, flags, folder)))
            except subprocess.CalledProcessError as error:
                refused = refused or error.stderr.strip()
                continue
            except (OSError, subprocess.SubprocessError) as error:
                refused = str(error)
                break
            if refused:
                logger.info("C of {} was compiled with {} only: {}", sources_in.name, " ".join(flags), refused)
            return found
    logger.warning(
        "C of {} was not compiled, torch's operations are used, which are slower: {}", sources_in.name, refused
    )
    return None


def function(sources_in: Path, name: str, *kinds: type) -> Callable[..., None]:
    """One of the library's, which there must be, by the types of its arguments."""
    found = library(sources_in)
    if found is None:
        raise RuntimeError("a C function is asked for only where the library was compiled")
    call = found[name]
    call.argtypes, call.restype = kinds, None
    return call


def sources(sources_in: Path) -> list[Path]:
    """Headers first."""
    return [*sorted(sources_in.glob("*.h")), *sorted(sources_in.glob("*.c"))]


@cache
def _say_there_is_none() -> None:
    logger.info("no C compiler was found (cc, gcc, clang or $CC): torch's operations are used, which are slower")


def _compiler() -> list[str] | None:
    """As words of a command."""
    if chosen := os.environ.get("CC"):
        return shlex.split(chosen)
    found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    return None if found is None else [found]


def _compiled(files: list[Path], compiler: list[str], flags: tuple[str, ...], folder: Path) -> Path:
    """Where the library is, whole; compiled if it was not. Raises OSError or SubprocessError."""
    key = _key(files, compiler, flags)
    for path in folder.glob(f"kernels-{key}-*.so"):
        if path.stem.endswith(_digest(path)):
            return path
        path.unlink(missing_ok=True)  # what was cut short would end this process when it is loaded
    handle, name = tempfile.mkstemp(dir=folder, suffix=".so")
    try:
        given = [str(file) for file in files if file.suffix == ".c"]
        subprocess.run(
            [*compiler, *flags, "-o", name, *given, "-lm"],
            check=True, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S,
        )  # fmt: skip
        path = folder / f"kernels-{key}-{_digest(Path(name))}.so"
        os.replace(name, path)  # whoever is first; others put the same there
        return path
    finally:
        os.close(handle)
        Path(name).unlink(missing_ok=True)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _key(files: list[Path], compiler: list[str], flags: tuple[str, ...]) -> str:
    """Of all that the library depends on: a home directory may be shared by unlike machines."""
    said = [*compiler, *flags, platform.machine(), _processor()]
    parts = [text.encode() for text in said] + [file.read_bytes() for file in files]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _processor() -> str:
    """What it is and can."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def _folder() -> Path | None:
    """Of this user alone, for others could put code there; None where there is none that stays."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        path = base / "areal-bus"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = path.stat()
    except (OSError, RuntimeError):
        return None
    is_ours = state.st_uid == os.getuid() and not state.st_mode & 0o022
    return path if is_ours and os.access(path, os.W_OK) else None
