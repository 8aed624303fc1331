"""Recordings by torch.profiler: at given steps, on demand by SIGUSR2, and what an actor does that records none."""

import gzip
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import record_function

from actors.runtime import process, torch_profiler
from actors.runtime.torch_profiler import TorchProfiler
from areal_bus.config.sections import ProfileConfig
from areal_bus.storage.journal import Journal
from tools import run


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    made = Journal(tmp_path / "journal", role="learner", index=0, incarnation=0)
    yield made
    made.close()


def profiler(journal: Journal, settings: ProfileConfig, *, bounds_s: bool = False) -> TorchProfiler:
    return TorchProfiler("learner-0.0", journal.path.parents[1], settings, journal, bounds_s=bounds_s)


def work(recorder: TorchProfiler, *steps: int) -> None:
    for step in steps:
        recorder.turn(step)
        with record_function(f"step {step}"):
            torch.ones(4, 4).matmul(torch.ones(4, 4))


def recorded(journal: Journal) -> list[tuple[dict[str, Any], set[str]]]:
    """Each line about a recording, with the steps in its trace."""
    found = []
    for line in run.lines(journal.path, "profile"):
        with gzip.open(journal.path.parents[1] / line["file"], "rt") as file:
            names = {event.get("name", "") for event in json.load(file)["traceEvents"]}
        assert "aten::matmul" in names
        found.append((line, {name for name in names if name.startswith("step ")}))
    return found


@pytest.mark.parametrize("actor", ["learner-0.0", "learner-0"])
def test_the_steps_of_the_settings_are_recorded_and_no_other(actor: str, journal: Journal) -> None:
    recorder = profiler(journal, ProfileConfig(actor=actor, steps=(2, 3)))
    work(recorder, 0, 1, 2, 3, 4, 5)
    recorder.close(6)
    [(line, steps)] = recorded(journal)
    assert steps == {"step 2", "step 3"}
    assert (line["first"], line["last"], line["file"]) == (2, 3, "profiles/learner-0.0-step-000002.json.gz")


def test_nothing_is_recorded_without_a_reason_and_a_recording_at_the_end_is_written(journal: Journal) -> None:
    idle = [{}, {"actor": "learner-1.0", "steps": (0, 9)}, {"actor": "learner-0.0", "steps": (2, 3)}]  # the last: over
    for settings in idle:
        recorder = profiler(journal, ProfileConfig(**settings))
        work(recorder, 4, 5)
        recorder.close(6)
    assert not (journal.path.parents[1] / "profiles").exists()
    last = profiler(journal, ProfileConfig(actor="learner-0.0", steps=(4, 9)))
    work(last, 4, 5)
    last.close(6)
    assert [(line["first"], line["last"]) for line, _ in recorded(journal)] == [(4, 5)]


def test_a_generator_stops_after_the_longest_recording(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_profiler, "SECONDS", 1e-6)  # ends at the next turn
    settings = ProfileConfig(actor="learner-0.0", steps=(0, 9))
    work(profiler(journal, settings, bounds_s=True), 0, 1, 2)
    assert [(line["first"], line["last"]) for line, _ in recorded(journal)] == [(0, 0)]


@pytest.fixture
def signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR2)
    yield
    signal.signal(signal.SIGUSR2, before)


@pytest.mark.usefixtures("signals")
def test_sigusr2_records_the_next_turn_each_time_it_comes(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_profiler, "SECONDS", 1e-6)  # ends at the next turn
    process.listen_for_profile("learner-0.0", records=True)
    recorder = profiler(journal, ProfileConfig())
    for _ in range(2):
        work(recorder, 7)
        os.kill(os.getpid(), signal.SIGUSR2)
        work(recorder, 7, 8, 8)
    names = [(line["file"].removeprefix("profiles/learner-0.0-step-"), steps) for line, steps in recorded(journal)]
    assert names == [("000007.json.gz", {"step 7"}), ("000007-1.json.gz", {"step 7"})]


@pytest.mark.usefixtures("signals")
def test_an_actor_that_records_nothing_survives_sigusr2(capfd: pytest.CaptureFixture[str]) -> None:
    process.listen_for_profile("reward-0.0", records=False)
    os.kill(os.getpid(), signal.SIGUSR2)
    assert capfd.readouterr().err == "reward-0.0: SIGUSR2 records learners and generators only\n"
    assert not process.take_profile_request()


def test_a_trace_that_cannot_be_written_is_reported_and_the_job_goes_on(journal: Journal) -> None:
    (journal.path.parents[1] / "profiles").write_text("a file")
    recorder = profiler(journal, ProfileConfig(actor="learner-0.0", steps=(0, 0)))
    work(recorder, 0, 1, 2)
    assert [line["text"].split(":")[0] for line in run.lines(journal.path, "note")] == ["a recording is lost"]
