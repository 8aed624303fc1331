"""The rows of an environment, read in a process of its own, which ends afterwards: that process runs this module."""

import random
import sys
import time
from functools import lru_cache

from actors.environments.environment_code import EnvironmentCode, Row
from actors.environments.loading import load
from actors.processes.ipc import ROWS_BYTES, Channel
from actors.processes.worker_process import CalledProcess, WorkerLost
from areal_bus.config.names.workflows import PREFIX
from areal_bus.errors import ConfigError

MODULE = "actors.environments.problems"
TIMEOUT_S = 1800.0  # to load the environment: it may download its data
SHARE = 5  # an environment without an evaluation set: at most one row of so many is held out


def environment_problems(code: EnvironmentCode, n_held_out: int, *, seed: int) -> tuple[list[Row], list[Row]]:
    """(training, held-out) rows: of the environment's two sets, or of its only one. Raises ConfigError."""
    train, own = read(code, seed)
    if not train:
        raise ConfigError(f"no rows in the dataset of {PREFIX + code.name!r}")
    if own is not None:
        return list(train), list(own[:n_held_out])
    order = random.Random(f"{PREFIX}{code.name}:{seed}").sample(range(len(train)), len(train))
    held = set(order[: min(n_held_out, len(train) // SHARE)])
    return (
        [row for number, row in enumerate(train) if number not in held],
        [row for number, row in enumerate(train) if number in held],
    )


@lru_cache(maxsize=1)  # training rows and problems are read one after the other
def read(code: EnvironmentCode, seed: int) -> tuple[list[Row], list[Row] | None]:
    """Training rows, and those of the evaluation set if there is one. Raises ConfigError."""
    what = f"workflow.function = {PREFIX + code.name!r}"
    end = time.monotonic() + TIMEOUT_S
    process = CalledProcess(MODULE, most_bytes=ROWS_BYTES, variables={})
    try:
        process.send({"code": code.order(), "path": sys.path, "seed": seed})
        answer = process.receive(lambda: end - time.monotonic())
    except WorkerLost as lost:
        raise ConfigError(f"cannot load {what}: its process is lost: {lost}") from None
    finally:
        process.kill()
    if answer is None:
        raise ConfigError(f"timed out: {what} did not load within {TIMEOUT_S:g} s")
    if "error" in answer:
        raise ConfigError(answer["error"])
    return answer["train"], answer["evaluation"]


def main(parent: int) -> None:
    """In the process: what the environment prints goes to standard error."""
    channel = Channel(parent, most_bytes=ROWS_BYTES, prints_to=sys.stderr.fileno())
    for order in channel:
        sys.path[:] = order["path"]
        random.seed(order["seed"])  # the rows of a run are the same each time that they are read
        import numpy as np  # in the process of the rows alone: the head imports this module

        np.random.seed(order["seed"] % 2**32)
        try:
            train, evaluation = load(EnvironmentCode.read(order["code"])).problems()
            channel.reply({"train": train, "evaluation": evaluation})
        except ConfigError as error:
            channel.reply({"error": str(error)})


if __name__ == "__main__":
    main(int(sys.argv[1]))
