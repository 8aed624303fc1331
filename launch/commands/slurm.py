"""--slurm: an sbatch file for a config, which drains before its time limit, requeues itself and goes on.

Each rank is a task of one `srun` (launch.bootstrap = "env"), so no MPI that knows Slurm is needed.
"""

import math
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from areal_bus.config.sections import Config, TopologyConfig
from areal_bus.errors import ConfigError
from areal_bus.storage.atomic_file import read_object
from launch.plan.topology import check_count, min_ranks
from launch.run.job_id import SLURM_JOB
from launch.run.runs import ORIGIN, SUMMARY, runs_named

MARGIN_S = 60  # between the limit of a drain and the end of the job
MAX_NOTICE_S = 65535  # of sbatch
TIME = "24:00:00"
WHOLE_NODES = "\n#SBATCH --gpus-per-node={}\n#SBATCH --exclusive\n#SBATCH --mem=0"
RANK_SETTINGS = {"launch.bootstrap": "env", "run.resume": "auto"}

TEMPLATE = """\
#!/bin/bash
# {config}: {ranks} ranks on {nodes} node{s}. Add --partition and --account of your cluster; --time is yours, too.
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks={ranks}
#SBATCH --ntasks-per-node={per_node}{gpus}
#SBATCH --time={time}
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR1@{notice_s}
set -u
cd {folder}
{activate}{rendezvous}srun --kill-on-bad-exit=1 --distribution=block --cpu-bind=none \\
    python -m areal_bus.launch {words}
code=$?
# Slurm sent SIGUSR1 {notice_s} s before the limit: the run was drained, and the same command goes on with it.
if [ "$code" -eq 0 ] && python -c 'import sys; from launch.commands.slurm import was_drained
sys.exit(not was_drained(*sys.argv[1:]))' {runs} {quoted_name} "$SLURM_JOB_ID"; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"\
"""
RENDEZVOUS = """\
# Rank 0 is on this node, the first of the job: the others meet it on the interface that all share.
interface={interface}
address=$(python -c 'import sys; from launch.plan.network import find_interface, local_facts
print(find_interface(sys.argv[1], local_facts())[1])' "$interface") || exit 2
port=$((20000 + SLURM_JOB_ID % 20000))
"""


def sbatch_file(config: Config, files: Sequence[Path], overrides: Sequence[str], *, name: str) -> str:
    """The file's text; `overrides` as after --set; `name`: of the run. ConfigError: no interface for several nodes."""
    topology = config.topology
    ranks, per_node, nodes = layout(topology)
    if nodes > 1 and not config.bus.interface:
        places = f"{ranks} ranks take {nodes} nodes of topology.ranks_per_host = {topology.ranks_per_host}"
        remedy = "add --set bus.interface=NAME (or ADDRESS/PREFIX)"
        raise ConfigError(f"ranks on several hosts need a network interface: {places}; {remedy}")
    settings = [*overrides, *(f"{key}={value}" for key, value in RANK_SETTINGS.items())]
    words = [shlex.quote(str(file)) for file in files]
    words += [f"\\\n    --set {shlex.quote(setting)}" for setting in settings]
    if nodes > 1:
        words.append('\\\n    --set "launch.rendezvous=tcp://$address:$port"')
    return TEMPLATE.format(
        config=" ".join(map(str, files)),
        ranks=ranks,
        nodes=nodes,
        s="s" if nodes > 1 else "",
        name=name,
        per_node=per_node,
        gpus=WHOLE_NODES.format(topology.gpus_per_host) if topology.gpus_per_host else "",
        time=TIME,
        notice_s=min(math.ceil(config.launch.drain_s) + MARGIN_S, MAX_NOTICE_S),
        folder=shlex.quote(os.getcwd()),
        activate=_activate(),
        rendezvous=RENDEZVOUS.format(interface=shlex.quote(config.bus.interface)) if nodes > 1 else "",
        words=" ".join(words),
        runs=shlex.quote(str(config.run.folder)),
        quoted_name=shlex.quote(name),
    )


def layout(topology: TopologyConfig) -> tuple[int, int, int]:
    """Number of ranks, of ranks on a node, and of nodes. Raises ConfigError."""
    ranks = min_ranks(topology)
    check_count(topology, ranks)
    per_node = min(ranks, topology.ranks_per_host)
    return ranks, per_node, math.ceil(ranks / per_node)


def was_drained(folder: str, name: str, job: str) -> bool:
    """Whether the run that this Slurm job started last was drained. Other runs may have a name that begins alike."""
    for run in runs_named(Path(folder), name):  # newest first
        if read_object(run / ORIGIN).get(SLURM_JOB) == job:
            return bool(read_object(run / SUMMARY).get("drained"))
    return False


def _activate() -> str:
    """The line that enters this virtual environment."""
    script = Path(sys.prefix, "bin", "activate")
    return f"source {shlex.quote(str(script))}\n" if sys.prefix != sys.base_prefix and script.is_file() else ""
