"""Rules of [topology.adapt], and the settings of each split that it may reach. Pure: no I/O."""

from areal_bus.config.sections import Config, TopologyConfig

Rule = tuple[bool, str]  # (whether it is violated, error text)


def is_adaptive(topology: TopologyConfig) -> bool:
    """Whether ranks may change between learning and sampling."""
    return bool(topology.adapt.schedule)


def learner_counts(topology: TopologyConfig) -> list[int]:
    """The numbers of learner ranks that the job may have, in ascending order."""
    return sorted({topology.learners, *(learners for _, learners in topology.adapt.schedule)})


def with_learners(topology: TopologyConfig, learners: int) -> TopologyConfig:
    """The topology of one split, which stays: all other ranks sample."""
    return topology.model_copy(
        update={"learners": learners, "generators": None, "adapt": type(topology.adapt)()},
    )


def settings_by_split(config: Config) -> dict[int, Config]:
    """Number of learner ranks -> the settings with that split."""
    counts = learner_counts(config.topology)
    return {n: config.model_copy(update={"topology": with_learners(config.topology, n)}) for n in counts}


def adapt_rules(c: Config) -> list[Rule]:
    """Rules for a split that changes."""
    topology = c.topology
    if not is_adaptive(topology):
        return []
    steps = [step for step, _ in topology.adapt.schedule]
    counts, width = learner_counts(topology), topology.tensor_parallel
    uneven = [n for n in counts if (n - counts[0]) % width]
    most = None if topology.generators is None else topology.learners + (topology.generators - 1) * width
    key = "topology.adapt.schedule"
    return [
        (
            steps != sorted(set(steps)) or steps[0] < 1 or steps[-1] >= c.run.total_train_steps,
            f"{key} has pairs [step, learners] with ascending steps from 1 to {c.run.total_train_steps - 1}: its steps "
            f"are {steps}",
        ),
        (counts[0] < 1, f"{key}: at least one rank learns; it has {counts[0]} learners"),
        (
            most is not None and counts[-1] > most,
            f"{key}: at least one generator must be left; {counts[-1]} learners leave none of "
            f"{topology.learners} + {topology.generators} x {width} ranks",
        ),
        (
            bool(uneven),
            f"a generator of topology.tensor_parallel = {width} ranks becomes {width} learner ranks: numbers of "
            f"learners differ by multiples of it, and {', '.join(map(str, [*uneven, counts[0]]))} do not",
        ),
        (
            bool(c.engine.urls),
            "[topology.adapt] ends engines whose ranks learn, and servers of engine.urls do not end with a rank: "
            "remove engine.urls (generators then start their servers), or topology.adapt",
        ),
        (
            topology.ranks_per_gpu > 1,
            "[topology.adapt] needs a GPU for each rank, because a GPU holds one role at a time: set "
            f"topology.ranks_per_gpu = 1 (it is {topology.ranks_per_gpu}), or remove topology.adapt",
        ),
    ]
