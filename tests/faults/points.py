"""Runs inside the actors of a ring under test, as the user's own module: holds the learner, strikes at named points.

The test says what is wanted by files in the folder that AREAL_FAULTS names; without it everything here is idle. A point
is armed by `Ring.arm`; whoever comes to it first takes its file away and is struck.
"""

import os
import signal
import time
from pathlib import Path

from actors.training.actor import PPOActor
from actors.training.rollout import Rollout

FOLDER = Path(os.environ.get("AREAL_FAULTS", "/nowhere"))
LOOK_S = 0.01


def is_armed(point: str) -> bool:
    """Whether this process is the one to be struck here; each arming is for one."""
    for path in sorted(FOLDER.glob(f"point-{point}-*")):
        try:
            path.rename(path.with_name(f"struck-{path.name}"))
        except FileNotFoundError:  # another process was first
            continue
        return True
    return False


def die(point: str) -> None:
    """End as by kill -9 when the point is armed."""
    if is_armed(point):
        os.kill(os.getpid(), signal.SIGKILL)


def is_held(version: int) -> bool:
    try:
        text = (FOLDER / "hold").read_text()
    except OSError:
        return False
    return bool(text) and version >= int(text)


def train(rollout: Rollout, actor: PPOActor) -> None:
    """The training loop, which takes no batch while it is held, and dies where it is told to."""
    while True:
        while is_held(actor.version):
            actor._tick()
            time.sleep(LOOK_S)
        batch = rollout.prepare_batch()
        if batch is None:
            return
        die("consumed")
        batch = actor.compute_advantages_and_returns(batch)
        actor.ppo_update(batch)
