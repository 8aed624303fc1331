"""A job that samples with a real vLLM server on CPU, which is killed on the way: `make test-vllm`."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from actors.engines.servers import weight_transfer as handover
from tests.actors.engines.servers.test_sglang_ring import PATIENCE_S, ROOT, STEPS, events, launch, wait
from tests.servers.engines import vllm_python
from tests.servers.processes import servers_of, session
from tests.support.polling import wait_until

pytestmark = pytest.mark.vllm

SERVER = "vllm.entrypoints.openai.api_server"
SETTINGS = [  # few slots and many layers: updates come while samples are under way
    "run.name='vllm'",
    "rollout.engine='vllm'",
    "rollout.max_concurrent_rollouts=4",
    "model.scratch.hidden_size=128",
    "model.scratch.heads=4",
    "model.scratch.layers=8",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's folder, after its end."""
    folder = tmp_path_factory.mktemp("vllm")
    before = set(handover.MEMORY.glob(f"{handover.PREFIX}*"))
    job = launch(folder, *SETTINGS, f"engine.python='{vllm_python()}'")
    try:
        wait(job, "a run folder is there", (folder / "latest").exists)
        run = (folder / "latest").resolve()
        wait(job, "three versions are published", lambda: len(events(run, "head-0.0", "publish")) >= 4)
        (server,) = servers_of(run, SERVER)
        leaders = [os.getsid(server)]
        os.kill(server, signal.SIGKILL)
        wait(job, "there is another server", lambda: servers_of(run, SERVER) not in ([], [server]))
        leaders += [os.getsid(again) for again in servers_of(run, SERVER)]
        assert job.wait(PATIENCE_S) == 0, (folder / "output.txt").read_text()
    finally:
        job.terminate()
        job.wait(60)
    wait_until(lambda: not any(session(leader) for leader in leaders), "servers end with their job")
    assert set(handover.MEMORY.glob(f"{handover.PREFIX}*")) <= before, "weights were left in memory"
    return run


def test_all_steps_are_trained_and_published(run: Path) -> None:
    assert [update["version"] for update in events(run, "head-0.0", "update")] == list(range(1, STEPS + 1))
    assert events(run, "head-0.0", "publish")[-1]["version"] == STEPS


def test_the_generator_came_back_with_a_new_server(run: Path) -> None:
    (failed,) = events(run, "generator-0.0", "failed")
    assert failed["error"].startswith("EngineLost: the server ")
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
    versions = json.loads(done.stdout.splitlines()[-1])["recomputed"]["versions"]
    assert sum(tally["n_tokens"] for tally in versions) > 1000
    assert len(versions) > STEPS // 2
    assert max(tally["max_error"] for tally in versions) < 1e-4
    assert max(max(tally["before"] or 0, tally["after"] or 0) for tally in versions) > 1e-3  # another version shows
