"""Bytes of numbers, and of a need on the device and in host memory."""

from dataclasses import dataclass

MIB, GIB = 2**20, 2**30
BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes on the device and in host memory."""

    device: int
    host: int
