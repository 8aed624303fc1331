"""The process that reads an environment's rows: `python -m actors.environments.problems_process`.

The order is the standard input, and the answer the standard output, both JSON. What the environment prints goes to
standard error.
"""

import json
import os
import sys

from actors.environments.code import EnvironmentCode
from actors.environments.loading import load
from areal_bus.errors import ConfigError
from areal_bus.parent_death import die_with_parent


def main() -> None:
    die_with_parent()
    order = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.path[:] = order["path"]
    try:
        train, evaluation = load(EnvironmentCode.read(order["code"])).problems()
        answer = {"train": train, "evaluation": evaluation}
    except ConfigError as error:
        answer = {"error": str(error)}
    with answers:
        json.dump(answer, answers, ensure_ascii=False)


if __name__ == "__main__":
    main()
