"""Model FLOP utilisation (MFU): the model's FLOPs over the peak of its devices in the same time.

FLOPs a token: 2 N forward, 2 N + 2 P backward, for N parameters, P of them trained; attention scores are left out
(Kaplan et al. 2020, appendix B). Time: of updates (learner), of `generate` (generator).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tools import run, terminal
from tools.breakdown.incarnations import Incarnation, by_role
from tools.breakdown.steps import Step
from tools.run import Line, Run

FORMULA = """\
learner   MFU = ((4 N + 2 P) T + 2 N F) / (seconds from batch to update * processes * peak)
generator MFU = 2 N S / (seconds of `generate`, all processes * peak)
N parameters, P of them trained (all, without actor.lora); T tokens trained, prompts included; F tokens of passes
without a gradient (proximal, reference, teacher); S sampled tokens; attention scores, prefill and
recomputation are left out"""
PEAKS = {  # part of a device's name -> dense bfloat16 FLOP/s, from its data sheet
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "V100": 125e12,
}


@dataclass(frozen=True, slots=True)
class Utilisation:
    """FLOPs of one role."""

    role: str
    n_flops: float
    seconds: float  # summed over its processes
    n_processes: int  # at the last step
    peak: float | None  # FLOP/s of one process; None: not known

    @property
    def rate(self) -> float:
        return self.n_flops / self.seconds if self.seconds else 0.0

    @property
    def mfu(self) -> float | None:
        return None if self.peak is None else self.rate / self.peak


def model_line(where: Run) -> Line | None:
    """The last `model` line of learner 0; None in a journal of an older version."""
    found = None
    for path in where.journals("learner"):
        for line in run.lines(path, "model"):
            found = line
    return found


def peak_of(model: Line) -> float | None:
    """Peak FLOP/s of the learner's device, for bfloat16; None if the device or another dtype is not in the table."""
    if model.get("dtype") != "bfloat16":
        return None
    return next((peak for name, peak in PEAKS.items() if name in str(model.get("device", ""))), None)


def utilisation(
    where: Run, found: Sequence[Incarnation], steps: Sequence[Step], *, peak: float | None
) -> list[Utilisation]:
    """The learner's and the generators' utilisation; [] when the journal has no `model` line."""
    model = model_line(where)
    if model is None:
        return []
    n, roles = float(model["n_params"]), by_role(found)
    by_trained = 4 * n + 2 * float(model.get("n_trained", n))  # of a trained token
    peak = peak or peak_of(model)
    out = []
    trained = [step for step in steps if step.update_s is not None and step.n_computed is not None]
    learners, generators = roles.get("learner", []), roles.get("generator", [])
    if trained and learners:
        ranks = [n_ranks(learners, step.split) for step in trained]
        seconds = sum((step.update_s or 0.0) * n for step, n in zip(trained, ranks, strict=True))
        n_flops = sum(by_trained * (step.n_computed or 0.0) + 2 * n * step.n_forward for step in trained)
        out.append(Utilisation("learner", n_flops, seconds, ranks[-1], peak))
    decode_s = sum(actor.spans.get("generate", 0.0) for actor in generators)
    if decode_s:
        n_flops = 2 * n * sum(actor.n_done for actor in generators)
        n_generators = n_ranks(generators, steps[-1].split if steps else None)
        out.append(Utilisation("generator", n_flops, decode_s, n_generators, peak))
    return out


def n_ranks(actors: Sequence[Incarnation], split: Line | None) -> int:
    """How many of these actors, all of one role, have a place in a split; all of them if the split cannot change."""
    indices = {int(actor.name.partition("-")[2].partition(".")[0]) for actor in actors}
    if split is None:
        return len(indices)
    if actors[0].role == "learner":
        return int(split["learners"])
    return sum(not split["generators"] <= index < split["most_generators"] for index in indices)  # guests have one


def flop_lines(found: Sequence[Utilisation]) -> list[str]:
    if not found:
        return ["not known: the journal has no model line (a run of an older version)"]
    unknown = "MFU not known: give the peak of one process with --peak-tflops"
    used = [(one, unknown if one.mfu is None else f"MFU {one.mfu:.1%}") for one in found]
    rows = [(one.role, f"{one.rate / 1e12:.4g} TFLOP/s a process", mfu) for one, mfu in used]
    return [*terminal.columns(rows), *FORMULA.splitlines()]
