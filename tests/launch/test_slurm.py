"""The sbatch file of --slurm: its lines, and a real job started by it, with stand-ins for Slurm's commands."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from areal_bus.config.loader import load
from launch.commands.main import main
from launch.commands.slurm import sbatch_file, was_drained
from launch.run.job_id import slurm_job
from tests.support.polling import wait_until
from tools import run as runs

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {  # of sbatch, with the form of their value
    "job-name": r".+", "nodes": r"\d+", "ntasks": r"\d+", "ntasks-per-node": r"\d+", "gpus-per-node": r"\d+",
    "mem": r"0", "time": r"\d\d:\d\d:\d\d", "output": r"%x-%j\.log", "open-mode": r"append", "signal": r"USR1@\d{1,5}",
    "requeue": None, "exclusive": None,
}  # fmt: skip
SRUN = """#!{python}
import os, subprocess, sys
words = sys.argv[1:]
while words[0].startswith("--"):
    words.pop(0)
n = int(os.environ["SLURM_NTASKS"])
ranks = [subprocess.Popen(words, env=os.environ | {{"SLURM_PROCID": str(i)}}) for i in range(n)]
sys.exit(max(rank.wait() for rank in ranks))
"""
SCONTROL = '#!/bin/sh\necho "$@" >> "$REQUEUED"\n'


def options_of(text: str) -> dict[str, str | None]:
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH --")]
    return {name: value if sign else None for name, sign, value in (line.partition("=") for line in lines)}


@pytest.mark.parametrize("name", ["32b", "7b", "gpus-8", "demo"])
def test_sbatch_takes_each_line(name: str) -> None:
    file = ROOT / "configs" / f"{name}.toml"
    text = sbatch_file(load(file, ["bus.interface=ib0"]), [file], ["bus.interface=ib0"], name=name)
    found = options_of(text)
    assert {option for option, value in found.items() if not re.fullmatch(OPTIONS[option] or "", value or "")} == set()
    assert int(found["nodes"] or 0) * int(found["ntasks-per-node"] or 0) >= int(found["ntasks"] or 0)
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_slurm_32b_takes_64_whole_nodes_and_names_missing_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(ROOT / "configs" / "32b.toml"), "--slurm"]) == 2
    assert "512 ranks take 64 nodes" in capsys.readouterr().err
    assert main([str(ROOT / "configs" / "32b.toml"), "--slurm", "--set", "bus.interface=ib0"]) == 0
    found = options_of(capsys.readouterr().out)
    assert (found["nodes"], found["ntasks"], found["gpus-per-node"], found["exclusive"]) == ("64", "512", "8", None)
    assert main([str(ROOT / "configs" / "32b.toml"), "--slurm", "--dry-run"]) == 2


def test_sbatch_requeues_by_the_name_of_the_run_also_with_an_installed_file_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run is named after the user's own file; a drained job looks for runs of that name."""
    file = tmp_path / "mine.toml"
    file.write_text('extends = "tiny.toml"\nrun.name = ""\n')
    assert main([str(file), "algorithms/gspo.toml", "--slurm"]) == 0
    text = capsys.readouterr().out
    assert options_of(text)["job-name"] == "mine"
    assert 'runs mine "$SLURM_JOB_ID"' in text


def test_settings_reach_the_ranks_as_they_were_given(tmp_path: Path) -> None:
    changes = ["""data.system='be "brief", $HOME; echo'""", f"run.folder='{tmp_path}'"]
    file = ROOT / "configs" / "tiny.toml"
    text = sbatch_file(load(file, changes), [file], changes, name=file.stem)
    shown = subprocess.run(
        ["bash", "-c", text.replace("srun ", "printf '%s\\0' ", 1).partition("code=$?")[0]],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    words = shown.stdout.split("\0")
    assert [words[i + 1] for i, word in enumerate(words) if word == "--set"][:2] == changes


@pytest.mark.slow
def test_a_job_is_requeued_for_its_own_run_only(tmp_path: Path) -> None:
    """Another run whose name begins alike, or of the same name, was drained later."""

    def run(folder: str, name: str, job: str, *, drained: bool, start: int) -> None:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps({"run": {"name": name}}))
        (tmp_path / folder / "origin.json").write_text(json.dumps({"slurm_job": job, "start": start}))
        (tmp_path / folder / "summary.json").write_text(json.dumps({"code": 0, "drained": drained}))

    run("tiny", "tiny", "7", drained=False, start=1)
    run("tiny-2", "tiny", "8", drained=True, start=2)
    run("tiny-large", "tiny-large", "9", drained=True, start=1)
    assert [was_drained(str(tmp_path), "tiny", job) for job in ("7", "8", "9")] == [False, True, False]
    assert slurm_job({"SLURM_JOB_ID": "7"}) == {"slurm_job": "7"}


@pytest.mark.slow
def test_a_job_that_is_drained_is_requeued(tmp_path: Path) -> None:
    for name, text in (("srun", SRUN.format(python=sys.executable)), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    file = ROOT / "tests" / "faults" / "ring.toml"
    changes = [f"run.folder={str(tmp_path / 'runs')!r}", "run.total_train_steps=200", "reward.function=reverse"]
    script = sbatch_file(load(file, changes), [file], changes, name=file.stem)
    requeued = tmp_path / "requeued"
    slurm = {"SLURM_NTASKS": "3", "SLURM_JOB_ID": "77", "REQUEUED": str(requeued)}
    environment = os.environ | slurm | {"PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    job = subprocess.Popen(["bash", "-c", script], env=environment, cwd=tmp_path, start_new_session=True)
    run = tmp_path / "runs" / "ring"
    try:
        wait_for_update(run, 3)
        subprocess.run(["bash", "-c", f"kill -USR1 $(cat {shlex.quote(str(run / 'pid'))})"], check=True)
        assert job.wait(60) == 0
        assert requeued.read_text() == "requeue 77\n"
        assert last_version(run) < 200
    finally:
        if job.poll() is None:
            os.killpg(job.pid, 9)


def last_version(run: Path) -> int:
    return max([int(line["version"]) for line in runs.Run(run).events("update", role="head")], default=0)


def wait_for_update(run: Path, version: int) -> None:
    wait_until(
        lambda: (run / "journal").is_dir() and last_version(run) >= version, f"update {version}", 120, poll_s=0.1
    )
