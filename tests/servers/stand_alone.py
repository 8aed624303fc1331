"""A server that speaks SGLang's routes, as a process of its own: `stand_alone.py ... --port N ...`."""

import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def interpreter(folder: Path, before: str = "", program: str = __file__) -> str:
    """An interpreter that has SGLang, as it seems: it runs this program. `before`: a line of shell that comes first."""
    script = folder / "python"
    run = f'{before}\nexec {sys.executable} {program} "$@"'
    script.write_text(f'#!/bin/sh\ncase "$*" in *metadata*) echo 0.5.23; exit;; esac\n{run}\n')
    script.chmod(0o755)
    return str(script)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from tests.servers.speaks_sglang import SpeaksSGLang

    SpeaksSGLang(int(sys.argv[sys.argv.index("--port") + 1]))
    threading.Event().wait()
