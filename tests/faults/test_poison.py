"""Row 35: a prompt that kills its generator, and actors that crash at each start, are found and reported."""

import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from actors.data.loading import load_rows
from areal_bus.config.loader import load
from tests.faults.ring import CONFIG, Ring

pytestmark = pytest.mark.soak

N_ROWS = 20
SETTINGS = (
    "run.total_train_steps=5",
    "data.total_train_epochs=1",
    f"data.limit={N_ROWS}",
    "workflow.function='poison:Poison'",
)


def test_row_35_a_poisoned_prompt_is_run_alone_after_two_deaths_and_retired_by_a_third(tmp_path: Path) -> None:
    """Alone: those that were beside it twice are trained."""
    ring = Ring(tmp_path, *SETTINGS)
    rows = load_rows(load(CONFIG, SETTINGS, {}), str(CONFIG.parent))
    poison = 5
    (ring.folder / "poison").write_text(rows[poison]["question"])
    with ring.started():
        ring.finish()
    history = ring.check_survived()
    (uid,) = [uid for uid, (_, row) in history.admitted.items() if row == poison]
    assert history.refunded == {uid: "poison"}
    assert sorted(history.trained) == [other for other in range(N_ROWS) if other != uid]
    leases = ring.lines("lease", role="head", uid=uid)
    assert [line["attempt"] for line in leases] == [0, 1, 2]
    deaths = ring.lines("member", role="head", state="dead")
    assert [line["name"] for line in deaths] == [line["holder"] for line in leases]
    alone = leases[-1]
    beside = open_leases(ring, alone["holder"], before=alone["t"])
    assert beside == set()
    assert not ring.lines("lease", holder=alone["holder"], after=alone["t"])
    n_deaths = Counter(line["holder"] for line in leases)
    assert max(n_deaths.values()) == 1


def open_leases(ring: Ring, holder: str, *, before: float) -> set[int]:
    """Prompts that this generator has been leased and has not sampled to the end."""
    leased = {x["uid"]: x["n"] for x in ring.lines("lease", role="head", holder=holder) if x["t"] < before}
    for line in ring.lines("sampled", role="head"):
        if line["t"] < before and line["uid"] in leased:
            leased[line["uid"]] -= 1
    return {uid for uid, n in leased.items() if n > 0}


def test_the_sixth_crash_without_progress_ends_the_job_with_the_last_error(tmp_path: Path) -> None:
    ring = Ring(tmp_path)
    ring.set_failpoint("turn", "raise", who="generator-0", n=20)
    ring.hold_learner(3)
    with ring.started():
        ring.finish(code=1, timeout_s=400.0)  # six starts, and pauses of 8 s and less between them
    crashes = ring.failpoint_hits("turn")
    assert [fault.name for fault in crashes] == [f"generator-0.{n}" for n in range(6)]
    last = "that is 6 in a row without progress in between, and launch.max_restarts is 5"
    assert f"ended with exit code 1 (RuntimeError: failpoint turn); {last}" in ring.output
    ring.check_survived(ended=False)


def test_crashes_with_progress_in_between_end_nothing(tmp_path: Path) -> None:
    """More than launch.max_restarts of them; but each life had delivered something."""
    ring = Ring(tmp_path, "run.total_train_steps=60", "launch.max_restarts=1")
    ring.hold_learner(1)
    with ring.started():
        for life in range(3):
            ring.wait_for("start", role="generator", rank=0, inc=life)
            ring.wait_until(partial(has_delivered, ring, life), f"a sample of generator-0.{life} is acknowledged")
            ring.kill("generator-0")
        ring.hold_learner(None)
        ring.finish()
    ring.check_survived()
    assert ring.output.count("rank 2 (generator-0): killed by SIGKILL; started again") == 3


def has_delivered(ring: Ring, life: int) -> bool:
    """The head has had a sample of this life of generator-0 for a second; once it could, new prompts are let in."""
    if ring.lines("pushed", role="generator", rank=0, inc=life):
        ring.hold_learner(ring.version + 1)
    made = {(line["uid"], line["sample"]) for line in ring.lines("completion", role="generator", rank=0, inc=life)}
    scored = [line["t"] for line in ring.lines("scored", role="head") if (line["uid"], line["sample"]) in made]
    return bool(scored) and time.monotonic() - min(scored) > 1.0


def test_row_44_a_learner_that_dies_before_each_checkpoint_ends_the_job(tmp_path: Path) -> None:
    """Updates that its death undoes are no progress: the job does not repeat them for ever."""
    ring = Ring(tmp_path, "checkpoint.every_steps=0", "launch.max_restarts=1", "run.total_train_steps=100000")
    with ring.started():
        for life in range(2):
            ring.wait_until(lambda inc=life: ring.lines("step", role="learner", inc=inc), f"learner-0.{life} trains")
            ring.kill("learner-0")
        ring.finish(code=1)
    last = "killed by SIGKILL; that is 2 in a row without progress in between, and launch.max_restarts is 1"
    assert f"(learner-0): {last}" in ring.output
    ring.check_survived(ended=False)
