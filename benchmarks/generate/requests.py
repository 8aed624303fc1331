"""Input of the engine benches: the shape of a small Llama and seeded requests. Standard library only."""

import math
import random
from dataclasses import dataclass
from typing import Any

SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}  # 869,504 parameters
N_GIVEN, N_NEW = 20, 64  # equal lengths; means of mixed ones
SIGMA, LONGEST = 0.7, 256  # of the logarithm of mixed new tokens, and the cap
BATCHES = (8, 32, 128)
WAVES = 2  # batches of requests


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One completion of exactly `n_new` tokens."""

    ids: list[int]
    n_new: int


def requests(batch: int, *, mixed: bool, seed: int) -> list[CompletionRequest]:
    """As many as fill the batch WAVES times, of equal or of mixed lengths."""
    draw = random.Random(f"{seed} {batch} {mixed}")
    location = math.log(N_NEW) - SIGMA * SIGMA / 2  # so that the mean is N_NEW before the cap
    asked = []
    for _ in range(WAVES * batch):
        n_given = draw.randint(N_GIVEN // 2, N_GIVEN * 3 // 2) if mixed else N_GIVEN
        n_new = min(LONGEST, max(1, round(draw.lognormvariate(location, SIGMA)))) if mixed else N_NEW
        asked.append(CompletionRequest([draw.randrange(1, SHAPE["vocab_size"]) for _ in range(n_given)], n_new))
    return asked
