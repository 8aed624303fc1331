"""Counts the GPUs of each host and compares them with topology.gpus_per_host.

torch counts them, because it computes on them, and in a subprocess, because supervisors do not import torch.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

from areal_bus.errors import ConfigError
from launch.plan.environment import VISIBLE_DEVICES, actor_environment

COUNT_PROGRAM = "import torch; print(torch.cuda.device_count(), torch.__version__)"
TIMEOUT_S = 300.0  # importing torch from a network file system is slow


def count_gpus() -> tuple[int, str]:
    """(number of GPUs, torch version). CUDA_VISIBLE_DEVICES limits the GPUs that torch finds."""
    inner = actor_environment(os.environ, gpus=(), cpu=True)
    del inner[VISIBLE_DEVICES]
    inner |= {VISIBLE_DEVICES: os.environ[VISIBLE_DEVICES]} if VISIBLE_DEVICES in os.environ else {}
    words = [sys.executable, "-P", "-c", COUNT_PROGRAM]
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=inner,
            timeout=TIMEOUT_S,
            check=True,
            encoding="utf-8",
        )
        number, version = done.stdout.split()
        return int(number), version
    except (subprocess.SubprocessError, OSError, ValueError):  # torch does not import
        return 0, "none that imports"


def smallest_gpu_mib() -> int:
    """Memory in MiB of this machine's smallest GPU, from nvidia-smi; 0 without a GPU."""
    if not (program := shutil.which("nvidia-smi")):
        return 0
    words = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=True, encoding="utf-8")
        return min(int(line) for line in done.stdout.split())
    except (subprocess.SubprocessError, OSError, ValueError):
        return 0


def check_gpus(wanted: int, hosts: Sequence[str], found: Sequence[tuple[int, str]]) -> None:
    """Raises ConfigError for the first host with fewer than `wanted` GPUs. `found`: result of `count_gpus` by rank."""
    by_host: Mapping[str, tuple[int, str]] = dict(zip(hosts, found, strict=True))
    for host, (number, version) in by_host.items():
        if number < wanted:
            raise ConfigError(
                f"topology.gpus_per_host = {wanted} needs {wanted} GPUs on each host: torch ({version}) finds {number} "
                f"on {host}; run on a machine that has them, lower it (0: all on CPU), or only plan with --dry-run"
            )
