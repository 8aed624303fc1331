"""How many samples a generator is leased at once, and how many trajectories go together; by the settings alone."""

from areal_bus.config.sections import Config


def slots(config: Config) -> int:
    """Samples that a generator has under way at once.

    Agents take a process each, and those that would wait for one may find it at another generator.
    """
    n_slots, workflow = config.rollout.max_concurrent_rollouts, config.workflow
    return min(n_slots, workflow.agent.workers) if workflow.function == "agent" else n_slots


def groups_waiting(config: Config) -> int:
    """Groups that a generator asks for beside its slots.

    Leases are whole groups: without one that waits, slots stay empty until there are enough of them for the next. With
    two, a group's worth of trajectories may go together while others still wait. One of agents, which may find a
    process at another generator, and of servers, whose own queue knows no episodes.
    """
    queues_here = config.rollout.engine in ("builtin", "simulated")
    return 2 if queues_here and config.workflow.function != "agent" else 1


def capacity(config: Config) -> int:
    """Samples that a generator asks the head for: those in its slots and those that wait for one to be free."""
    return slots(config) + groups_waiting(config) * config.gconfig.n_samples


def together(config: Config) -> int:
    """Trajectories that go together while all slots are taken: so many that a group can be leased for them.

    Where one group waits, half of it: the other half is there until the head has leased the next.
    """
    n_samples = config.gconfig.n_samples
    return n_samples if groups_waiting(config) > 1 else n_samples // 2
