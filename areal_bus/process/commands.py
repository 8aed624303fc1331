"""Names commands as they can be typed in this environment: `areal-bus samples`, or `python -m tools.samples`.

`python -m tools.samples` needs a folder without a package `tools` of its own. The script works in any folder.
"""

import functools
import os
import re
import shutil
import sys
from pathlib import Path

SCRIPT = "areal-bus"
STARTED_BY = "AREALBUS_STARTED_BY"  # environment of a job: the script that started it
MODULE = re.compile(r"python -m tools\.(\w+)(?![\w.])")


@functools.cache
def script() -> str:
    """How to call the script `areal-bus` of this Python: by name, or by path when PATH has no such; "" if not there."""
    beside, named = Path(sys.executable).parent / SCRIPT, shutil.which(SCRIPT)
    if not beside.is_file():
        return SCRIPT if named else ""
    return SCRIPT if named and Path(named).samefile(beside) else str(beside)


def as_here(text: str) -> str:
    """The text with each `python -m tools.NAME` as it can be typed here."""
    return MODULE.sub(lambda match: f"{script()} {match[1].replace('_', '-')}", text) if script() else text


def resume_command(run: Path | str, n_ranks: int) -> str:
    """The command that resumes a run, in the form in which this job was started. `n_ranks`: 0 without mpirun."""
    if os.environ.get(STARTED_BY) and script():
        return f"{script()} run --resume {run} -np {n_ranks}"
    return f"{f'mpirun -np {n_ranks} ' if n_ranks else ''}python -m areal_bus.launch --resume {run}"
