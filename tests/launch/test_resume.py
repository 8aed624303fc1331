"""Resuming a run: the choice of the run, its settings, and the lock against a second job."""

import errno
import fcntl
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from actors.head.checkpoint_writer import newest_checkpoint
from areal_bus.config.loader import fields, load
from areal_bus.config.sections import Config
from areal_bus.errors import ArealBusError, ConfigError
from areal_bus.storage import head_checkpoints
from launch.commands.dry_run import dry_run
from launch.commands.main import load_settings
from launch.plan.network import local_facts
from launch.run.bootstrap import RANK_VARIABLES
from launch.run.prepare import prepare, prepare_in_subprocess
from launch.run.process import resume_hint
from launch.run.rank import exchange, journal_folders, own_answer, prepare_run, remove_all
from launch.run.resume import (
    FIXED_KEYS,
    LOCATION_KEYS,
    changed_settings,
    choose_run,
    exclusive_choice,
    find_run,
    preview_resume,
    reason_fixed,
)
from launch.run.runs import Lock, RunInUse, check_free, checkpoints, largest_incarnation, run_name
from tests.launch.test_prepare import ROWS, SMALL, write_rows
from tools.audit import run_settings
from tools.run import Run

ROOT = Path(__file__).parents[2]
EVALUATES = ("evaluate.every_steps=4", "evaluate.path=rows.jsonl")
HOLD = "import sys; from pathlib import Path; from launch.run.runs import Lock; Lock(Path(sys.argv[1])); print('held', \
flush=True); sys.stdin.read()"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config with two rows, in a working directory of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for names in RANK_VARIABLES:
        for name in names:
            monkeypatch.delenv(name, raising=False)
    write_rows(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "small.toml").write_text(SMALL)
    return tmp_path / "small.toml"


def begin(file: Path, *overrides: str) -> Path:
    """A new run's folder."""
    return Path(prepare(load(file, overrides, {}), file).run_folder)


def resume(run: Path, file: Path, *overrides: str) -> tuple[str, ...]:
    """Resume the run: the printed lines."""
    return prepare(load(file, [*overrides, f"run.resume={run}"], {}), file, run).notes


def summarize(run: Path, **summary: Any) -> None:
    (run / "summary.json").write_text(json.dumps(summary))


def checkpoint(run: Path, *versions: int) -> None:
    (run / "frontiers").mkdir(exist_ok=True)
    for version in versions:
        (run / "checkpoints" / f"step-{version:06d}").mkdir(parents=True)
        (run / "frontiers" / f"frontier-{version:06d}").touch()


def found(file: Path, *overrides: str) -> Path | None:
    return find_run(load(file, overrides, {}), "small")


def test_fixed_keys_cover_every_section_and_name_only_real_keys() -> None:
    assert set(Config.model_fields) <= set(FIXED_KEYS)
    keys = set(fields())
    assert [name for name in FIXED_KEYS if not any(f"{key}.".startswith(f"{name}.") for key in keys)] == []
    assert keys >= LOCATION_KEYS


def test_settings_that_define_a_run_are_fixed_and_settings_of_its_execution_may_change() -> None:
    stay = {key for key in fields() if reason_fixed(key)} - LOCATION_KEYS
    assert stay >= {"run.seed", "model.path", "model.scratch.layers", "data.path", "data.batch_size", "data.limit"}
    assert stay >= {"gconfig.n_samples", "rollout.max_head_offpolicyness", "rollout.staleness_policy", "journal.dir"}
    free = set(fields()) - stay
    assert free >= {"run.total_train_steps", "actor.lr", "topology.generators", "launch.timeout_s", "bus.silent_s"}
    assert free >= {"checkpoint.every_steps", "evaluate.after", "data.total_train_epochs", "reward.workers"}
    assert reason_fixed("nothing.of_the_kind")


def test_the_page_on_resuming_names_every_fixed_setting() -> None:
    page = (ROOT / "docs" / "resume.md").read_text(encoding="utf-8")
    named = {cell for line in page.splitlines() if line.startswith("| `") for cell in re.findall(r"`([^`]+)`", line)}
    assert {key for key, reason in FIXED_KEYS.items() if reason} <= named
    assert not {key for key in named if FIXED_KEYS.get(key) == ""}


