"""configs/agent.toml under mpirun: an agent that knows nothing of training is trained, and the audit is clean."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_tiny import ROOT, events, launch


@pytest.mark.soak
def test_an_agent_learns_by_way_of_its_endpoint(tmp_path: Path) -> None:
    run = launch(tmp_path, config="configs/agent.toml")
    rewards = [update["reward"] for update in events(run, "head-0.0", "update")]
    assert sum(rewards[-20:]) / 20 - sum(rewards[:20]) / 20 > 0.05
    samples = [json.loads(line) for line in (run / "samples" / "samples.jsonl").read_text().splitlines()]
    n_second_tries = sum(sample["prompt"].count(">") > 1 for sample in samples)
    assert 0 < n_second_tries < len(samples)
    done = subprocess.run([sys.executable, "-m", "tools.audit", str(run)], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout
    seen = (tmp_path / "listeners.txt").read_text().split()
    assert {address.rpartition(":")[0] for address in seen} == {"127.0.0.1"}
