"""A job that samples with a real server on CPU, which is killed on the way: `make test-sglang`, `make test-vllm`."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from actors.engines.servers import weight_transfer as handover
from tests.servers.engines import START_S, sglang_python, vllm_python
from tests.servers.processes import servers_of, session
from tests.support.polling import wait_until

ROOT = Path(__file__).resolve().parents[4]
STEPS = 10
PATIENCE_S = 1200.0
SETTINGS = [
    f"run.total_train_steps={STEPS}",
    "model.scratch.hidden_size=64",
    "model.scratch.layers=2",
    "model.scratch.max_positions=256",
    "data.batch_size=8",
    "rollout.max_head_offpolicyness=2",
    "rollout.max_concurrent_rollouts=32",
    "gconfig.n_samples=4",
    "gconfig.max_new_tokens=120",
    "gconfig.temperature=0.9",
    "learner.warmup.steps=0",
    "checkpoint.every_steps=1",
    "checkpoint.keep=20",
    "journal.tokens=true",
    "weights.timeout_s=120",
    f"engine.start_timeout_s={START_S}",
    f"launch.timeout_s={2 * START_S}",
]
OF_VLLM = [  # few slots and many layers: updates come while samples are under way
    "rollout.max_concurrent_rollouts=4",
    "model.scratch.hidden_size=128",
    "model.scratch.heads=4",
    "model.scratch.layers=8",
]
KINDS: dict[str, tuple[str, Any, list[str]]] = {
    "sglang": ("sglang.launch_server", sglang_python, []),
    "vllm": ("vllm.entrypoints.openai.api_server", vllm_python, OF_VLLM),
}


def launch(folder: Path, *changes: str) -> "subprocess.Popen[str]":
    """configs/tiny.toml with one generator, as the README starts it."""
    scripts = Path(sys.executable).parent
    environment = os.environ | {
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    words = [word for change in (f"run.folder='{folder}'", *SETTINGS, *changes) for word in ("--set", change)]
    line = [str(scripts / "mpirun"), "-np", "3", "python", "-m", "areal_bus.launch", "configs/tiny.toml", *words]
    with (folder / "output.txt").open("w") as log:
        return subprocess.Popen(line, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, text=True)


def events(run: Path, actor: str, name: str) -> list[dict[str, Any]]:
    file = run / "journal" / f"{actor}.jsonl"
    whole = file.read_text().rpartition("\n")[0].splitlines() if file.exists() else []
    return [line for line in map(json.loads, whole) if line["event"] == name]


def wait(job: "subprocess.Popen[str]", what: str, holds: Any) -> None:
    def is_so() -> bool:
        assert job.poll() is None, f"the job has ended before {what}"
        return bool(holds())

    wait_until(is_so, what, PATIENCE_S, poll_s=0.1)


@pytest.fixture(
    scope="module", params=[pytest.param(kind, marks=getattr(pytest.mark, kind)) for kind in ("sglang", "vllm")]
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's folder, after its end; of its server, killed on the way, nothing is left."""
    module, python, changes = KINDS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    before = set(handover.MEMORY.glob(f"{handover.PREFIX}*"))
    names = [f"{key}='{request.param}'" for key in ("run.name", "rollout.engine")]
    job = launch(folder, *names, *changes, f"engine.python='{python()}'")
    try:
        wait(job, "a run folder is there", (folder / "latest").exists)
        run = (folder / "latest").resolve()
        wait(job, "three versions are published", lambda: len(events(run, "head-0.0", "publish")) >= 4)
        (server,) = servers_of(run, module)
        leaders = [os.getsid(server)]
        os.kill(server, signal.SIGKILL)
        wait(job, "there is another server", lambda: servers_of(run, module) not in ([], [server]))
        leaders += [os.getsid(again) for again in servers_of(run, module)]
        assert job.wait(PATIENCE_S) == 0, (folder / "output.txt").read_text()
    finally:
        job.terminate()
        job.wait(60)
    wait_until(lambda: not any(session(leader) for leader in leaders), "servers end with their job")
    assert set(handover.MEMORY.glob(f"{handover.PREFIX}*")) <= before, "weights were left in memory"
    return run


def test_all_steps_are_trained_within_the_lag_and_published(run: Path) -> None:
    updates = events(run, "head-0.0", "update")
    assert [update["version"] for update in updates] == list(range(1, STEPS + 1))
    assert events(run, "head-0.0", "publish")[-1]["version"] == STEPS
    assert all(update["lag_max"] <= 2 for update in updates if "lag_max" in update)


def test_the_generator_came_back_with_a_new_server(run: Path) -> None:
    (failed,) = events(run, "generator-0.0", "failed")
    assert failed["error"].startswith("EngineLost: the server ")  # in the middle of a call, of a stream, or of neither
    assert events(run, "generator-0.1", "pushed")[-1]["version"] == STEPS


def test_weights_came_while_samples_were_under_way(run: Path) -> None:
    completions = [line for name in ("generator-0.0", "generator-0.1") for line in events(run, name, "completion")]
    over = [line["versions"] for line in completions if len(line["versions"]) > 2]  # [version, n, version, n, ...]
    assert over
    assert all(versions[::2] == sorted(set(versions[::2])) for versions in over)


def test_the_audit_finds_nothing_and_every_log_prob_is_that_of_its_version(run: Path) -> None:
    line = [sys.executable, "-m", "tools.audit", "--json", "--recompute", str(run)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    versions = told["recomputed"]["versions"]
    assert sum(tally["n_tokens"] for tally in versions) > 1000
    assert len(versions) > STEPS // 2
    assert max(tally["max_error"] for tally in versions) < 1e-4
    assert max(max(tally["before"] or 0, tally["after"] or 0) for tally in versions) > 1e-3  # another version shows
