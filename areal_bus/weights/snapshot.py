"""One version of the weights as it is sent, its manifest and its digest; knows nothing of groups, stores or peers.

All tensors lie in one flat buffer, as its manifest says; a checksum is of one tensor's bytes (`checksum`).
"""

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
    """One version at the root. Immutable until `take_snapshot` is given it as `previous`."""

    layout: Manifest
    digest: str
    data: Tensor = field(repr=False)  # (n_bytes,) uint8; empty once another snapshot has taken its memory
    places: tuple[Tensor, ...] = field(repr=False)  # of each entry (n,), in `data`; none once that is taken
    n_users: int = 0  # pushes that send it now
    shared: SharedMemory | None = None  # that `data` lies in, if others can open it
    _on_host: Tensor | None = field(default=None, repr=False)  # a copy of `data`, for who cannot take it from a device

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
        """Where others can open it; None where nobody can."""
        return None if self.shared is None else place_of(self.shared.device)

    def host_data(self) -> Tensor:
        """`data` in host memory: itself, or a copy that is made once."""
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
    """Copy the weights, tensor by tensor; every rank calls it, only the root gets a snapshot.

    It lies in host memory of this process alone, or on `shared_on` where other processes can open it.

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
    pin = any(tensor.is_cuda for tensor in unique.values())
    memory = _memory(entries, n_bytes, previous, pin=pin, shared_on=shared_on)
    found = Checksum(memory.data.device)
    checksums = [
        _copy(unique[entry.name], entry, place, found) for entry, place in zip(entries, memory.places, strict=True)
    ]
    layout = Manifest(version, entries, tuple(checksums), bucket_bytes, n_bytes)
    return Snapshot(layout, layout.digest, memory.data, memory.places, shared=memory.shared)


def digest_of(parameters: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> str:
    """The digest that a snapshot of these tensors would have; a collective when there are DTensors among them."""
    unique = untied(parameters)
    checksums = {name: checksum(_bytes(whole(_rounded(t, dtype)).cpu())) for name, t in unique.items()}
    return digest(forms_of(unique, dtype), checksums)


def forms_of(parameters: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Form]:
    """Name -> (shape, dtype), of whole tensors where they are sharded: what `Member.receive` takes as `expect`."""
    return {
        name: (tuple(tensor.shape), str(_rounded_to(tensor, dtype)).removeprefix("torch."))
        for name, tensor in parameters.items()
    }


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


def _copy(tensor: Tensor, entry: TensorEntry, place: Tensor, found: Checksum) -> int:
    """Bring the tensor to its place, (n,) of the entry's type; the checksum of what is there, by `found`."""
    found.restart()
    source = tensor.detach()
    if hasattr(tensor, "full_tensor"):  # rounded before it is gathered
        source = whole(source.to(place.dtype))
    if source.is_contiguous():
        found.bring(source.view(-1), place)
    else:
        place.view(entry.shape).copy_(source)
        found.add(place.view(torch.uint8))
    return found.value()


def _bytes(tensor: Tensor) -> Tensor:
    """(n_bytes,) uint8, a view when the tensor is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class _Memory:
    """Of a snapshot, and where each entry lies in it."""

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
    """That of the snapshot before where it fits, else fresh memory."""
    if previous is not None and previous.n_users:
        raise ImpossibleEvent(f"a snapshot in use is not overwritten: version {previous.version} is being pushed")
    if previous is not None and _fits(previous, entries, n_bytes, shared_on):
        taken = _Memory(previous.data, previous.shared, previous.places)
        previous.data, previous.shared, previous.places = torch.empty(0, dtype=torch.uint8), None, ()
        return taken
    shared = None if shared_on is None else SharedMemory(n_bytes, shared_on)
    data = torch.zeros(n_bytes, dtype=torch.uint8, pin_memory=pin) if shared is None else shared.data
    return _Memory(data, shared, tuple(entry.view(data).view(-1) for entry in entries))


def _fits(previous: Snapshot, entries: tuple[TensorEntry, ...], n_bytes: int, shared_on: torch.device | None) -> bool:
    lies_on = previous.shared.device if previous.shared else None
    here = (previous.layout.entries, len(previous.places), previous.data.numel(), lies_on)
    return here == (entries, len(entries), n_bytes, shared_on)
