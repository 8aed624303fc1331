"""`areal-bus manifest CONFIG.toml --to k8s|skypilot|slurm`: the file that starts a job there, a pod a host."""

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from areal_bus.config.names.packaged import find_config
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError
from areal_bus.process.commands import SCRIPT
from launch.commands.main import load_settings
from launch.commands.slurm import MARGIN_S, RANK_SETTINGS, layout, sbatch_file
from launch.run.runs import run_name

PORT = 29400  # where rank 0 listens at the start
MAX_NAME = 52  # of a Kubernetes Job: the names of its pods are longer by an index, and have at most 63 characters
FOLDER = "/work"  # where the volume is in a pod
POD_INTERFACE = "eth0"  # the usual name: pods of one cluster may have networks of one address
TARGETS = ("k8s", "skypilot", "slurm")
EPILOG = """\
k8s: a headless Service and an indexed Job, one pod a host. skypilot: a task for `sky launch`. slurm: as --slurm of the
launcher. Each continues the run when it is started again (run.resume = "auto"). Not tried on a real cluster."""

SCRIPT_OF_A_NODE = """\
set -u
{where}
# Ranks of this host. The first that fails ends the others; SIGTERM drains the run: it writes a checkpoint and ends.
pids=()
trap 'kill -USR1 "${{!pids[@]}}" 2>/dev/null' TERM
for i in $(seq 0 {last}); do
    rank=$((node * {per_node} + i))
    [ "$rank" -lt {ranks} ] || break
    RANK=$rank WORLD_SIZE={ranks} LOCAL_RANK=$i python -m areal_bus.launch {words} &
    pids[$!]=$rank
done
code=0
while [ "${{#pids[@]}}" -gt 0 ]; do
    wait -n -p ended "${{!pids[@]}}"
    status=$?
    [ -n "${{ended:-}}" ] || continue  # a signal interrupted it
    unset "pids[$ended]"
    if [ "$status" -ne 0 ]; then
        code=$status
        [ "${{#pids[@]}}" -eq 0 ] || kill -TERM "${{!pids[@]}}" 2>/dev/null
    fi
done
exit "$code"
"""
WHERE_K8S = """\
node=$JOB_COMPLETION_INDEX
address=""
while [ -z "$address" ]; do
    address=$(getent ahostsv4 {name}-0.{name} | awk 'NR == 1 {{ print $1 }}')
    [ -n "$address" ] || sleep 1
done"""
WHERE_SKYPILOT = """\
node=$SKYPILOT_NODE_RANK
address=$(printf '%s\\n' "$SKYPILOT_NODE_IPS" | head -n 1)"""
K8S_HEAD = """\
# {config}: {ranks} ranks, pods: {nodes}. The image has areal-bus. The claim (ReadWriteMany with several pods) holds the
# config, data, models and runs, and is the working folder. `kubectl replace --force -f` of this file continues the run.
"""
SKYPILOT_HEAD = """\
# {config}: {ranks} ranks, nodes: {nodes}. sky launch -c {name} FILE starts and continues the run. Several nodes must
# share run.folder: add file_mounts of your bucket. A wheel in the working folder can be installed instead.
"""


def main(words: Sequence[str]) -> int:
    """Exit code. Raises ConfigError."""
    args = parser().parse_args(words)
    if args.to != "k8s" and (args.image or args.claim):
        raise ConfigError(f"--image and --claim are for --to k8s: leave them out with --to {args.to}")
    if args.to != "skypilot" and args.gpu:
        raise ConfigError(f"--gpu is for --to skypilot: leave it out with --to {args.to}")
    config, file = load_settings(args.config, None, args.set)
    name = run_name(config, file)
    if args.to == "slurm":
        print(sbatch_file(config, list(map(find_config, args.config)), args.set, name=name))
    elif args.to == "k8s":
        print(kubernetes(config, args.config, args.set, name, image=args.image or SCRIPT, claim=args.claim or SCRIPT))
    else:
        print(skypilot(config, args.config, args.set, name, gpu=args.gpu))
    return 0


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        f"{SCRIPT} manifest",
        description="Write the files of a job for a cluster.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("config", nargs="+", metavar="CONFIG.toml", help="the settings, as for a start")
    p.add_argument("--to", required=True, choices=TARGETS, help="what starts the job")
    p.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a setting")
    p.add_argument("--image", default="", help=f"k8s: the container image ({SCRIPT})")
    p.add_argument("--claim", default="", help=f"k8s: the PersistentVolumeClaim that is the working folder ({SCRIPT})")
    p.add_argument("--gpu", default="", help="skypilot: the accelerator, such as H100")
    return p


