"""`areal-bus manifest`: the fields of its files, and a real job of two hosts that its script starts."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal_bus.config.loader import load
from areal_bus.config.names.packaged import FOLDER
from areal_bus.errors import ConfigError
from launch.commands.manifest import kubernetes, label_of, main, skypilot

ROOT = Path(__file__).resolve().parents[2]
# The fields that we use, of the JSON schemas of Kubernetes 1.37 (job-batch-v1, service-v1) and of the task of SkyPilot
# (docs.skypilot.co, "SkyPilot YAML"): field -> type, or the fields below it; [x] is a list of x.
K8S_POD = {
    "subdomain": str, "restartPolicy": str, "terminationGracePeriodSeconds": int,
    "containers": [{
        "name": str, "image": str, "command": [str], "workingDir": str,
        "volumeMounts": [{"name": str, "mountPath": str}], "resources": {"limits": dict},
    }],
    "volumes": [{"name": str, "persistentVolumeClaim": {"claimName": str}, "emptyDir": {"medium": str}}],
}  # fmt: skip
K8S = {
    "Job": {
        "apiVersion": str, "kind": str, "metadata": {"name": str},
        "spec": {
            "completionMode": str, "completions": int, "parallelism": int, "backoffLimit": int,
            "template": {"metadata": {"labels": dict}, "spec": K8S_POD},
        },
    },
    "Service": {
        "apiVersion": str, "kind": str, "metadata": {"name": str},
        "spec": {"clusterIP": str, "selector": dict, "publishNotReadyAddresses": bool},
    },
}  # fmt: skip
SKYPILOT = {
    "name": str, "num_nodes": int, "resources": {"accelerators": str}, "workdir": str, "setup": str, "run": str,
}  # fmt: skip


def misfits(tree: Any, schema: Any, at: str = "") -> list[str]:
    """Paths of what the schema does not have."""
    if isinstance(schema, list):
        return [bad for i, one in enumerate(tree) for bad in misfits(one, schema[0], f"{at}[{i}]")]
    if isinstance(schema, dict):
        return [
            bad
            for key, value in tree.items()
            for bad in (misfits(value, schema[key], f"{at}.{key}") if key in schema else [f"{at}.{key}"])
        ]
    return [] if type(tree) is schema else [at]


def documents(name: str, *overrides: str) -> list[dict[str, Any]]:
    config = load(FOLDER / f"{name}.toml", overrides)
    return list(yaml.safe_load_all(kubernetes(config, [name], overrides, name, image="image", claim="claim")))


@pytest.mark.parametrize(("name", "pods", "gpus"), [("32b", 64, 8), ("gpus-8", 1, 8), ("tiny", 1, 0)])
def test_kubernetes_gets_a_service_and_an_indexed_job_of_a_pod_a_host(name: str, pods: int, gpus: int) -> None:
    service, job = documents(name)
    assert misfits(service, K8S["Service"]) == misfits(job, K8S["Job"]) == []
    label = service["metadata"]["name"]
    assert label[0].isalpha()
    assert service["spec"]["selector"] == job["spec"]["template"]["metadata"]["labels"]
    pod = job["spec"]["template"]["spec"]
    assert (pod["subdomain"], job["metadata"]["name"]) == (label, label)
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (pods, pods)
    container = pod["containers"][0]
    assert container.get("resources", {"limits": {}})["limits"].get("nvidia.com/gpu", 0) == gpus
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    assert subprocess.run(["bash", "-n"], input=container["command"][2], text=True, check=False).returncode == 0
    assert ("bus.interface=eth0" in container["command"][2]) == (pods > 1)
    assert pod["terminationGracePeriodSeconds"] >= 600


def test_a_field_that_the_schema_does_not_have_is_found() -> None:
    _, job = documents("tiny")
    job["spec"]["template"]["spec"]["containers"][0]["imagePull"] = "x"
    job["spec"]["completions"] = "1"
    assert misfits(job, K8S["Job"]) == [".spec.completions", ".spec.template.spec.containers[0].imagePull"]


@pytest.mark.parametrize(
    ("name", "label"), [("32b", "run-32b"), ("My_run.2", "my-run-2"), ("a" * 70, "a" * 52), ("tiny", "tiny")]
)
def test_a_label_has_letters_digits_and_hyphens_and_a_letter_first(name: str, label: str) -> None:
    assert label_of(name) == label


def test_skypilot_gets_nodes_and_accelerators() -> None:
    config = load(FOLDER / "32b.toml", [])
    task = yaml.safe_load(skypilot(config, ["32b.toml"], [], "32b", gpu="H100"))
    assert misfits(task, SKYPILOT) == []
    assert (task["num_nodes"], task["resources"]) == (64, {"accelerators": "H100:8"})
    assert subprocess.run(["bash", "-n"], input=task["run"], text=True, check=False).returncode == 0
    with pytest.raises(ConfigError, match="missing --gpu: the config needs 8 GPUs on each host"):
        skypilot(config, ["32b.toml"], [], "32b", gpu="")


def test_options_of_another_target_are_refused_and_slurm_is_that_of_the_launcher(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words in (["--to", "slurm", "--image", "x"], ["--to", "k8s", "--gpu", "H100"]):
        with pytest.raises(ConfigError, match="leave"):
            main(["tiny", *words])
    assert main(["tiny", "--to", "slurm"]) == 0
    assert "#SBATCH --ntasks=" in capsys.readouterr().out