def test_a_resumed_run_keeps_its_folder_and_takes_the_new_settings(file: Path) -> None:
    run = begin(file)
    assert (run / "config.toml").read_text() == SMALL
    old = (run / "config.json").read_text()
    summarize(run, code=0, drained=True)
    checkpoint(run, 10, 20)
    begin(file, "run.name=other")
    notes = resume(run, file, "actor.lr=0.5", "run.total_train_steps=30", "topology.rewards=2")
    assert notes == (
        f"resumes {run} (start 2; checkpoints step-000020, step-000010), with 3 changed settings:",
        "  run.total_train_steps: 10 -> 30",
        "  topology.rewards: 1 -> 2",
        "  actor.lr: 2e-05 -> 0.5",
    )
    assert Config.model_validate_json((run / "config.json").read_text()).actor.lr == 0.5
    assert (run / "config-1.json").read_text() == old
    assert json.loads((run / "summary-1.json").read_text())["drained"]
    assert not (run / "summary.json").exists()
    assert (file.parent / "runs" / "latest").resolve() == run
    again = resume(run, file, "actor.lr=0.5", "run.total_train_steps=30", "topology.rewards=2")
    assert again == (f"resumes {run} (start 3; checkpoints step-000020, step-000010), with 0 changed settings",)


def test_changed_fixed_settings_are_refused_together_each_with_its_reason(file: Path) -> None:
    run = begin(file)
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    with pytest.raises(ConfigError) as caught:
        resume(run, file, "data.batch_size=4", "model.scratch.layers=1", "actor.lr=0.5", "run.seed=7")
    output = str(caught.value)
    assert "\n" not in output
    assert "run.seed: 1 -> 7 (the order of the data" in output
    assert "model.scratch.layers: 3 -> 1 (" in output
    assert "data.batch_size: 8 -> 4 (the backlog" in output
    assert "actor.lr" not in output
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == before


def test_stages_may_change_after_the_newest_checkpoint_and_not_before(file: Path) -> None:
    run = begin(file, "run.stage=[{from_step=3, gconfig={max_new_tokens=9}}]")
    checkpoint(run, 4)
    kept = "{from_step=3, gconfig={max_new_tokens=9}}"
    added = f"run.stage=[{kept}, {{from_step=5, gconfig={{n_samples=4}}}}]"
    assert "  run.stage: " in resume(run, file, added)[1]
    for late in ("{from_step=4, gconfig={n_samples=4}}", "{from_step=3, gconfig={max_new_tokens=10}}"):
        stages = f"{kept}, {late}" if "from_step=4" in late else late
        with pytest.raises(ConfigError, match=r"run\.stage: .* \(open prompts keep the limits of the stage"):
            resume(run, file, f"run.stage=[{stages}]")
    budget = "{from_step=4, learner={max_tokens_per_mb=77}}"
    assert "  run.stage: " in resume(run, file, f"run.stage=[{kept}, {budget}]")[1], "no prompt depends on it"


def test_a_run_cannot_end_before_its_checkpoint(file: Path) -> None:
    run = begin(file)
    checkpoint(run, 20)
    resume(run, file, "run.total_train_steps=20")
    with pytest.raises(ConfigError, match=r"total_train_steps must not be below .* it is 19, .* has one of version 20"):
        resume(run, file, "run.total_train_steps=19")


def test_other_rows_under_the_same_name_are_refused(file: Path) -> None:
    run = begin(file)
    write_rows(file.parent / "rows.jsonl", [*ROWS, {"question": "b", "answer": "b"}])
    with pytest.raises(ConfigError, match=r"began with 2 rows .* now it has 3"):
        resume(run, file)


def test_an_added_or_removed_section_is_a_change() -> None:
    before, after = Config(), Config.model_validate({"model": {"path": "m", "scratch": {"layers": 2}}})
    keys = [change.key for change in changed_settings(before, after)]
    assert {"model.path", "model.scratch.layers"} <= set(keys)
    assert {change.key for change in changed_settings(after, before)} == set(keys)


