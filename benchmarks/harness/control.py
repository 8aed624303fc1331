"""The control of benches that measure wall time on two cores: the same sgemm on both cores at once."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from benchmarks.harness import worker_process
from benchmarks.harness.interleave import Measure

CORES = 2  # that a job of two halves has


@contextmanager
def on_both_cores(*, of_jobs: bool = False) -> Iterator[Measure]:
    """Wall seconds of a product on the slower core. Unlike CPU time they show other load on the machine.

    Beside laps of whole jobs over a second or two, since a lap of a minute does not hear what lasts a tenth of one.
    """
    with ExitStack() as stack:
        sides = [stack.enter_context(worker_process.ours("harness.sgemm")) for _ in range(CORES)]

        def measure() -> float:
            for one in sides:
                one.begin("long_wall" if of_jobs else "wall")
            return max(float(one.answer()) for one in sides)

        yield measure
