"""What a push brings: names, shapes, dtypes, a checksum a tensor, and where each lies in one flat buffer. No tensors.

All lie at a multiple of 64 bytes, in the order of the mapping they came from. The layout follows from names, shapes and
dtypes alone, so a member computes it for itself. The digest is a hash over names, shapes, dtypes and checksums in the
order of names, so it depends neither on the layout nor on the size of buckets.
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

ALIGN = 64  # bytes: every dtype can view its slice, and copies start on a cache line

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
        """This tensor, as a view of the flat buffer."""
        return flat[self.start : self.stop].view(dtype_of(self.dtype)).view(self.shape)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a push brings: enough to allocate, to refuse a wrong model and to verify every byte."""

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
        """(start, stop) of each broadcast, in order; boundaries may cut a tensor."""
        starts = range(0, self.n_bytes, self.bucket_bytes)
        return [(start, min(start + self.bucket_bytes, self.n_bytes)) for start in starts]

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
        """Raises PushFailed for what is no manifest, or when its digest or size do not follow from the rest."""
        try:
            value = json.loads(text)
            forms = {str(name): (tuple(map(int, shape)), str(dtype)) for name, shape, dtype, _ in value["tensors"]}
            entries, n_bytes = lay_out(forms)
            checksums = tuple(int(row[3]) for row in value["tensors"])
            manifest = Manifest(int(value["version"]), entries, checksums, int(value["bucket_bytes"]), n_bytes)
            announced = (value["digest"], value["n_bytes"])
        except (KeyError, TypeError, ValueError) as error:
            raise PushFailed(f"a manifest has names, shapes, dtypes and checksums: {text[:200]!r}") from error
        if announced != (manifest.digest, n_bytes) or manifest.bucket_bytes < 1:
            raise PushFailed(
                f"a manifest must agree with its own digest and size: {announced[0]}, {announced[1]} bytes announced, "
                f"{manifest.digest}, {n_bytes} bytes computed, in buckets of {manifest.bucket_bytes}"
            )
        return manifest


def digest(forms: Mapping[str, Form], checksums: Mapping[str, int]) -> str:
    """BLAKE2b-128 over (name, shape, dtype, checksum), sorted by name."""
    rows = [[name, list(forms[name][0]), forms[name][1], checksums[name]] for name in sorted(forms)]
    return hashlib.blake2b(json.dumps(rows, separators=(",", ":")).encode(), digest_size=16).hexdigest()


def lay_out(forms: Mapping[str, Form]) -> tuple[tuple[TensorEntry, ...], int]:
    """Where each tensor lies in the flat buffer, and how long that is."""
    return _laid_out(tuple(forms.items()))


@lru_cache(maxsize=4)
def _laid_out(forms: tuple[tuple[str, Form], ...]) -> tuple[tuple[TensorEntry, ...], int]:
    """Kept, as all pushes of a run bring the same."""
    entries, end = [], 0
    for name, (shape, dtype) in forms:
        n_bytes = prod(shape) * dtype_of(dtype).itemsize
        entries.append(TensorEntry(name, tuple(shape), dtype, end, n_bytes))
        end += -(-n_bytes // ALIGN) * ALIGN
    return tuple(entries), end


def first_difference(held: Mapping[str, tuple[Sequence[int], str]], manifest: Manifest) -> str | None:
    """A sentence on the first thing in which the manifest is another model than `held`; None when it is the same."""
    brought = {entry.name: (entry.shape, entry.dtype) for entry in manifest.entries}
    for name, (shape, dtype) in held.items():
        if name not in brought:
            return f"{name} is held and not in the push"
        if (tuple(shape), dtype) != brought[name]:
            return f"{name} is {dtype} {list(shape)} here and {brought[name][1]} {list(brought[name][0])} in the push"
    for name in brought:
        if name not in held:
            return f"{name} is in the push and not held"
    return None


def dtype_of(name: str) -> torch.dtype:
    """Raises PushFailed for a name that is no dtype of torch."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise PushFailed(f"a manifest names dtypes of torch; {name!r} is none")
    return dtype
