"""One version of the weights in host memory, its manifest and its digest; knows nothing of groups, stores or peers.

All tensors lie in one flat buffer, each at a multiple of 64 bytes, in the order of the mapping they came from. The
layout follows from names, shapes and dtypes alone, so a member computes it for itself. A checksum is of one tensor's
bytes (`checksum`); the digest is a hash over names, shapes, dtypes and checksums in the order of names, so it depends
neither on the layout nor on the size of buckets.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from areal_bus.checksum import Checksum, checksum
from areal_bus.errors import ImpossibleEvent, PushFailed

ALIGN = 64  # bytes: every dtype can view its slice, and copies start on a cache line
PIECE = 1 << 19  # numbers copied at a time, and summed up while they are in a cache

Form = tuple[tuple[int, ...], str]  # (shape, dtype as "float32")


@dataclass(frozen=True, slots=True)
class Entry:
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
    entries: tuple[Entry, ...]
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


@dataclass(slots=True)
class Snapshot:
    """One version in host memory, at the root. Immutable until `take_snapshot` is given it as `previous`."""

    layout: Manifest
    digest: str
    data: Tensor = field(repr=False)  # (n_bytes,) uint8; empty once another snapshot has taken its memory
    n_users: int = 0  # pushes that send it now

    @property
    def version(self) -> int:
        return self.layout.version

    @property
    def n_bytes(self) -> int:
        return self.layout.n_bytes

    @property
    def manifest(self) -> dict[str, Any]:
        return self.layout.to_json()

    def tensors(self) -> dict[str, Tensor]:
        """Name -> view of the snapshot's memory."""
        return {entry.name: entry.view(self.data) for entry in self.layout.entries}


def take_snapshot(
    version: int,
    parameters: Mapping[str, Tensor],
    *,
    is_root: bool = True,
    previous: Snapshot | None = None,
    bucket_bytes: int,
    dtype: torch.dtype | None = None,
) -> Snapshot | None:
    """Copy the weights to host memory, tensor by tensor; every rank calls it, only the root gets a snapshot.

    With a `dtype` numbers that are not whole are rounded to it, each shard before it is gathered; layout and digest are
    those of the rounded ones, which members receive.

    A DTensor is gathered whole on all ranks (a collective of its own mesh), so at most one whole tensor is held beside
    the shards. Names that are one tensor (tied weights) are kept under the first of them. `previous` is a snapshot that
    nobody needs any more: its memory is reused when the layout is the same, and it is empty afterwards.
    """
    if bucket_bytes < 1:
        raise ValueError(f"a bucket holds at least one byte: bucket_bytes is {bucket_bytes}")
    unique = untied(parameters)
    if not is_root:
        for tensor in unique.values():
            whole(_rounded(tensor, dtype))
        return None
    entries, n_bytes = lay_out(forms_of(unique, dtype))
    data = _memory(entries, n_bytes, previous, pin=any(tensor.is_cuda for tensor in unique.values()))
    checksums = []
    for entry in entries:
        checksums.append(_copy(unique[entry.name], entry, data))
    layout = Manifest(version, entries, tuple(checksums), bucket_bytes, n_bytes)
    return Snapshot(layout, layout.digest, data)


def digest_of(parameters: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> str:
    """The digest that a snapshot of these tensors would have; a collective when there are DTensors among them."""
    unique = untied(parameters)
    checksums = {name: checksum(_bytes(whole(_rounded(t, dtype)).cpu())) for name, t in unique.items()}
    return digest(forms_of(unique, dtype), checksums)


def digest(forms: Mapping[str, Form], checksums: Mapping[str, int]) -> str:
    """BLAKE2b-128 over (name, shape, dtype, checksum), sorted by name."""
    rows = [[name, list(forms[name][0]), forms[name][1], checksums[name]] for name in sorted(forms)]
    return hashlib.blake2b(json.dumps(rows, separators=(",", ":")).encode(), digest_size=16).hexdigest()


def forms_of(parameters: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Form]:
    """Name -> (shape, dtype), of whole tensors where they are sharded: what `Member.receive` takes as `expect`."""
    return {
        name: (tuple(tensor.shape), str(_rounded_to(tensor, dtype)).removeprefix("torch."))
        for name, tensor in parameters.items()
    }


def lay_out(forms: Mapping[str, Form]) -> tuple[tuple[Entry, ...], int]:
    """Where each tensor lies in the flat buffer, and how long that is."""
    entries, end = [], 0
    for name, (shape, dtype) in forms.items():
        n_bytes = prod(shape) * dtype_of(dtype).itemsize
        entries.append(Entry(name, tuple(shape), dtype, end, n_bytes))
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


def untied(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor once, under its first name.

    Plain tensors are one when they have the same memory and form. Sharded ones only when they are the same object:
    a shard may be empty on one rank and not on another, and all ranks must come to the same list.
    """
    kept: dict[object, str] = {}
    for name, tensor in parameters.items():
        plain = not hasattr(tensor, "full_tensor") and tensor.numel() > 0
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype) if plain else id(tensor)
        kept.setdefault(key, name)
    return {name: parameters[name] for name in kept.values()}


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or all of a DTensor (a collective: every rank of its mesh must come)."""
    gather = getattr(tensor, "full_tensor", None)
    full: Tensor = tensor if gather is None else gather()
    return full.detach()


def _rounded_to(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype


def _rounded(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Detached: the tensor itself, or a copy of another type."""
    return tensor.detach().to(_rounded_to(tensor, dtype))


def _copy(tensor: Tensor, entry: Entry, data: Tensor) -> int:
    """Bring the tensor to its place, of the entry's type; the checksum of what is there."""
    target = entry.view(data)
    if hasattr(tensor, "full_tensor"):  # rounded before it is gathered
        tensor = whole(tensor.detach().to(target.dtype))
    source, raw, found = tensor.detach(), data[entry.start : entry.stop], Checksum()
    if source.is_cuda or not source.is_contiguous():
        target.copy_(source)
        found.add(raw)
        return found.value()
    n_bytes = PIECE * target.itemsize
    flat = torch.split(source.reshape(-1), PIECE), torch.split(target.reshape(-1), PIECE), torch.split(raw, n_bytes)
    for given, here, bytes_ in zip(*flat, strict=True):
        here.copy_(given)
        found.add(bytes_)
    return found.value()


def _bytes(tensor: Tensor) -> Tensor:
    """(n_bytes,) uint8, a view when the tensor is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _memory(entries: tuple[Entry, ...], n_bytes: int, previous: Snapshot | None, *, pin: bool) -> Tensor:
    if previous is not None and previous.n_users:
        raise ImpossibleEvent(f"a snapshot in use is not overwritten: version {previous.version} is being pushed")
    if previous is None or previous.layout.entries != entries or previous.data.numel() != n_bytes:
        return torch.zeros(n_bytes, dtype=torch.uint8, pin_memory=pin)
    data, previous.data = previous.data, torch.empty(0, dtype=torch.uint8)
    return data
