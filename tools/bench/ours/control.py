"""The control of every comparison: a 512 x 512 sgemm, whose time says whether the machine holds still."""

from statistics import median

import torch

from tools.bench.serving import seconds, serve

SIZE = 512
TRIES = 5


def sgemm() -> float:
    """CPU seconds of one product, the median of a few."""
    return median(seconds(lambda: one @ two, 0.0) for _ in range(TRIES))


torch.set_num_threads(1)
one, two = torch.rand(SIZE, SIZE), torch.rand(SIZE, SIZE)

if __name__ == "__main__":
    serve({"sgemm": sgemm})
