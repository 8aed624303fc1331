"""The world around a run: standard output that takes nothing, a locale that is not UTF-8."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.ring import CONFIG, INSIDE, ROOT
from tests.launch.test_bootstrap import MPI, MPIRUN

pytestmark = [pytest.mark.slow, pytest.mark.skipif(MPIRUN is None, reason="there is no mpirun")]
SCRIPT = Path(sys.executable).with_name("areal-bus")
STEPS = 3
PATIENCE_S = 600.0  # a loaded machine took two minutes
# Nothing is killed here: CONFIG's deadlines, short for rings that are, would restart an actor that waits for a core.
PATIENT = ("launch.timeout_s=500", "bus.silent_s=60", "weights.timeout_s=120", "reward.timeout_s=120")
QUIET = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}  # ASCII: Python leaves such a locale alone


def trained(folder: Path, redirection: str, *settings: str, environment: dict[str, str] | None = None) -> Path:
    """Train under `areal-bus run` in a shell with this redirection. The run, which has come to its end."""
    overrides = [f"run.folder={folder / 'runs'}", f"run.total_train_steps={STEPS}", *PATIENT, *settings]
    words = [str(SCRIPT), "run", str(CONFIG), "-np", "4", *(w for one in overrides for w in ("--set", one))]
    outer = os.environ | MPI | {"PYTHONPATH": str(INSIDE), "OMP_NUM_THREADS": "1"} | (environment or {})
    with (folder / "errors.txt").open("wb") as errors:
        line = ["sh", "-c", f'"$@" {redirection}', "sh", *words]
        code = subprocess.run(line, cwd=ROOT, env=outer, stderr=errors, timeout=PATIENCE_S, check=False).returncode
    said = (folder / "errors.txt").read_text(encoding="utf-8", errors="replace")
    assert code == 0, said
    run = folder / "runs" / "latest"
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert (summary["code"], summary["versions"]) == (0, STEPS), said
    assert not list((run / "journal").glob("*.1.jsonl")), f"no actor was restarted: {said}"
    return run


def latin1(folder: Path) -> dict[str, str]:
    """The environment of a Latin-1 locale, or of an ASCII one where none can be compiled."""
    name, program = "en_US.ISO-8859-1", shutil.which("localedef")
    if program is None:
        return QUIET
    made = [program, "-i", "en_US", "-f", "ISO-8859-1", str(folder / name)]
    if subprocess.run(made, capture_output=True, check=False).returncode > 1:
        return QUIET
    return {"LOCPATH": str(folder), "LC_ALL": name, "PYTHONUTF8": "0"}


def test_a_job_in_a_latin1_locale_trains_on_the_same_prompts_when_its_output_has_no_reader(tmp_path: Path) -> None:
    (tmp_path / "locale").mkdir()
    prompt = 'data.prompt="{question}> für 字"'
    alphabet = 'model.scratch.characters="abcdefghijklmnopqrstuvwxyz >ü字"'
    changes = (prompt, alphabet, "data.max_prompt_tokens=16")
    run = trained(tmp_path, "| true", *changes, environment=latin1(tmp_path / "locale"))
    settings = json.loads((run / "config.json").read_text(encoding="utf-8"))
    assert settings["data"]["prompt"] == "{question}> für 字"
    samples = (run / "samples" / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    assert samples
    assert all(json.loads(line)["prompt"].endswith("> für 字") for line in samples)
