"""What a process of ours sets up first: its import path (our packages before a user's), its limit of open files."""

import importlib.util
import os
import resource
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # the folder of our packages
PACKAGES = (
    "actors",
    "launch",
    "tools",
    "areal_cpu",
    "areal_math",
    "areal_code",
    "areal_convert",
    "areal_lab",
    "areal_serve",
)
CHILD = (sys.executable, "-P", "-m")  # a Python process without the working directory on its path


def isolate() -> list[str]:
    """Load our packages, and take the working directory that `python -m` put there off the path.

    Returns an error line for each name under which another package is already loaded, or for a working directory that
    was deleted.
    """
    try:
        os.getcwd()
    except OSError as error:
        return [f"error: missing working directory ({error.strerror}): change to a folder that exists"]
    wrong = [line for name in PACKAGES if (line := pin(name))]
    if not sys.flags.safe_path and sys.path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]
    return wrong


def pin(name: str) -> str:
    """Load the package of that name from ROOT. Returns an error line if another one is loaded."""
    folder = ROOT / name
    if name in sys.modules:
        found = [Path(place).resolve() for place in getattr(sys.modules[name], "__path__", [])]
        return "" if found == [folder] else f"error: package {name!r} must be {folder}: Python has loaded another"
    inside = [str(folder)]
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=inside)
    if spec is None or spec.loader is None:
        return f"error: package {name!r} must be {folder}: it cannot be loaded"
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return ""


def child_path(environ: Mapping[str, str] = os.environ) -> str:
    """PYTHONPATH of a child process: our packages first, then what the user has set."""
    return os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH")]))


def raise_file_limit(most: int) -> int:
    """Raise the soft limit to `most`, or as far as the hard limit allows. Returns the limit, at most `most`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return most
    wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted
