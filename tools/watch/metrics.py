"""The figures of a frame in the text format of Prometheus, version 0.0.4.

Pure. docs/watch.md lists the names.
"""

from collections.abc import Iterator

from tools.watch.live_run import Frame

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATES = ("alive", "stalled", "interrupted", "dead", "ended", "failed")
Sample = tuple[dict[str, str], float]


def exposition(frame: Frame) -> str:
    """One gauge for each figure that the frame has."""
    lines = []
    for name, meaning, samples in gauges(frame):
        if samples:
            lines += [f"# HELP areal_bus_{name} {meaning}", f"# TYPE areal_bus_{name} gauge"]
            lines += [f"areal_bus_{name}{labels(given)} {value!r}" for given, value in samples]
    return "\n".join(lines) + "\n"


def gauges(frame: Frame) -> Iterator[tuple[str, str, list[Sample]]]:
    """Name, meaning, samples with their labels."""
    yield "run_state", "1 for the state of the run.", [({"state": one}, float(one == frame.state)) for one in STATES]
    for name, meaning, value in (
        ("version", "Number of updates.", frame.version),
        ("published_version", "Newest version that all generators have.", frame.published),
        ("steps", "Number of updates of the whole run.", frame.n_steps),
        ("seconds_left", "Seconds until the last update, at the speed so far.", frame.left_s),
        ("term", "Number of times that the learner went back to a checkpoint.", frame.term),
    ):
        yield name, meaning, [] if value is None else [({}, float(value))]
    yield "prompts", "Prompts at each stage of the ring.", [({"stage": one}, float(n)) for one, n in frame.flow.items()]
    curves = [({"series": name}, points[-1][1]) for name, points in frame.curves.items()]
    yield "figure", "Newest value of a series (docs/trackers.md).", curves
    actors = [({"name": one.name}, one.silent_s) for one in frame.actors]
    yield "actor_silent_seconds", "Seconds since the actor's last journal line.", actors
    alarms = [({"name": one.name}, float(one.is_active)) for one in frame.alarms]
    yield "alarm", "1 while the rule of a raised alarm holds.", alarms


def labels(given: dict[str, str]) -> str:
    pairs = ",".join(f'{name}="{escaped(value)}"' for name, value in given.items())
    return f"{{{pairs}}}" if pairs else ""


def escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
