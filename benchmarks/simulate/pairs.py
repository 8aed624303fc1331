"""The jobs of bench `simulate`, and which job's journal predicts which other job."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from areal_lab.ring.workload import LengthLaw

N_SAMPLES = 4
LAWS = {
    "medium": (LengthLaw(60, 0.5), 300),
    "long": (LengthLaw(120, 0.4), 500),
    "wide": (LengthLaw(60, 1.0), 600),
}  # name -> (law, limit of an answer)


@dataclass(frozen=True, slots=True)
class Job:
    """One job."""

    engine: Literal["builtin", "simulated"]
    learners: int
    generators: int
    eta: int
    batch_size: int
    law: str

    @property
    def name(self) -> str:
        parts = self.engine, f"{self.learners}-{self.generators}", f"eta{self.eta}", f"B{self.batch_size}", self.law
        return "-".join(parts)

    @property
    def n_steps(self) -> int:
        """Updates: about ten seconds on two cores, and enough to measure after the warm-up."""
        law, most = LAWS[self.law]
        n_tokens = {"builtin": 200_000, "simulated": 70_000}[self.engine]
        wanted = round(n_tokens / (self.batch_size * N_SAMPLES * law.mean(most)))
        return max(wanted, 12) + self.eta + 4


def builtin(learners: int, generators: int, eta: int, batch_size: int, law: str) -> Job:
    return Job("builtin", learners, generators, eta, batch_size, law)


def simulated(learners: int, generators: int, eta: int, batch_size: int, law: str) -> Job:
    return Job("simulated", learners, generators, eta, batch_size, law)


ALONE = builtin(1, 1, 0, 32, "medium")  # the halves take turns
CROWDED = builtin(1, 2, 1, 32, "medium")  # three processes compute on two cores
TWO_RANKS = builtin(2, 1, 1, 32, "medium")  # FSDP2 over gloo: its waits are in the run
LONG = builtin(1, 1, 2, 16, "long")
MADE_UP = simulated(1, 3, 0, 16, "medium")
MADE_UP_ASYNC = simulated(1, 3, 2, 16, "medium")

PAIRS: Sequence[tuple[Job, Job]] = (
    (ALONE, builtin(1, 1, 1, 32, "medium")),
    (ALONE, builtin(1, 1, 4, 32, "medium")),
    (ALONE, builtin(1, 2, 0, 32, "medium")),
    (ALONE, CROWDED),
    (ALONE, builtin(1, 1, 1, 16, "medium")),
    (CROWDED, ALONE),
    (CROWDED, builtin(1, 3, 1, 32, "medium")),
    (TWO_RANKS, builtin(2, 2, 1, 32, "medium")),
    (CROWDED, builtin(1, 2, 1, 16, "medium")),
    (CROWDED, builtin(1, 2, 2, 48, "medium")),
    (CROWDED, builtin(1, 2, 1, 32, "long")),
    (CROWDED, builtin(1, 2, 2, 32, "wide")),
    (LONG, builtin(1, 1, 1, 32, "medium")),
    (LONG, builtin(1, 2, 1, 16, "long")),
    (LONG, builtin(1, 3, 2, 16, "wide")),
    (MADE_UP, simulated(1, 3, 1, 16, "medium")),
    (MADE_UP, simulated(1, 2, 4, 16, "medium")),
    (MADE_UP_ASYNC, simulated(1, 4, 2, 16, "medium")),
    (MADE_UP_ASYNC, simulated(1, 3, 1, 8, "medium")),
    (MADE_UP_ASYNC, simulated(1, 3, 2, 16, "long")),
)  # (calibrated from, predicted)


def jobs() -> list[Job]:
    """Every job once, in the order of the pairs."""
    return list(dict.fromkeys(job for pair in PAIRS for job in pair))
