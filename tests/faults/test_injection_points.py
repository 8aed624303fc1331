"""The injected faults of `inside/sitecustomize.py` wrap functions that exist."""

import subprocess
import sys
from pathlib import Path

CODE = """
import importlib, runpy, sys
wrapped = runpy.run_path(sys.argv[1])["WRAPPED"]
for name, wrap in wrapped.items():
    wrap(importlib.import_module(name))
"""


def test_every_injection_point_exists() -> None:
    """Issue 27: classes were renamed and the wrappers kept their old names."""
    script = Path(__file__).parent / "inside" / "sitecustomize.py"
    done = subprocess.run([sys.executable, "-c", CODE, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