def kubernetes(
    config: Config, files: Sequence[str], overrides: Sequence[str], name: str, *, image: str, claim: str
) -> str:
    """A headless Service, by which the pods find rank 0, and an indexed Job. Raises ConfigError."""
    ranks, _, nodes = layout(config.topology)
    label = label_of(name)
    settings = list(overrides)
    if nodes > 1 and not config.bus.interface:
        settings.append(f"bus.interface={POD_INTERFACE}")
    script = node_script(WHERE_K8S.format(name=label), config, files, settings)
    selector = {"app": label}
    container: dict[str, Any] = {
        "name": "ranks",
        "image": image,
        "command": ["bash", "-c", script],
        "workingDir": FOLDER,
        "volumeMounts": [{"name": "work", "mountPath": FOLDER}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    if gpus := config.topology.gpus_per_host:
        container["resources"] = {"limits": {"nvidia.com/gpu": gpus}}
    pod = {
        "subdomain": label,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(config.launch.drain_s) + MARGIN_S,
        "containers": [container],
        "volumes": [
            {"name": "work", "persistentVolumeClaim": {"claimName": claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": label},
        "spec": {"clusterIP": "None", "selector": selector, "publishNotReadyAddresses": True},
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": label},
        "spec": {
            "completionMode": "Indexed",
            "completions": nodes,
            "parallelism": nodes,
            "backoffLimit": 0,  # a job goes on with all its hosts, or not at all
            "template": {"metadata": {"labels": selector}, "spec": pod},
        },
    }
    head = K8S_HEAD.format(config=" ".join(files), ranks=ranks, nodes=nodes)
    return f"{head}{as_yaml(service)}---\n{as_yaml(job)}".rstrip()


def label_of(name: str) -> str:
    """A run's name as one of a Service: letters, digits and hyphens, a letter first."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return (label if label[:1].isalpha() else f"run-{label}")[:MAX_NAME].strip("-")


def skypilot(config: Config, files: Sequence[str], overrides: Sequence[str], name: str, *, gpu: str) -> str:
    """The task. Raises ConfigError for GPUs without a name."""
    ranks, _, nodes = layout(config.topology)
    gpus = config.topology.gpus_per_host
    if gpus and not gpu:
        raise ConfigError(f"missing --gpu: the config needs {gpus} GPUs on each host; name them, such as --gpu H100")
    if gpu and not gpus:
        raise ConfigError("--gpu has no effect: topology.gpus_per_host = 0")
    task: dict[str, Any] = {"name": name, "num_nodes": nodes}
    if gpus:
        task["resources"] = {"accelerators": f"{gpu}:{gpus}"}
    task |= {
        "workdir": ".",
        "setup": f"pip install '{SCRIPT}'\n{SCRIPT} doctor\n",
        "run": node_script(WHERE_SKYPILOT, config, files, overrides),
    }
    return (SKYPILOT_HEAD.format(config=" ".join(files), ranks=ranks, nodes=nodes, name=name) + as_yaml(task)).rstrip()


def node_script(where: str, config: Config, files: Sequence[str], overrides: Sequence[str]) -> str:
    """The bash script of a host. `where`: lines that set `node` and `address`."""
    ranks, per_node, _ = layout(config.topology)
    settings = [*overrides, *(f"{key}={value}" for key, value in RANK_SETTINGS.items())]
    words = [shlex.quote(file) for file in files] + [f"--set {shlex.quote(setting)}" for setting in settings]
    words.append(f'--set "launch.rendezvous=tcp://$address:{PORT}"')
    return SCRIPT_OF_A_NODE.format(
        where=where, last=per_node - 1, per_node=per_node, ranks=ranks, words=" \\\n        ".join(words)
    )


class Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Texts of several lines stay readable."""


def _text(dumper: Dumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


Dumper.add_representer(str, _text)


def as_yaml(tree: Mapping[str, Any]) -> str:
    text: str = yaml.dump(dict(tree), Dumper=Dumper, sort_keys=False, width=200)
    return text
