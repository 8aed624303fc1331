"""Bench `loss`: the decoupled loss, forward and backward with its statistics, beside AReaL's and verl's."""

from contextlib import ExitStack
from functools import partial

from areal_bus.errors import ConfigError
from benchmarks.harness import worker_process
from benchmarks.harness.interleave import OURS, Rounds, interleave
from benchmarks.harness.protocol import Figures

TOKENS = 32768
AREAL, ALONE, VERL = "areal", "areal_alone", "verl"  # ALONE: statistics stay tensors
OURS_ALONE = "ours_alone"
SAME = 1e-5  # allowed difference between losses of the same objective, in float32


class LossBench:
    about = "the decoupled loss with its statistics on 32k tokens, forward and backward, beside AReaL's and verl's"

    def measure(self, *, quiet: bool) -> Figures:
        """Raises ConfigError without the peers."""
        errors: list[float] = []
        losses: dict[str, list[float]] = {}
        with ExitStack() as stack:
            mine, theirs = (
                stack.enter_context(worker_process.ours("loss.ours")),
                stack.enter_context(worker_process.peer("loss.peers")),
            )
            control = stack.enter_context(worker_process.ours("harness.sgemm"))

            def measure(name: str) -> float:
                seed = len(losses.setdefault(name, []))
                if name == OURS:
                    answer = mine.ask("loss", n=TOKENS, seed=seed)
                    errors.append(answer["max_error"])
                elif name == OURS_ALONE:
                    answer = mine.ask("alone", n=TOKENS, seed=seed)
                else:
                    answer = theirs.ask("loss", of=name, n=TOKENS, seed=seed)
                losses[name].append(answer["loss"])
                return float(answer["seconds"])

            names = (OURS, AREAL, OURS_ALONE, ALONE, VERL)
            rounds = interleave({name: partial(measure, name) for name in names}, lambda: float(control.ask("sgemm")))
        return figures(rounds, errors, losses)


def figures(rounds: Rounds, errors: list[float], losses: dict[str, list[float]]) -> Figures:
    """Raises ConfigError when a side computed another loss than we did: its time would be no comparison."""
    for name in (OURS_ALONE, AREAL, ALONE, VERL):
        apart = max(abs(one - two) for one, two in zip(losses[OURS], losses[name], strict=True))
        if apart > SAME:
            raise ConfigError(
                f"the same objective is timed on both sides: {name}'s loss differs from ours by {apart:g}"
            )
    return {
        "bench": "loss",
        "tokens": TOKENS,
        **rounds.against(AREAL),
        **rounds.against(ALONE, "ratio_alone"),
        **rounds.against(ALONE, "ratio_both_alone", to=OURS_ALONE),
        **rounds.against(VERL, "ratio_verl"),
        "ms": round(1e3 * rounds.cost(OURS), 4),
        "alone_ms": round(1e3 * rounds.cost(OURS_ALONE), 4),
        "areal_ms": round(1e3 * rounds.cost(AREAL), 4),
        "areal_alone_ms": round(1e3 * rounds.cost(ALONE), 4),
        "verl_ms": round(1e3 * rounds.cost(VERL), 4),
        "max_error": max(errors),
        **rounds.figures(),
    }
