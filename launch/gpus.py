"""Whether each host has the GPUs that the settings say; knows no rank's role.

Asked of torch, for what counts is what it can compute on, and in a process of its own: supervisors have no torch.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

from areal_bus.errors import ConfigError
from launch.process import VISIBLE, environment

COUNT = "import torch; print(torch.cuda.device_count(), torch.__version__)"
TIMEOUT_S = 300.0  # torch comes over a network file system


def count_gpus() -> tuple[int, str]:
    """(how many GPUs torch finds here, its version): all of the host, or those that CUDA_VISIBLE_DEVICES names."""
    inner = environment(os.environ, gpus=(), cpu=True)
    del inner[VISIBLE]
    inner |= {VISIBLE: os.environ[VISIBLE]} if VISIBLE in os.environ else {}
    words = [sys.executable, "-c", COUNT]
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=inner, timeout=TIMEOUT_S, check=True
        )
        number, version = done.stdout.split()
        return int(number), version
    except (subprocess.SubprocessError, OSError, ValueError):  # no torch that works
        return 0, "none that imports"


def smallest_gpu_mib() -> int:
    """MiB of the smallest GPU of this machine, as nvidia-smi reports it; 0 where there is none."""
    if not (program := shutil.which("nvidia-smi")):
        return 0
    words = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        return min(int(line) for line in done.stdout.split())
    except (subprocess.SubprocessError, OSError, ValueError):
        return 0


def check_gpus(wanted: int, hosts: Sequence[str], found: Sequence[tuple[int, str]]) -> None:
    """`found` by rank, as `count_gpus` says. Raises ConfigError that names the first host with fewer than `wanted`."""
    by_host: Mapping[str, tuple[int, str]] = dict(zip(hosts, found, strict=True))
    for host, (number, version) in by_host.items():
        if number < wanted:
            raise ConfigError(
                f"topology.gpus_per_host = {wanted} needs as many GPUs on each host: torch ({version}) finds {number} "
                f"on {host}; run on such a machine, lower it (0: all on CPU), or only plan with --dry-run"
            )
