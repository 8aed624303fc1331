"""Seeded sequence lengths for comparisons. Standard library only."""

import math
import random

MEDIAN, SIGMA = 2000.0, 1.0  # of a log-normal
SHORTEST, LONGEST = 16, 16384


def lengths(n: int, seed: int, *, median: float = MEDIAN, sigma: float = SIGMA, longest: int = LONGEST) -> list[int]:
    """Log-normal token counts, cut at both ends."""
    draw = random.Random(seed)
    return [min(max(int(draw.lognormvariate(math.log(median), sigma)), SHORTEST), longest) for _ in range(n)]
