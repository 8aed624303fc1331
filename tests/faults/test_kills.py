"""Row 2: generators are killed at random while they sample. Nothing is lost or trained twice."""

import random
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from tests.faults.ring import Fault, Ring

pytestmark = pytest.mark.soak

N_GENERATORS = 3
N_KILLS = 100
REISSUED_S = 5.0


def test_row_02_kill_generators_at_random(tmp_path: Path) -> None:
    """One of three, 0.3 to 0.5 s after it was seen to sample in a new life; another one is healthy then."""
    dice = random.Random(2)
    ring = Ring(tmp_path, "run.total_train_steps=100000", "launch.max_restarts=100", ranks=N_GENERATORS + 2)
    ring.throttle(0.02)
    lives = [0] * N_GENERATORS
    faults: list[Fault] = []
    with ring.started():
        while len(faults) < N_KILLS:
            index = dice.randrange(N_GENERATORS)
            ring.wait_until(
                partial(is_sampling, ring, index, lives[index]), f"generator-{index}.{lives[index]} samples"
            )
            others = [(i, life) for i, life in enumerate(lives) if i != index]
            ring.wait_until(partial(any_is_healthy, ring, others), "another one is healthy")
            time.sleep(dice.uniform(0.3, 0.5))  # the fault's own time: nothing is waited for
            faults.append(ring.kill(f"generator-{index}"))
            lives[index] += 1
        ring.wait_for("update", version=ring.version + 5)
        ring.send(signal.SIGUSR1)
        ring.finish()
    history = ring.check_survived(ended=False)
    assert history.n_terms == 1
    leases, made = ring.lines("lease", role="head"), ring.lines("sampled", "scored", role="head")
    n_again = 0
    for fault in faults:
        assert fault.name in {line["name"] for line in ring.lines("member", role="head", state="dead")}
        held = {line["uid"]: line for line in leases if line["holder"] == fault.name}
        for uid, lease in held.items():
            n_left = lease["n"] - len(
                {x["sample"] for x in made if (x["uid"], x["attempt"]) == (uid, lease["attempt"])}
            )
            again = [x for x in leases if x["uid"] == uid and x["attempt"] == lease["attempt"] + 1]
            assert bool(again) >= (n_left > 0)
            assert all(line["t"] - fault.t < REISSUED_S for line in again)
            n_again += len(again)
    assert n_again >= N_KILLS / 2


def is_sampling(ring: Ring, index: int, life: int) -> bool:
    """This life of the generator has begun samples that it has not completed."""
    begun = ring.lines("request", role="generator", rank=index, inc=life)
    return len(begun) > len(ring.lines("completion", role="generator", rank=index, inc=life))


def any_is_healthy(ring: Ring, lives: list[tuple[int, int]]) -> bool:
    return any(ring.lines("member", role="head", name=f"generator-{i}.{life}", state="healthy") for i, life in lives)
