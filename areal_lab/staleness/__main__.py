"""`python -m areal_lab.staleness soak | replay SEED | table`: command line; `replay` prints the events of one seed."""

import argparse
from collections.abc import Sequence

from areal_bus.core.parts.staleness import StalenessPolicy
from areal_bus.process.commands import as_here
from areal_lab.staleness import policy_table, soak
from areal_lab.staleness.simulator.scenario import draw
from areal_lab.staleness.simulator.story import tell
from tools import terminal


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(as_here("python -m areal_lab.staleness"), description=__doc__)
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
        return replay(args.seed, policy=args.policy, uid=args.prompt)
    return policy_table.run(n_steps=args.steps, n_seeds=args.seeds)


def replay(seed: int, *, policy: StalenessPolicy | None, uid: int | None) -> int:
    """Print the events of the schedule. Returns 1 if an invariant does not hold."""
    scenario = draw(seed, policy)
    outcome, _ = tell(scenario)
    about = uid
    if about is None and outcome.violations:
        about = outcome.violations[0].uid
    if about is not None or outcome.violations:
        print("\n".join(tell(scenario, about)[1]))
    for violation in outcome.violations:
        print(violation)
    end = "no end" if outcome.end is None else f"{outcome.end.sentence} (code {outcome.end.code})"
    print(
        f"seed {seed}, policy {scenario.policy}: {end}; {outcome.n_events} events, {outcome.seconds:.0f} virtual "
        f"seconds, {len(outcome.violations)} violations"
    )
    return 1 if outcome.violations else 0


if __name__ == "__main__":
    terminal.end(main)
