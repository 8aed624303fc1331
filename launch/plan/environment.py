"""The environment of a rank's child processes. Standard library only: the process of every rank imports it."""

from collections.abc import Mapping, Sequence

from areal_bus.process.isolation import child_path

LAUNCHER_VARIABLES = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "HYDI_", "HYDRA_", "MPI_LOCAL", "MPIEXEC_")
RENDEZVOUS_VARIABLES = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
}
LARGE_BYTES, LARGE_BYTES_SHARDED = 32 << 20, 4 << 20  # of an allocation that glibc returns to the kernel when freed
UNBUFFERED = "PYTHONUNBUFFERED"  # print() would write text and newline separately: lines of several ranks would mix
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def actor_environment(outer: Mapping[str, str], *, gpus: Sequence[int], cpu: bool) -> dict[str, str]:
    """An actor's environment: no variables of the launcher, our packages first, one thread a process on CPU."""
    inner = {
        name: value
        for name, value in outer.items()
        if not name.startswith(LAUNCHER_VARIABLES) and name not in RENDEZVOUS_VARIABLES | {UNBUFFERED}
    }
    inner["PYTHONPATH"] = child_path(outer)
    inner["PYTHONUTF8"] = "1"  # the user's modules read and write UTF-8, too, whatever the locale
    inner.setdefault("TOKENIZERS_PARALLELISM", "false")
    inner.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the head reports the end of a peer in one line
    inner.setdefault("LOGURU_LEVEL", "INFO")
    if cpu:  # two OpenMP threads on a busy core cost seven times the CPU time
        inner.setdefault("OMP_NUM_THREADS", "1")
        inner.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    inner[VISIBLE_DEVICES] = ",".join(cuda_device(gpu, outer) for gpu in gpus)
    return inner


def malloc_variables(n_learners: int) -> dict[str, str]:
    """Of a learner: glibc keeps an update's activations for the next update instead of returning them to the kernel.

    The layers that several ranks gather leave holes in such a heap: with the larger limit a gigabyte (SmolLM2).
    """
    large = LARGE_BYTES if n_learners == 1 else LARGE_BYTES_SHARDED
    return {"MALLOC_MMAP_THRESHOLD_": str(large), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}


def cuda_device(gpu: int, outer: Mapping[str, str]) -> str:
    """The CUDA device of a GPU of this rank: topology numbers index the launcher's CUDA_VISIBLE_DEVICES."""
    seen = [name.strip() for name in outer.get(VISIBLE_DEVICES, "").split(",") if name.strip()]
    return seen[gpu] if gpu < len(seen) else str(gpu)
