"""Snapshots: a copy of one version of the weights in one flat buffer, with its manifest and digest."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from areal_bus.errors import ImpossibleEvent
from areal_bus.weights.checksum import Checksum, checksum
from areal_bus.weights.manifest import Form, Manifest, TensorEntry, digest, lay_out
from areal_bus.weights.shared_memory import MemoryPlace, SharedMemory, place_of


@dataclass(slots=True)
class Snapshot:
    """One version at the root. Immutable until it is passed to `take_snapshot` as `previous`."""

    layout: Manifest
    digest: str
    data: Tensor = field(repr=False)  # (n_bytes,) uint8; empty after another snapshot has reused its memory
    places: tuple[Tensor, ...] = field(repr=False)  # (n,) view of each entry in `data`; empty after reuse
    n_users: int = 0  # pushes that currently send it
    shared: SharedMemory | None = None  # memory of `data`, if other processes can open it
    _on_host: Tensor | None = field(default=None, repr=False)  # of `data`, for members without access to the device

    @property
    def version(self) -> int:
        return self.layout.version

    @property
    def n_bytes(self) -> int:
        return self.layout.n_bytes

    @property
    def manifest(self) -> dict[str, Any]:
        return self.layout.to_json()

    @property
    def place(self) -> MemoryPlace | None:
        """Place where others can open it; None for private memory."""
        return None if self.shared is None else place_of(self.shared.device)

    def host_data(self) -> Tensor:
        """`data` in host memory: itself, or a cached copy."""
        if self.data.device.type == "cpu":
            return self.data
        if self._on_host is None:
            self._on_host = self.data.cpu()
        return self._on_host

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
    shared_on: torch.device | None = None,
) -> Snapshot | None:
    """Copy the weights, tensor by tensor. Every rank calls this; only the root gets a snapshot.

    The snapshot is in private host memory, or on `shared_on`, where other processes can open it.

    With a `dtype`, floating-point tensors are rounded to it, each shard before it is gathered. Layout and digest are
    those of the rounded tensors, which members receive.

    A DTensor is gathered on all ranks (a collective of its mesh), so at most one whole tensor is in memory beside the
    shards. Tied weights are stored once, under their first name. `previous` is a snapshot that is no longer needed: its
    memory is reused if the layout is the same, and it is empty afterwards.
    """
    if bucket_bytes < 1:
        raise ValueError(f"a bucket holds at least one byte: bucket_bytes is {bucket_bytes}")
    unique = untied(parameters)
    if not is_root:
        for tensor in unique.values():
            whole(_rounded(tensor, dtype))
        return None
    entries, n_bytes = lay_out(forms_of(unique, dtype))
    pin = any(tensor.is_cuda for tensor in unique.values())
    memory = _memory(entries, n_bytes, previous, pin=pin, shared_on=shared_on)
    running = Checksum(memory.data.device)
    places = zip(entries, memory.places, strict=True)
    checksums = [_copy(unique[entry.name], entry, place, running) for entry, place in places]
    layout = Manifest(version, entries, tuple(checksums), bucket_bytes, n_bytes)
    return Snapshot(layout, layout.digest, memory.data, memory.places, shared=memory.shared)


def digest_of(parameters: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> str:
    """Digest of a snapshot of these tensors. A collective if DTensors are among them."""
    unique = untied(parameters)
    checksums = {name: checksum(_bytes(whole(_rounded(t, dtype)).cpu())) for name, t in unique.items()}
    return digest(forms_of(unique, dtype), checksums)


def forms_of(parameters: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Form]:
    """Name -> (shape, dtype) of the unsharded tensors, as `WeightReceiver.receive` expects."""
    return {
        name: (tuple(tensor.shape), str(_rounded_to(tensor, dtype)).removeprefix("torch."))
        for name, tensor in parameters.items()
    }


def untied(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor once, under its first name.

    Plain tensors are identical if they have the same memory and form. DTensors are identical only if they are the same
    object: a shard may be empty on some ranks, and all ranks must compute the same list.
    """
    kept: dict[object, str] = {}
    for name, tensor in parameters.items():
        plain = not hasattr(tensor, "full_tensor") and tensor.numel() > 0
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype) if plain else id(tensor)
        kept.setdefault(key, name)
    return {name: parameters[name] for name in kept.values()}


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or the full tensor of a DTensor (a collective of its mesh)."""
    gather = getattr(tensor, "full_tensor", None)
    full: Tensor = tensor if gather is None else gather()
    return full.detach()


def _rounded_to(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype


def _rounded(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The detached tensor, or a copy of another type."""
    return tensor.detach().to(_rounded_to(tensor, dtype))


def _copy(tensor: Tensor, entry: TensorEntry, place: Tensor, running: Checksum) -> int:
    """Copy the tensor to `place`, (n,) of the entry's type. Returns the checksum of the copy."""
    running.restart()
    source = tensor.detach()
    if hasattr(tensor, "full_tensor"):  # round before gathering
        source = whole(source.to(place.dtype))
    if source.is_contiguous():
        running.copy(source.view(-1), place)
    else:
        place.view(entry.shape).copy_(source)
        running.add(place.view(torch.uint8))
    return running.value()


def _bytes(tensor: Tensor) -> Tensor:
    """(n_bytes,) uint8, a view when the tensor is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class _Memory:
    """Memory of a snapshot, with a view for each entry."""

    data: Tensor
    shared: SharedMemory | None
    places: tuple[Tensor, ...]


def _memory(
    entries: tuple[TensorEntry, ...],
    n_bytes: int,
    previous: Snapshot | None,
    *,
    pin: bool,
    shared_on: torch.device | None,
) -> _Memory:
    """Memory of the previous snapshot if it fits, otherwise new memory."""
    if previous is not None and previous.n_users:
        raise ImpossibleEvent(f"a snapshot in use must not be overwritten: version {previous.version} is being pushed")
    if previous is not None and _fits(previous, entries, n_bytes, shared_on):
        taken = _Memory(previous.data, previous.shared, previous.places)
        previous.data, previous.shared, previous.places = torch.empty(0, dtype=torch.uint8), None, ()
        return taken
    shared = None if shared_on is None else SharedMemory(n_bytes, shared_on)
    data = torch.zeros(n_bytes, dtype=torch.uint8, pin_memory=pin) if shared is None else shared.data
    return _Memory(data, shared, tuple(entry.view(data).view(-1) for entry in entries))


def _fits(previous: Snapshot, entries: tuple[TensorEntry, ...], n_bytes: int, shared_on: torch.device | None) -> bool:
    device = previous.shared.device if previous.shared else None
    here = (previous.layout.entries, len(previous.places), previous.data.numel(), device)
    return here == (entries, len(entries), n_bytes, shared_on)
