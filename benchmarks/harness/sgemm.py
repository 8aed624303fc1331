"""The control of every comparison: a 512 x 512 sgemm, whose time shows whether the machine is steady."""

import time
from statistics import median

import torch

from benchmarks.harness.worker_main import seconds, serve

SIZE = 512
TRIES = 5
IN_A_ROW = 60  # some 0.15 s of wall time, many scheduler time slices
SPANS = 9  # spans in the median: laps of a minute do not notice a disturbance of a tenth of a second


def sgemm() -> float:
    """CPU seconds of one product, the median of a few."""
    return median(seconds(lambda: one @ two, 0.0) for _ in range(TRIES))


def long_wall() -> float:
    """Wall seconds of one product, the median of spans that take a second or two together."""
    return median(wall() for _ in range(SPANS))


def wall() -> float:
    """Wall seconds of one product, averaged over IN_A_ROW."""
    began = time.monotonic()
    for _ in range(IN_A_ROW):
        one @ two
    return (time.monotonic() - began) / IN_A_ROW


torch.set_num_threads(1)
one, two = torch.rand(SIZE, SIZE), torch.rand(SIZE, SIZE)

if __name__ == "__main__":
    serve({"sgemm": sgemm, "wall": wall, "long_wall": long_wall})
