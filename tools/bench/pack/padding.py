"""How many tokens an update computes for those that are there; counted in real updates, so no round is timed.

Real tokens: each completion, and each group's prompt once. A plain step pads all sequences to the longest one.
"""

from statistics import mean

from tools.bench.harness import worker_process
from tools.bench.harness.protocol import Figures
from tools.bench.pack.inputs import lengths

GROUPS, SAMPLES, PROMPT = 32, 4, 20
MEDIAN, SIGMA, LONGEST = 39.0, 1.0, 512  # completions of about 64 tokens in the mean
BUDGET = 1024  # tokens of a micro-batch: a tenth of the update
UPDATES = 5


class PaddingBench:
    about = "tokens an update computes over real ones, log-normal lengths, beside a step padded to the longest"

    def measure(self, *, quiet: bool) -> Figures:
        """Needs no peer: the padded step's tokens follow from the lengths."""
        with worker_process.ours("pack.padding_ours") as ours:
            return figures([one(ours, seed) for seed in range(UPDATES)])


def one(ours: worker_process.Side, seed: int) -> dict[str, int]:
    """One update's counts."""
    completions = lengths(GROUPS * SAMPLES, seed, median=MEDIAN, sigma=SIGMA, longest=LONGEST)
    counted: dict[str, int] = ours.ask(
        "update", completions=completions, n_samples=SAMPLES, n_prompt=PROMPT, budget=BUDGET
    )
    whole = sum(completions) + PROMPT * len(completions)
    return counted | {
        "real": sum(completions) + PROMPT * GROUPS,
        "whole": whole,
        "padded": (max(completions) + PROMPT) * len(completions),
    }


def figures(updates: list[dict[str, int]]) -> Figures:
    """`share` is the worst update's."""
    return {
        "bench": "padding",
        "share": round(max(x["model"] / x["real"] for x in updates), 4),
        "attention_share": round(max(x["attention"] / x["whole"] for x in updates), 4),
        "share_of_whole_sequences": round(max(x["model"] / x["whole"] for x in updates), 4),
        "padded_share": round(mean(x["padded"] / x["whole"] for x in updates), 3),
        "real_tokens": sum(x["real"] for x in updates),
        "budget": BUDGET,
        "samples": SAMPLES,
        "prompt": PROMPT,
        "lengths": f"log-normal, median {MEDIAN:g}, sigma {SIGMA:g}, at most {LONGEST}",
        "updates": len(updates),
    }