@pytest.mark.parametrize(
    ("summary", "resumes"),
    [({"code": 0}, False), ({"code": 0, "drained": True}, True), ({"code": 1}, True), ({}, True)],
)
def test_a_failed_or_drained_run_is_not_finished(file: Path, summary: dict[str, Any], resumes: bool) -> None:
    run = begin(file)
    if summary:
        summarize(run, **summary)
    assert found(file, "run.resume=auto") == (run if resumes else None)
    if resumes:
        assert found(file, f"run.resume={run}") == run
    else:
        with pytest.raises(
            ConfigError, match=r"no checkpoint in .*: a finished run is extended from its last one; start a new run"
        ):
            found(file, f"run.resume={run}")


def test_a_finished_run_continues_with_more_steps_and_a_checkpoint(file: Path) -> None:
    run = begin(file)
    summarize(run, code=0, versions=10)
    with pytest.raises(ConfigError, match=r"no checkpoint in .*: a finished run is extended from its last one"):
        found(file, f"run.resume={run}", "run.total_train_steps=20")
    checkpoint(run, 10)
    with pytest.raises(ConfigError, match=r"finished at version 10; raise run.total_train_steps \(--resume"):
        found(file, f"run.resume={run}", "run.total_train_steps=10")
    assert found(file, "run.resume=auto", "run.total_train_steps=20") is None  # what is queued again is done
    chosen = choose_run(load(file, [f"run.resume={run}", "run.total_train_steps=20"], {}), "small")
    assert chosen is not None
    assert chosen[0] == run
    chosen[1].release()
    assert resume(run, file, "run.total_train_steps=20") == (
        f"extends {run}, which had finished at version 10 (start 2; checkpoints step-000010), with 1 changed setting:",
        "  run.total_train_steps: 10 -> 20",
    )
    assert not (run / "summary.json").exists()


def test_a_run_that_ended_with_its_data_needs_more_epochs_to_continue(file: Path) -> None:
    run = begin(file, "data.total_train_epochs=1")
    summarize(run, code=0, versions=7)
    checkpoint(run, 7)
    with pytest.raises(ConfigError, match=r"raise data.total_train_epochs \(its data ended: it was 1\)"):
        found(file, f"run.resume={run}", "run.total_train_steps=20", "data.total_train_epochs=1")
    assert found(file, f"run.resume={run}", "data.total_train_epochs=2") == run
    assert found(file, f"run.resume={run}") == run  # no limit


def stopped_early(file: Path, *scores: float) -> Path:
    """A run of 100 steps with a patience of 2 that stopped at its last evaluation; one every 4 steps."""
    run = begin(file, "run.total_train_steps=100", *EVALUATES, "evaluate.early_stop_patience=2")
    figures = {
        f"step-{v}": {"version": v, "avg_at_k": score} for v, score in zip(range(4, 99, 4), scores, strict=False)
    }
    summarize(run, code=0, versions=4 * len(scores), evaluations=figures)
    checkpoint(run, 4 * len(scores))
    return run


def test_a_run_that_stopped_early_is_extended_with_a_larger_or_no_patience_as_its_refusal_says(file: Path) -> None:
    run = stopped_early(file, 0.5, 0.4, 0.45)
    remedy = f"(--resume {run} --set evaluate.early_stop_patience=0)"
    for more in ((), ("run.total_train_steps=200",)):  # more steps alone would change nothing
        with pytest.raises(ConfigError, match=r"avg_at_k did not improve in 2 evaluations") as caught:
            find_run(load_settings(None, str(run), more)[0], "small")
        assert remedy in str(caught.value)
    with pytest.raises(ConfigError, match=r"did not improve in 1 evaluations"):
        find_run(load_settings(None, str(run), ["evaluate.early_stop_patience=1"])[0], "small")
    for patience in ("evaluate.early_stop_patience=3", remedy.split("--set ")[1].rstrip(")")):
        config, _ = load_settings(None, str(run), [patience])
        assert find_run(config, "small") == run
    assert prepare(config, file, run).notes[0].startswith(f"extends {run}, which had finished at version 12 (start 2;")
    starts = [json.loads((run / name).read_text()) for name in ("config.json", "config-1.json")]
    assert run_settings.read(starts[0], starts[1:]).stops_early, "the audit knows that an earlier start could"
    assert not run_settings.read(starts[0]).stops_early


