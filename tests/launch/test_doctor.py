"""`areal-bus doctor`: each check where its fault is real, and the command on this machine."""

import json
import math
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.checks import machine_checks as checks
from launch.checks.machine_checks import Finding
from launch.commands import doctor


def named(found: Iterator[Finding], name: str) -> Finding:
    return next(one for one in found if one.name == name)


@pytest.fixture
def _another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metadata of a package of our name with requirements that this environment does not meet."""
    (tmp_path / "areal_bus-9.dist-info").mkdir()
    (tmp_path / "areal_bus-9.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: areal-bus\nVersion: 9\nRequires-Python: >=3.99\nRequires-Dist: numpy>=99\n"
        'Requires-Dist: no-such-package>=1\nRequires-Dist: pytest<2; extra == "old"\nProvides-Extra: old\n'
        'Requires-Dist: none-either; extra == "far"\nProvides-Extra: far\nRequires-Dist: msgpack\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("_another_package")
def test_packages_that_are_missing_or_out_of_range_are_failures_those_of_extras_warnings() -> None:
    found = {one.name: one for one in checks.check_packages()}
    assert {name: one.state for name, one in found.items()} == {
        "numpy": "failure", "no-such-package": "failure", "pytest": "warning", "msgpack": "ok", "extras": "ok",
    }  # fmt: skip
    assert found["numpy"].seen.startswith("version mismatch: ")
    assert found["no-such-package"].seen == "missing (accepted: >=1)"
    assert "areal-bus[old]" in found["pytest"].remedy
    assert found["extras"].seen.startswith("not wholly installed: far ")
    assert checks.check_python().state == "failure"


def test_limits_of_a_control_group_are_read_in_both_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "CGROUP", tmp_path)
    assert checks.kernel_number("pids.max", "pids/pids.max") == math.inf
    (tmp_path / "pids").mkdir()
    (tmp_path / "pids" / "pids.max").write_text("100\n")
    found = named(checks.check_limits(), "processes")
    assert (found.state, found.seen) == ("warning", "at most 100")
    (tmp_path / "pids.max").write_text("max\n")
    assert checks.kernel_number("pids.max") == math.inf


def test_few_open_files_are_a_warning_with_the_number_that_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 128))
    found = named(checks.check_limits(), "open files")
    assert (found.state, found.seen) == ("warning", "at most 128")
    assert "4,096" in found.remedy


def test_a_folder_that_cannot_be_written_is_a_failure_and_nothing_is_left_in_a_good_one(tmp_path: Path) -> None:
    bad = named(checks.check_run_folder(Path("/proc/self")), "run folder")
    assert bad.state == "failure"
    good = list(checks.check_run_folder(tmp_path / "runs" / "deep"))
    assert good[0].seen.startswith(f"{tmp_path} (")
    assert [one.state for one in good[:2]] == ["ok", "ok"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("text", "seen"), [("exit 3", "does not start"), (None, "missing")])
def test_an_mpirun_that_is_missing_or_does_not_start_is_a_failure(
    text: str | None, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    if text is not None:
        (tmp_path / "mpirun").write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "mpirun").chmod(0o755)
    found = checks.check_mpirun()
    assert found.state == "failure"
    assert seen in found.seen
    assert found.remedy


@pytest.mark.slow
def test_a_torch_that_does_not_import_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "TORCH_PROGRAM", "import torch_of_another_kind")
    found = list(checks.check_torch())
    assert [(one.name, one.state) for one in found] == [("torch", "failure")]
    assert found[0].seen == "cannot import: ModuleNotFoundError: No module named 'torch_of_another_kind'"


@pytest.mark.slow
def test_the_command_checks_this_machine_and_prints_json(tmp_path: Path) -> None:
    program = "import sys; from launch.commands.cli import main; sys.argv[0] = 'areal-bus'; sys.exit(main())"
    here = subprocess.run(
        [sys.executable, "-c", program, "doctor", "tiny", "--json"], cwd=tmp_path, capture_output=True, text=True,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "HOME": "/"}, check=False, timeout=120,
    )  # fmt: skip
    report = json.loads(here.stdout)
    assert (here.returncode, report["ok"]) == (0, True), here
    states = {one["name"]: one["state"] for one in report["findings"]}
    assert {states[name] for name in ("python", "ports", "torch", "mpirun", "run folder", "plan")} == {"ok"}


@pytest.mark.slow
def test_a_config_that_this_machine_cannot_run_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "findings", lambda folder: [])
    assert doctor.main(["tiny", "--set", "topology.gpus_per_host=99"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("FAILURE config: ")
    assert lines[-1] == "failures: 1, warnings: 0"
