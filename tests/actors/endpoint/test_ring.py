"""configs/agent.toml under mpirun: an agent that knows nothing of training is trained, and the audit is clean."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.test_tiny import ROOT, events, launch

WAIT_S = 300.0


def run_tool(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.soak
def test_an_agent_learns_by_way_of_its_endpoint(tmp_path: Path) -> None:
    run = launch(tmp_path, config="configs/agent.toml")
    rewards = [update["reward"] for update in events(run, "head-0.0", "update")]
    assert sum(rewards[-20:]) / 20 - sum(rewards[:20]) / 20 > 0.05
    samples = [json.loads(line) for line in (run / "samples" / "samples.jsonl").read_text().splitlines()]
    n_second_tries = sum(sample["prompt"].count(">") > 1 for sample in samples)
    assert 0 < n_second_tries < len(samples)
    run_tool("tools.audit", str(run))
    seen = (tmp_path / "listeners.txt").read_text().split()
    assert {address.rpartition(":")[0] for address in seen} == {"127.0.0.1"}
    words = tmp_path / "words.jsonl"
    words.write_text("".join(json.dumps({"question": word, "answer": word[::-1]}) + "\n" for word in ("abc", "hello")))
    told = run_tool("tools.evaluate", str(run), "--data", str(words), "--json").splitlines()[-1]
    assert json.loads(told)["answers"] == 16


def whole(run: Path, actor: str, name: str) -> list[dict[str, Any]]:
    """Events of a journal that is being written: its last line may not be whole."""
    text = (run / "journal" / f"{actor}.jsonl").read_text()
    return [line for line in map(json.loads, text.splitlines()[: text.count("\n")]) if line["event"] == name]


def workers_of(actor: int) -> list[int]:
    """Process ids of the agents or environments of a generator."""
    children = [int(pid) for file in Path(f"/proc/{actor}/task").glob("*/children") for pid in file.read_text().split()]
    return [pid for pid in children if b"agent_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def kill_workers(folder: Path, killed: list[int], *, n: int) -> None:
    """The processes of one generator in turn, each once it has answered, with conversations under way."""
    deadline = time.monotonic() + WAIT_S
    while len(killed) < n and time.monotonic() < deadline:
        time.sleep(0.2)
        run = (folder / "latest").resolve()
        if not (run / "journal" / "generator-0.0.jsonl").exists():
            continue
        seen, started = whole(run, "generator-0.0", "completion"), whole(run, "generator-0.0", "start")
        if len(seen) <= (killed[-1] + 8 if killed else 0) or not started:
            continue
        for pid in sorted(workers_of(started[0]["pid"]))[:1]:  # the oldest, which has loaded
            os.kill(pid, signal.SIGKILL)
            killed.append(len(seen))


@pytest.mark.soak
@pytest.mark.skipif(find_spec("verifiers") is None, reason='needs the extra envs: pip install "areal-bus[envs]"')
def test_an_environment_whose_processes_are_killed_loses_no_prompt(tmp_path: Path) -> None:
    killed: list[int] = []
    killer = threading.Thread(target=kill_workers, args=(tmp_path, killed), kwargs={"n": 4}, daemon=True)
    killer.start()
    settings = ["run.total_train_steps=16", "learner.warmup.steps=80", "evaluate.before=false", "evaluate.after=false"]
    run = launch(tmp_path, *settings, config="configs/verifiers.toml")
    killer.join()
    assert len(killed) == 4
    assert len(events(run, "head-0.0", "update")) == 16
    assert [
        refund["error"] for refund in events(run, "head-0.0", "refund") if refund["reason"] == "sampling_error"
    ] == []
    assert any("n_forgotten" in completion for completion in events(run, "generator-0.0", "completion"))
    samples = [json.loads(line) for line in (run / "samples" / "samples.jsonl").read_text().splitlines()]
    assert all(sample["parts"]["num_turns"] in (1, 2) for sample in samples if sample["status"] == "value")
    assert any(len(sample["prompt"].split(" ")) == 2 for sample in samples)  # a second try
    run_tool("tools.audit", str(run))
