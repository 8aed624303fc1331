"""The process that reads an environment's rows: `python -m actors.environments.problems_process`.

The order is the standard input, and the answer the standard output, both JSON. What the environment prints goes to
standard error.
"""

import json
import os
import random
import sys
from typing import Any

import numpy as np

from actors.environments.environment_code import EnvironmentCode
from actors.environments.loading import load
from areal_bus.errors import ConfigError
from areal_bus.process.parent_death import die_with_parent


def main() -> None:
    die_with_parent()
    order = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.path[:] = order["path"]
    random.seed(order["seed"])  # the rows of a run are the same each time that they are read
    np.random.seed(order["seed"] % 2**32)
    answer: dict[str, Any]
    try:
        train, evaluation = load(EnvironmentCode.read(order["code"])).problems()
        answer = {"train": train, "evaluation": evaluation}
    except ConfigError as error:
        answer = {"error": str(error)}
    with answers:
        json.dump(answer, answers, ensure_ascii=False)


if __name__ == "__main__":
    main()