def test_a_folder_that_is_not_a_run_is_refused(file: Path) -> None:
    run = begin(file)
    for wanted, why in (
        ("nowhere", "'nowhere' is not a folder"),
        (run.name, f"'{run.name}' is not a folder; did you mean runs/{run.name}?"),
        (str(file), f"'{file}' is not a folder"),
        (str(file.parent), f"{file.parent} has no config.json"),
        (str(run.parent), f"{run.parent} has no config.json and is the folder of all runs"),
    ):
        with pytest.raises(ConfigError) as caught:
            found(file, f"run.resume={wanted}")
        assert str(caught.value) == f"--resume takes the folder of a run, or auto: {why}"


def test_auto_takes_the_unfinished_run_of_the_name_that_was_started_last(file: Path) -> None:
    config = load(file, ["run.resume=auto"], {})
    assert choose_run(config, "small") is None
    first, second, third = begin(file), begin(file), begin(file)
    begin(file, "run.name=small-9")  # another name, though it looks like the ninth of this one
    resume(second, file)  # so the second was started last
    for age, run in enumerate((second, first, third)):  # the clock was set back meanwhile
        Lock(run).release()
        os.utime(run / "lock", (1e9 + age, 1e9 + age))
    assert [found(file, "run.resume=auto"), found(file, "run.resume="), found(file)] == [second, None, None]
    summarize(second, code=0)
    chosen = choose_run(config, "small")
    assert chosen is not None
    assert chosen[0] == third
    chosen[1].release()


def test_copies_next_to_checkpoints_are_ignored(file: Path) -> None:
    run = begin(file)
    checkpoint(run, 4, 10)
    for name in ("step-000012.good", "step-000012 (copy)", "step-12", "step-0000012", "step-best"):
        (run / "checkpoints" / name / "model").mkdir(parents=True)
    for name in ("frontier-000012.good", "frontier-12", "frontier-000004.bak", "frontier-0000012"):
        (run / "frontiers" / name).write_text("a copy")
    (run / "checkpoints" / "step-000013").write_text("a file")
    (run / "config-1 (copy).json").write_text("{}")
    assert [path.name for path in checkpoints(run)] == ["step-000010", "step-000004"]
    assert newest_checkpoint(run, 11).endswith("step-000010")
    assert head_checkpoints.versions(run / "frontiers") == [4, 10]
    assert head_checkpoints.usable(run / "frontiers") == []  # whole ones only
    assert f"the newest checkpoint is {run / 'checkpoints' / 'step-000010'}, " in resume_hint(run, 4)
    assert resume(run, file)[0].startswith(f"resumes {run} (start 2; checkpoints step-000010, step-000004)")
    assert Run(run).earlier_configs() == [json.loads((run / "config-1.json").read_text())]


def test_a_config_file_cannot_give_a_reserved_name_to_its_run(file: Path) -> None:
    latest = file.with_name("latest.toml")
    latest.write_text(file.read_text(encoding="utf-8"))
    for start in (lambda: prepare(load(latest, [], {}), latest), lambda: preview_resume(load(latest), latest)):
        with pytest.raises(ConfigError, match=r"run.name must be a folder's name of its own: 'latest'"):
            start()
    assert not (file.parent / "runs").exists()
    assert prepare(load(latest, ["run.name=first"], {}), latest).run_folder.endswith("runs/first")


@pytest.mark.parametrize("name", ["x" * 201, "\u4e00" * 67, "a\nb", "a\x1b[2Jb", "caf\udce9"])
def test_a_config_file_with_a_name_that_no_run_can_have_is_refused(name: str) -> None:
    """A name of 250 bytes was "a folder that is not writable"."""
    with pytest.raises(ConfigError, match="must have at most 200 bytes and no control character"):
        run_name(Config(), Path("/") / f"{name}.toml")
    assert run_name(Config(), Path("/") / f"{'x' * 200}.toml") == "x" * 200


