"""`python -m tools.staleness soak | replay SEED | table`: chooses; what each does is its own module's."""

import argparse
from collections.abc import Sequence

from areal_bus.staleness import StalenessPolicy
from tools import terminal
from tools.staleness import replay, soak, table


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser("python -m tools.staleness", description=__doc__)
    commands = p.add_subparsers(dest="command", required=True)
    many = commands.add_parser("soak", help="many schedules under all policies: schedules, events, violations")
    many.add_argument("--schedules", type=int, default=1_000_000, help="how many seeds (default: a million)")
    many.add_argument("--first", type=int, default=0, help="first seed")
    many.add_argument("--jobs", type=int, default=0, help="processes (default: one a core)")
    many.add_argument("--json", action="store_true", help="one JSON line of figures and nothing else")
    one = commands.add_parser("replay", help="run one seed again and tell the story of a prompt")
    one.add_argument("seed", type=int)
    one.add_argument("--policy", type=StalenessPolicy, choices=list(StalenessPolicy), help="default: the seed's own")
    one.add_argument("--prompt", type=int, help="whose story (default: the first that breaks a rule, else nobody's)")
    costs = commands.add_parser("table", help="ages, speed, masked or wasted work and bias by policy, eta and tail")
    costs.add_argument("--steps", type=int, default=200, help="updates a cell (default: 200)")
    costs.add_argument("--seeds", type=int, default=2, help="runs a cell (default: 2)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.command == "soak":
        return soak.run(n=args.schedules, first=args.first, n_jobs=args.jobs, as_json=args.json)
    if args.command == "replay":
        return replay.run(args.seed, policy=args.policy, uid=args.prompt)
    return table.run(n_steps=args.steps, n_seeds=args.seeds)


if __name__ == "__main__":
    terminal.end(main)
