"""Bench `generate`: the builtin engine beside Hugging Face's `generate` and continuous batching, and bare matmuls."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from benchmarks.generate.requests import BATCHES, N_GIVEN, N_NEW, SIGMA, WAVES
from benchmarks.harness import pace, worker_process
from benchmarks.harness.interleave import OURS, Rounds, interleave
from benchmarks.harness.protocol import Figures
from benchmarks.harness.worker_process import Side

GENERATE, CONTINUOUS, FLOOR = "generate", "continuous", "floor"
NAMED = (32, True)  # (batch, mixed) of the row reported as `ratio`


class GenerateBench:
    about = "the builtin engine beside Hugging Face generate and continuous batching, batch 8, 32 and 128"

    def measure(self, *, quiet: bool) -> Figures:
        """CPU time a token, one thread, log-probs on. Raises ConfigError without the peers."""
        with ExitStack() as stack:
            peer, ours = (
                stack.enter_context(worker_process.peer("generate.huggingface")),
                stack.enter_context(worker_process.ours("generate.ours")),
            )
            control = stack.enter_context(worker_process.ours("harness.sgemm"))
            measured = {}
            rows = pace.of([(batch, mixed) for batch in BATCHES for mixed in (False, True)], [NAMED])
            for number, (batch, mixed) in enumerate(rows, start=1):
                pace.say(number, len(rows), f"batch {batch}, {kind(mixed)} lengths:")
                measured[batch, mixed] = compare(peer, ours, control, batch, mixed)
        return figures(measured)


def kind(mixed: bool) -> str:
    return "mixed" if mixed else "equal"


def compare(peer: Side, ours: Side, control: Side, batch: int, mixed: bool) -> Rounds:
    """Rounds of one row; every round has requests of its own, the same for all sides."""
    asked: dict[str, int] = {}

    def seeded(name: str, measure: Callable[[int], float]) -> float:
        asked[name] = asked.get(name, 0) + 1
        return measure(asked[name])

    sides = {
        GENERATE: lambda seed: float(peer.ask("generate", batch=batch, mixed=mixed, seed=seed)),
        CONTINUOUS: lambda seed: float(peer.ask("continuous", batch=batch, mixed=mixed, seed=seed)),
        OURS: lambda seed: float(ours.ask("engine", batch=batch, mixed=mixed, seed=seed)),
        FLOOR: lambda _: float(ours.ask("floor", batch=batch)),
    }
    return interleave(
        {name: partial(seeded, name, measure) for name, measure in sides.items()},
        lambda: float(control.ask("sgemm")),
    )


def figures(measured: dict[tuple[int, bool], Rounds]) -> Figures:
    found: Figures = {"bench": "generate", **measured[NAMED].against(GENERATE)}
    for (batch, mixed), rounds in measured.items():
        row = f"{batch}_{kind(mixed)}"
        if (batch, mixed) != NAMED:
            found |= rounds.against(GENERATE, f"ratio_{row}")
        found[f"tokens_per_cpu_s_{row}"] = round(1 / rounds.cost(OURS))
        found[f"generate_tokens_per_cpu_s_{row}"] = round(1 / rounds.cost(GENERATE))
        found |= rounds.against(CONTINUOUS, f"ratio_continuous_{row}")
        found[f"floor_share_{row}"] = round(rounds.ratio(FLOOR).median, 3)
    lengths = f"{N_GIVEN} given and {N_NEW} new, or means of these; new ones log-normal, sigma {SIGMA:g}"
    return {**found, "lengths": f"{lengths}; {WAVES} batches of requests", **measured[NAMED].figures()}
