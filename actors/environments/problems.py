"""The rows of an environment, read in a process of its own, which ends afterwards."""

import json
import os
import random
import subprocess
import sys
from functools import lru_cache
from typing import Any

from actors.environments.environment_code import EnvironmentCode
from areal_bus.config.names.workflows import PREFIX
from areal_bus.errors import ConfigError
from areal_bus.process.isolation import CHILD, child_path

MODULE = "actors.environments.problems_process"
TIMEOUT_S = 1800.0  # to load the environment: it may download its data
SHARE = 5  # an environment without an evaluation set: at most one row of so many is held out

Row = dict[str, Any]


def environment_problems(code: EnvironmentCode, n_held_out: int, *, seed: int) -> tuple[list[Row], list[Row]]:
    """(training, held-out) rows: of the environment's two sets, or of its only one. Raises ConfigError."""
    train, own = read(code, seed)
    if not train:
        raise ConfigError(f"the dataset of {PREFIX + code.name!r} must have a row: it has none")
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
    try:
        done = subprocess.run(
            [*CHILD, MODULE],
            input=json.dumps({"code": code.order(), "path": sys.path, "seed": seed}),
            env=os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": child_path()},
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",  # the environment may print anything
            timeout=TIMEOUT_S,
            check=False,
            encoding="utf-8",
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{what} must load within {TIMEOUT_S:g} s: it did not") from None
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        raise ConfigError(f"{what} must load: its process ended by exit code {done.returncode}") from None
    if "error" in answer:
        raise ConfigError(answer["error"])
    return answer["train"], answer["evaluation"]
