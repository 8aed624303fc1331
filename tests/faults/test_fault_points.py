"""Every failpoint of `inside/sitecustomize.py` exists, so that a renamed method fails here and not in a soak."""

import os
import subprocess
import sys
from pathlib import Path

from tests.faults.ring import FOLDER, INSIDE, ROOT

IMPORTS = "import importlib, sitecustomize as s; [importlib.import_module(name) for name in s.WRAPPED]"


def test_every_failpoint_exists(tmp_path: Path) -> None:
    outer = os.environ | {FOLDER: str(tmp_path), "PYTHONPATH": f"{INSIDE}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", IMPORTS], env=outer, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
