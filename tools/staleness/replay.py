"""One seed again, with the story of a prompt: the one that broke a rule, or the one asked for."""

from areal_bus.simulation.scenario import draw
from areal_bus.simulation.story import tell
from areal_bus.staleness import StalenessPolicy


def run(seed: int, *, policy: StalenessPolicy | None, uid: int | None) -> int:
    """Prints the story. Returns 1 when an invariant does not hold."""
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