def test_a_folder_in_the_place_of_the_latest_link_ends_no_start(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A copy of runs/ that followed its links has one; every later start in it failed."""
    (file.parent / "runs" / "latest" / "journal").mkdir(parents=True)
    assert begin(file).name == "small"
    assert "latest cannot point to this run: Is a directory; remove it\n" in capsys.readouterr().err
    assert sorted(path.name for path in (file.parent / "runs").iterdir()) == ["latest", "small"]


def test_a_running_run_is_refused_or_waited_for_and_that_of_a_killed_job_is_not(file: Path) -> None:
    run = begin(file)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "held\n"
        config = load(file, [f"run.resume={run}"], {})
        with pytest.raises(RunInUse, match=rf"a run can have one job at a time: {run} runs now \(pid {job.pid} on "):
            choose_run(config, "small")
        with pytest.raises(RunInUse):
            preview_resume(config, file)
        job.kill()
        Lock(run, wait_s=20.0).release()  # as with run.resume = "auto"
        job.wait(10)
    check_free(run)
    chosen = choose_run(config, "small")
    assert chosen is not None
    chosen[1].release()


class Late(Lock):
    """A lock whose holder finishes the run while this start waits."""

    def __init__(self, run: Path, **how: Any) -> None:
        if (run / "config.json").exists():
            summarize(run, code=0)
        super().__init__(run, **how)


def test_auto_ends_with_0_when_the_job_it_waited_for_has_finished_the_run(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = begin(file)
    monkeypatch.setattr("launch.run.runs.Lock", Late)
    cleanup: list[Any] = []
    answer = prepare_run(load(file, ["run.resume=auto"], {}), file, cleanup, facts=[local_facts()], address="127.0.0.1")
    remove_all(cleanup)
    assert answer == {"code": 0}
    assert capsys.readouterr().out.startswith(f'run.resume = "auto": the job before this one has finished {run}')
    assert [path.name for path in sorted(run.parent.iterdir()) if path.name[0] != "."] == ["latest", "small"]
    config = load(file, ["run.resume=auto"], {})
    assert choose_run(config, "small") is None  # started anew later it begins a new run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "error"),
    [
        (
            "launch.plan.network.tempfile.mkdtemp",
            FileNotFoundError(errno.ENOENT, "No usable temporary directory found"),
        ),
        ("launch.run.runs.os.open", PermissionError(errno.EACCES, "Permission denied", "runs/small/lock")),
        ("launch.run.rank.first_split", OSError(errno.EROFS, "Read-only file system", "split.json")),
        ("launch.run.prepare.subprocess.run", OSError(errno.ENOMEM, "Cannot allocate memory")),
        ("launch.run.rank.first_split", RuntimeError("two\nlines")),
        ("launch.run.rank.first_split", MemoryError()),
    ],
)
def test_an_error_at_rank_0_ends_all_ranks_with_a_sentence_and_keeps_an_unexpected_ones_traceback(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, where: str, error: Exception
) -> None:
    run = begin(file)

    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(where, refuse)
    config = load(file, [f"run.resume={run}"], {})
    cleanup: list[Any] = []
    answer = prepare_run(config, file, cleanup, facts=[local_facts()], address="127.0.0.1")
    remove_all(cleanup)
    said = capsys.readouterr().err
    assert answer == {"code": 1}  # what the other ranks get: they end at once
    assert said.count("\n") == 1
    if isinstance(error, OSError):
        assert said.startswith(f"error: {error.strerror}")
        assert "TMPDIR" in said
    else:
        kept = Path(config.run.folder) / "start.error.txt"
        assert said.startswith(f"error: unexpected error while the run was prepared: {type(error).__name__}")
        assert said.rstrip().endswith(f"full traceback: {kept}")
        assert "in refuse" in kept.read_text(encoding="utf-8")


def test_an_error_of_another_rank_before_the_last_exchange_ends_all_ranks(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folders: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", "journal")

    monkeypatch.setattr("launch.run.rank.largest_incarnation", refuse)
    answer = own_answer(load(file, [], {}), 3, {})
    assert answer["code"] == 1
    assert capsys.readouterr().err.startswith("rank 3: error: Permission denied: journal")
    good: dict[str, Any] = {"incarnations": 0, "resumed": False, "run_folder": "runs/x"}
    assert exchange(Ranks([good, answer]), good)["code"] == 1
    assert exchange(Ranks([good, {"incarnations": 4}]), good | {"resumed": True}).get("code") is None


class Ranks:
    """A bootstrap whose ranks have all answered."""

    rank, size = 0, 2

    def __init__(self, answers: list[dict[str, Any]]) -> None:
        self._answers = [json.dumps(answer).encode() for answer in answers]

    def allgather(self, data: bytes) -> list[bytes]:
        return self._answers

    def finish_exchanges(self) -> None:
        """Nothing to close."""

    def close(self) -> None:
        """Nothing to close."""


def test_a_disk_that_is_full_while_a_run_is_prepared_ends_with_a_sentence(file: Path) -> None:
    limited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limited[1]))  # of the child, too: it cannot write a byte
    try:
        with pytest.raises(ArealBusError, match=r"File too large.*: the run cannot start"):
            prepare_in_subprocess(load(file, [], {}), file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limited)


def test_only_one_start_with_auto_chooses_its_run_at_a_time(file: Path) -> None:
    config = load(file, ["run.resume=auto"], {})
    with exclusive_choice(config, "small"):
        with exclusive_choice(load(file, (), {}), "small"), exclusive_choice(config, "other"):
            pass
        held = rf"may choose its run at a time: pid {os.getpid()} on .* holds the lock"
        with pytest.raises(ConfigError, match=held), exclusive_choice(config, "small", wait_s=0.1):
            pass
    with exclusive_choice(config, "small"):
        pass


def test_a_file_system_without_locks_gives_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(*_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    Lock(tmp_path).release()
    output = f"warning: no lock protects this run from a second job: {tmp_path / 'lock'}: No locks available\n"
    assert capsys.readouterr().err == output


def test_incarnations_continue_above_the_largest_of_all_journals(tmp_path: Path) -> None:
    config = Config.model_validate({"journal": {"dir": str(tmp_path / "node")}})
    folders = journal_folders(config, {"run_folder": str(tmp_path / "run")})
    assert largest_incarnation(folders) == -1
    for name in ("run/journal/head-0.2.jsonl", "node/generator-11.14.jsonl", "node/notes.99.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert largest_incarnation(folders) == 14
    assert journal_folders(config, {}) == [tmp_path / "node"]


def test_without_a_config_file_a_resumed_run_keeps_its_settings(file: Path) -> None:
    run = begin(file, "actor.lr=0.5", "run.name=mine")
    config, origin = load_settings(None, str(run), ["actor.eps_clip=0.4"])
    assert (config.actor.lr, config.actor.eps_clip, config.run.resume, origin) == (0.5, 0.4, str(run), file)
    before = Config.model_validate_json((run / "config.json").read_text())
    assert [change.key for change in changed_settings(before, config)] == ["actor.eps_clip"]
    prepare_run = prepare_in_subprocess(config, origin, run)
    assert Path(prepare_run.run_folder) == run
    assert (prepare_run.resumed, len(prepare_run.notes)) == (True, 2)


def test_a_dry_run_shows_the_run_that_it_would_resume(file: Path) -> None:
    run = begin(file)
    page = dry_run(load(file, ["run.resume=auto", "actor.lr=0.5"], {}), file, 3)
    assert page.startswith(f"resumes {run} (start 2; no checkpoint yet: from version 0), with 1 changed setting:\n  a")
    assert not (run / "config-1.json").exists()
    with pytest.raises(ConfigError, match="set them back, or start a new run with another"):
        dry_run(load(file, ["run.resume=auto", "run.seed=2"], {}), file, 3)
    summarize(run, code=0)
    page = dry_run(load(file, ["run.resume=auto"], {}), file, 3)
    assert page.startswith("run.resume = \"auto\": runs has no unfinished run of 'small': a new run starts\n")
