"""Manifest of a push: names, shapes, dtypes, checksums; the tensors' places (64-byte steps) in one flat buffer.

Each member computes the layout itself. The digest does not depend on layout or bucket size.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from areal_bus.errors import PushFailed

ALIGN = 64  # bytes: aligned for every dtype and for cache lines

Form = tuple[tuple[int, ...], str]  # (shape, dtype as "float32")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a manifest: `start` is where its bytes begin in the flat buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    n_bytes: int

    @property
    def stop(self) -> int:
        return self.start + self.n_bytes

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.stop].view(dtype_of(self.dtype)).view(self.shape)


@dataclass(frozen=True, slots=True)
class Manifest:
    """Description of a push: enough to allocate, to reject a wrong model and to verify every byte."""

    version: int
    entries: tuple[TensorEntry, ...]
    checksums: tuple[int, ...]  # of each entry's bytes
    bucket_bytes: int
    n_bytes: int  # of the flat buffer, padding included

    @property
    def digest(self) -> str:
        forms = {entry.name: (entry.shape, entry.dtype) for entry in self.entries}
        return digest(forms, {entry.name: sum_ for entry, sum_ in zip(self.entries, self.checksums, strict=True)})

    def buckets(self) -> list[tuple[int, int]]:
        """(start, stop) of each broadcast, in order. A tensor may span several buckets."""
        return cut(self.n_bytes, self.bucket_bytes)

    def to_json(self) -> dict[str, Any]:
        tensors = [[e.name, list(e.shape), e.dtype, s] for e, s in zip(self.entries, self.checksums, strict=True)]
        return {
            "version": self.version,
            "bucket_bytes": self.bucket_bytes,
            "n_bytes": self.n_bytes,
            "digest": self.digest,
            "tensors": tensors,
        }

    def encode(self) -> str:
        return json.dumps(self.to_json(), separators=(",", ":"))

    @staticmethod
    def decode(text: str) -> "Manifest":
        """Raises PushFailed for invalid text, or when digest or size disagree with the rest."""
        try:
            value = json.loads(text)
            forms = {str(name): (tuple(map(int, shape)), str(dtype)) for name, shape, dtype, _ in value["tensors"]}
            entries, n_bytes = lay_out(forms)
            checksums = tuple(int(row[3]) for row in value["tensors"])
            manifest = Manifest(int(value["version"]), entries, checksums, int(value["bucket_bytes"]), n_bytes)
            announced = (value["digest"], value["n_bytes"])
        except (KeyError, TypeError, ValueError) as error:
            raise PushFailed(f"invalid manifest: it needs names, shapes, dtypes, checksums: {text[:200]!r}") from error
        if announced != (manifest.digest, n_bytes) or manifest.bucket_bytes < 1:
            computed = f"{manifest.digest}, {n_bytes} bytes computed, in buckets of {manifest.bucket_bytes}"
            raise PushFailed(f"mismatch within a manifest: {announced[0]}, {announced[1]} bytes announced; {computed}")
        return manifest


def cut(n_bytes: int, bucket_bytes: int) -> list[tuple[int, int]]:
    """(start, stop) of each bucket of at most this many bytes."""
    return [(start, min(start + bucket_bytes, n_bytes)) for start in range(0, n_bytes, bucket_bytes)]


def digest(forms: Mapping[str, Form], checksums: Mapping[str, int]) -> str:
    """BLAKE2b-128 over (name, shape, dtype, checksum), sorted by name."""
    rows = [[name, list(forms[name][0]), forms[name][1], checksums[name]] for name in sorted(forms)]
    return hashlib.blake2b(json.dumps(rows, separators=(",", ":")).encode(), digest_size=16).hexdigest()


def lay_out(forms: Mapping[str, Form]) -> tuple[tuple[TensorEntry, ...], int]:
    """Place of each tensor in the flat buffer, and the size of the buffer."""
    return _cached_layout(tuple(forms.items()))


@lru_cache(maxsize=4)
def _cached_layout(forms: tuple[tuple[str, Form], ...]) -> tuple[tuple[TensorEntry, ...], int]:
    """Cached: all pushes of a run have the same layout."""
    entries, end = [], 0
    for name, (shape, dtype) in forms:
        n_bytes = prod(shape) * dtype_of(dtype).itemsize
        entries.append(TensorEntry(name, tuple(shape), dtype, end, n_bytes))
        end += -(-n_bytes // ALIGN) * ALIGN
    return tuple(entries), end


def first_difference(held: Mapping[str, tuple[Sequence[int], str]], manifest: Manifest) -> str | None:
    """Text on the first difference between the manifest and the model `held`; None if they agree."""
    pushed = {entry.name: (entry.shape, entry.dtype) for entry in manifest.entries}
    for name, (shape, dtype) in held.items():
        if name not in pushed:
            return f"{name} is held and not in the push"
        if (tuple(shape), dtype) != pushed[name]:
            return f"{name} is {dtype} {list(shape)} here and {pushed[name][1]} {list(pushed[name][0])} in the push"
    for name in pushed:
        if name not in held:
            return f"{name} is in the push and not held"
    return None


def dtype_of(name: str) -> torch.dtype:
    """Raises PushFailed when torch has no dtype of that name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise PushFailed(f"a manifest contains dtypes of torch; {name!r} is not one")
    return dtype
