"""Row 35: a prompt that kills its generator, and actors that crash at each start, are found and reported."""

from collections import Counter
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
