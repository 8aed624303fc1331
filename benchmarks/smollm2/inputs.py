"""Input of both sides of the bench `smollm2`: seeded requests and a training batch.

Standard library only, so that every side's interpreter can import it.
"""

import math
import random
from dataclasses import dataclass

VOCABULARY = 49152
N_GIVEN, N_NEW = 20, 64  # tokens of a prompt; mean of new tokens
SIGMA, LONGEST = 0.7, 192  # of the logarithm of new tokens, and the cap
BATCH, FEW = 32, 4  # rows of a decode batch
GROUPS, SAMPLES = 2, 8  # of an update
LR, BETAS, EPS, DECAY = 1e-6, (0.9, 0.95), 1e-8, 0.0
CLIP_NORM, CLIP_RATIO = 1.0, 0.2


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """One completion of exactly `n_new` tokens."""

    ids: list[int]
    n_new: int


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One completion to train on."""

    group: int
    prompt: list[int]
    ids: list[int]
    reward: float


def drawn(draw: random.Random) -> int:
    """A length, log-normal."""
    location = math.log(N_NEW) - SIGMA * SIGMA / 2  # so that the mean is N_NEW before the cap
    return min(LONGEST, max(1, round(draw.lognormvariate(location, SIGMA))))


def tokens(draw: random.Random, n: int) -> list[int]:
    return [draw.randrange(1, VOCABULARY) for _ in range(n)]


def requests(seed: int, n: int) -> list[TimedRequest]:
    """So many, which are decoded at once."""
    draw = random.Random(f"requests {seed}")
    return [TimedRequest(tokens(draw, N_GIVEN), drawn(draw)) for _ in range(n)]


def batch(seed: int) -> list[TrainingSample]:
    """Groups of samples with different rewards, so every group has an advantage."""
    draw = random.Random(f"batch {seed}")
    found = []
    for group in range(GROUPS):
        prompt = tokens(draw, N_GIVEN)
        found += [
            TrainingSample(group, prompt, tokens(draw, drawn(draw)), sample / SAMPLES) for sample in range(SAMPLES)
        ]
    return found


def advantages(samples: list[TrainingSample]) -> list[float]:
    """Reward over the mean of the others of the group."""
    rewards = [[other.reward for other in samples if other.group == one.group] for one in samples]
    return [one.reward - (sum(all_) - one.reward) / (len(all_) - 1) for one, all_ in zip(samples, rewards, strict=True)]
