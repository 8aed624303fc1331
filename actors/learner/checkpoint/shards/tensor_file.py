"""Writes a safetensors file block by block, with the SHA-256 of its bytes.

safetensors' own writer holds the GIL while it writes: training would wait.
"""

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BLOCK = 16 << 20  # bytes between two releases of the GIL, at most
ALIGNED = 8  # bytes: the data of a file begins at a multiple
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and hash of a file, as a manifest lists it."""

    n_bytes: int
    sha256: str


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: Mapping[str, str]) -> FileRecord:
    """Write and sync the file. `tensors` are on the host; each is removed from the dict once it is written.

    Raises OSError.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so that each is aligned
    digest, n_bytes = hashlib.sha256(), 0
    with path.open("wb") as file:
        for part in (_header(names, tensors, metadata), *_data(names, tensors)):
            block = memoryview(part)
            for start in range(0, len(block), BLOCK):
                piece = block[start : start + BLOCK]
                digest.update(piece)
                file.write(piece)
            n_bytes += len(block)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(n_bytes, digest.hexdigest())


def _header(names: list[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name in names:
        tensor = tensors[name]
        end = at + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNED)
    return struct.pack("<Q", len(text)) + text


def _data(names: list[str], tensors: dict[str, Tensor]) -> Any:
    """The bytes of each tensor, a view of its memory."""
    for name in names:
        yield tensors.pop(name).contiguous().reshape(-1).view(torch.uint8).numpy()
