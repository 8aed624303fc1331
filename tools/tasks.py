"""Lists the named tasks, and checks a file of one: its gold answers, and wrong ones.

`tools/offline/check_task.py` computes.
"""

import argparse
import json
from collections.abc import Sequence

from areal_bus.config.names import named_tasks
from areal_bus.errors import ConfigError
from tools import terminal

EPILOG = """\
A task is used by data.task = "NAME" in a config, with data.path for a local file, or by tools.evaluate --task NAME.

examples:
  python -m tools.tasks list
  python -m tools.tasks check gsm8k --data test.jsonl
  python -m tools.tasks check humaneval --data HumanEval.jsonl --json
  python -m tools.tasks check reasoning-gym:chain_sum --limit 50"""


def parser() -> argparse.ArgumentParser:
    p = terminal.tool_parser("python -m tools.tasks", __doc__, EPILOG)
    commands = p.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="the tasks with their reward and evaluation protocol")
    listing.add_argument("--json", action="store_true", help="one JSON object")
    check = commands.add_parser("check", help="score gold answers and wrong ones of a file")
    check.add_argument("name", metavar="NAME", help="the task")
    check.add_argument(
        "--data",
        default="",
        metavar="FILE",
        help="its file, or a Hugging Face id (the task's own; none for generated ones)",
    )
    check.add_argument("--limit", type=int, metavar="N", help="only the first N rows (reasoning-gym: 50)")
    check.add_argument("--json", action="store_true", help="one JSON object on the last line")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.command == "list":
        return list_tasks(as_json=args.json)
    named_tasks.check_name(args.name)
    if args.name in named_tasks.GENERATED or (named_tasks.gym_task(args.name) and args.data):
        raise ConfigError(f"the task {args.name} is generated and has no file to check")
    from tools.offline.check_task import run  # imports actors

    return run(args.name, args.data, args.limit, as_json=args.json)


def list_tasks(*, as_json: bool) -> int:
    if as_json:
        tasks = {name: {"about": task.about, **task.keys()} for name, task in named_tasks.NAMED_TASKS.items()}
        print(
            json.dumps(
                tasks
                | {
                    f"{named_tasks.GYM_PREFIX}NAME": {
                        "about": "generated",
                        **named_tasks.REASONING_GYM,
                        "refused": named_tasks.GYM_REFUSED,
                    }
                }
            )
        )
        return 0
    rows = [("task", "what", "reward", "evaluation", "Hugging Face id")]
    for name, task in named_tasks.NAMED_TASKS.items():
        rows.append((name, task.about, task.reward, task.protocol, task.hub or "none: give the file"))
    rows.append(
        (
            f"{named_tasks.GYM_PREFIX}NAME",
            "generated puzzles and exercises",
            "reasoning_gym",
            "1 x greedy, pass@1",
            "generated",
        )
    )
    print("\n".join(terminal.table(rows)))
    return 0


if __name__ == "__main__":
    terminal.end_computing(main)
