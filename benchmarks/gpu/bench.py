"""Bench `gpu`: memory, learner, decoding, pauses, sharing, mismatch, a ring and a task on one card in ten minutes.

Each part has a budget of seconds and keeps what it has measured when its time ends. All figures go to one JSON file,
and another start goes on with the parts that are missing; remove the file to start over.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from areal_bus.storage.atomic_file import write_atomic
from benchmarks.gpu.parts import PARTS
from benchmarks.harness import pace
from benchmarks.harness.protocol import Figures
from benchmarks.harness.worker_process import ROOT
from launch.plan.topology import count_gpus

FILE = Path("runs/benchmarks/gpu.json")  # below the working folder
QUICK_S = 30.0  # the most that a part may take with --quick
LINES = 64 << 10


class GpuBench:
    about = "one GPU in ten minutes: memory, MFU, decoding, pauses, sharing, mismatch, a task (resumes; --quick on CPU)"

    def measure(self, *, quiet: bool) -> Figures:
        """All parts that the file does not have. Quick and full figures have files of their own."""
        is_quick = pace.of(False, True)
        device = "cuda" if count_gpus()[0] else "cpu"
        file = FILE.with_stem(f"gpu-{'quick' if is_quick else 'full'}-{device}")
        found = load(file)
        for number, (name, (_, budget_s)) in enumerate(PARTS.items(), start=1):
            if found.get(name, {}).get("end") == "whole":
                continue
            pace.say(number, len(PARTS), f"part {name}:")
            found[name] = run_part(name, device, min(budget_s, QUICK_S) if is_quick else budget_s, is_quick=is_quick)
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, json.dumps(found, indent=1) + "\n")
        return {"bench": "gpu", "device": device, "file": str(file), **found}


def load(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def run_part(name: str, device: str, budget_s: float, *, is_quick: bool) -> dict[str, Any]:
    """Its rows, and how it ended: "whole", "time" (its budget) or the last line of an error."""
    words = [sys.executable, "-m", "benchmarks.gpu.parts", name, device, "quick" if is_quick else "full"]
    began, rows, unread = time.monotonic(), [], b""
    with subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        end, said = "", b""
        with selectors.DefaultSelector() as selector:
            for pipe in (process.stdout, process.stderr):
                selector.register(pipe, selectors.EVENT_READ)
            while selector.get_map() and not end:
                for key, _ in selector.select(max(began + budget_s - time.monotonic(), 0.0)):
                    data = os.read(key.fd, LINES)
                    if not data:
                        selector.unregister(key.fileobj)
                    elif key.fileobj is process.stdout:
                        *lines, unread = (unread + data).split(b"\n")
                        rows += [json.loads(line) for line in lines if line.startswith(b"{")]
                    else:
                        said = (said + data)[-LINES:]
                if time.monotonic() - began > budget_s:
                    end = "time"
        if end:
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    last = said.decode(errors="replace").strip().rpartition("\n")[2]
    end = end or ("whole" if code == 0 else f"exit code {code}: {last[:300]}")
    return {"seconds": round(time.monotonic() - began, 1), "end": end, "rows": rows}
