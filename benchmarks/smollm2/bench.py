"""Bench `smollm2`: SmolLM2-135M beside Hugging Face: generation at batch 32 and 4, and a padded training step."""

from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from areal_bus.errors import ConfigError
from benchmarks.harness import worker_process
from benchmarks.harness.interleave import OURS, Rounds, interleave
from benchmarks.harness.protocol import Figures
from benchmarks.harness.worker_process import ROOT, Side
from benchmarks.smollm2 import inputs as work

MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
HF = "hf"
WORK = {"generate": "generate", "generate_few": "generate_few", "update": "train"}  # function -> name of its figures
ALIKE = 1e-3  # loss and gradient norm of the two sides, relative
N_GREEDY, AGREE = 6, 0.95  # greedy tokens to compare; required share of equal ones


class SmolLM2Bench:
    about = "SmolLM2-135M: generation at batch 32 and 4 beside HF generate, training beside a plain padded HF step"

    def measure(self, *, quiet: bool) -> Figures:
        """CPU time a token, one thread. Raises ConfigError without the peers or the model."""
        if not (MODEL / "model.safetensors").is_file():
            raise ConfigError(f"this bench needs SmolLM2-135M, which is not at {MODEL}: run `make model`")
        with ExitStack() as stack:
            sides = {
                HF: stack.enter_context(worker_process.peer("smollm2.huggingface")),
                OURS: stack.enter_context(worker_process.ours("smollm2.ours")),
            }
            control = stack.enter_context(worker_process.ours("harness.sgemm"))
            agreed = begin(sides, MODEL)
            measured = {what: compare(sides, control, what) for what in WORK}
        return figures(measured, agreed)


def begin(sides: dict[str, Side], model: Path) -> float:
    """Load the model on both sides; the share of likeliest tokens that are the same. Raises ConfigError below AGREE."""
    for one in sides.values():
        one.ask("load", model=str(model))
    ours, theirs = (sides[name].ask("greedy", seed=0, n_new=N_GREEDY) for name in (OURS, HF))
    pairs = [pair for a, b in zip(ours, theirs, strict=True) for pair in zip(a, b, strict=True)]
    agreed = sum(bool(a == b) for a, b in pairs) / len(pairs)
    if agreed < AGREE:
        raise ConfigError(f"both sides must sample from the same model: {agreed:.0%} of the likeliest tokens agree")
    return agreed


def compare(sides: dict[str, Side], control: Side, what: str) -> Rounds:
    """Rounds of one kind of work; each has requests or a batch of its own, the same for both sides."""
    answers: dict[int, dict[str, float]] = {}
    numbers = {name: count() for name in sides}

    def measure(name: str) -> float:
        seed = next(numbers[name])
        answer = sides[name].ask(what, seed=seed)
        check(what, answers.setdefault(seed, answer), answer)
        return float(answer["seconds"] / answer["tokens"])

    return interleave({name: partial(measure, name) for name in sides}, lambda: float(control.ask("sgemm")))


def check(what: str, one: dict[str, Any], other: dict[str, Any]) -> None:
    """Raises ConfigError unless both sides did the same work."""
    if one["tokens"] != other["tokens"]:
        raise ConfigError(f"both sides must make as many tokens ({what}): {one['tokens']} and {other['tokens']}")
    for name in {"loss", "norm"} & one.keys():
        if abs(one[name] - other[name]) > ALIKE * max(abs(one[name]), 1e-2):
            raise ConfigError(f"both sides must compute the same update: {name} is {one[name]} and {other[name]}")


def figures(measured: dict[str, Rounds], agreed: float) -> Figures:
    found: Figures = {"bench": "smollm2"}
    for what, name in WORK.items():
        rounds = measured[what]
        found |= rounds.against(HF, f"{name}_ratio")
        found[f"{name}_tokens_per_cpu_s"] = round(1 / rounds.cost(OURS), 1)
        found[f"hf_{name}_tokens_per_cpu_s"] = round(1 / rounds.cost(HF), 1)
    lengths = (
        f"{work.N_GIVEN} given, new ones log-normal, mean {work.N_NEW}, sigma {work.SIGMA:g}, at most {work.LONGEST}"
    )
    return {
        **found,
        "greedy_agreement": round(agreed, 4),
        "lengths": lengths,
        "few": work.FEW,
        "update_samples": work.GROUPS * work.SAMPLES,
        **measured["generate"].figures(),
        **{f"{WORK[what]}_refused": measured[what].refused for what in ("generate_few", "update")},
    }
