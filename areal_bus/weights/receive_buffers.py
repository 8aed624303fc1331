"""Target tensors of a push on a member: written from buckets or from a delta, and verified tensor by tensor."""

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from areal_bus.errors import PushFailed
from areal_bus.weights.checksum import Checksum
from areal_bus.weights.delta import BaseWeights, Patch, blocks_of, patches
from areal_bus.weights.manifest import Manifest, TensorEntry
from areal_bus.weights.snapshot import forms_of

NUMBERS = {1: torch.int8, 2: torch.int16}  # by size in bytes


class Landing(Protocol):
    """Takes the buckets of a push."""

    @property
    def n_bytes(self) -> int:
        """Of all buckets."""

    @property
    def base(self) -> BaseWeights | None:
        """Weights that a delta is applied to; None: the buckets are the weights."""

    @property
    def wrong(self) -> list[str]:
        """Names of tensors with wrong checksums."""

    def write(self, start: int, bucket: Tensor) -> None:
        """Take the next bucket, (n,) uint8, of which `start` is the place. Call in order."""

    def finish(self) -> None:
        """All buckets were written."""


class ReceiveBuffers:
    """Target tensors of a push: buckets are copied into them; each tensor is verified when its last byte arrives."""

    def __init__(self, manifest: Manifest, into: Mapping[str, Tensor] | None, device: torch.device) -> None:
        self.wrong: list[str] = []  # names of tensors with wrong checksums
        self.n_bytes, self.base = manifest.n_bytes, None
        self.digest = manifest.digest
        self._entries = manifest.entries
        self._checksums = manifest.checksums
        self._next = 0  # index of the first incomplete entry
        self._running = Checksum(device)  # checksum of the received part of that entry
        if into is not None and _fits(manifest, into, device):
            self.tensors = {entry.name: into[entry.name] for entry in manifest.entries}
        else:
            flat = torch.empty(manifest.n_bytes, dtype=torch.uint8, device=device)
            self.tensors = {entry.name: entry.view(flat) for entry in manifest.entries}
        self._bytes = {name: _bytes(tensor) for name, tensor in self.tensors.items()}

    def write(self, start: int, bucket: Tensor) -> None:
        """Write the next bucket: (n,) uint8, bytes `start` to `start + n` of the flat buffer. Call in order.

        The checksum is of the copy: another process may change the source meanwhile.
        """
        stop = start + bucket.numel()
        while self._next < len(self._entries):
            entry = self._entries[self._next]
            low, high = max(entry.start, start), min(entry.stop, stop)
            if low < high:
                target = self._bytes[entry.name][low - entry.start : high - entry.start]
                self._running.copy(bucket[low - start : high - start], target)
            if entry.stop > stop:
                return
            self._complete(entry)

    def finish(self) -> None:
        """Raises PushFailed when the buckets do not cover all tensors."""
        if not self._entries or self._entries[-1].stop == 0:
            self.write(0, torch.empty(0, dtype=torch.uint8))  # only empty tensors: there was no bucket
        if self._next != len(self._entries):
            raise PushFailed(f"buckets must cover every tensor: {self._entries[self._next].name} is incomplete")

    def patch(self, base: Tensor, changed: Iterable[Patch]) -> None:
        """Write the next tensor: a copy of `base`, with new numbers. `changed` are its blocks.

        Without a copy if `base` is the target itself.
        """
        entry, source = self._entries[self._next], _bytes(base)
        target = self._bytes[entry.name]
        is_apart = source.data_ptr() != target.data_ptr()
        for block, positions, values in changed:
            piece = block.of(target)
            if is_apart and not len(positions):
                self._running.copy(block.of(source), piece)
                continue
            if is_apart:
                piece.copy_(block.of(source))
            places = torch.from_numpy(positions).to(target.device)
            piece.view(NUMBERS[block.size])[places] = torch.from_numpy(values).to(target.device)
            self._running.add(piece)
        self._complete(entry)

    def reject(self) -> None:
        """Nothing that was received can be used."""
        self.wrong = [entry.name for entry in self._entries]

    def _complete(self, entry: TensorEntry) -> None:
        if self._running.value() != self._checksums[self._next]:
            self.wrong.append(entry.name)
        self._next += 1
        self._running.restart()


class DeltaBuffers:
    """Collects the payload of a delta, and applies it to a copy of the weights that it starts from."""

    def __init__(self, n_bytes: int, base: BaseWeights, manifest: Manifest, buffers: ReceiveBuffers) -> None:
        self.n_bytes, self.base = n_bytes, base
        self._payload = torch.empty(n_bytes, dtype=torch.uint8)
        self._entries, self._buffers = manifest.entries, buffers

    @property
    def wrong(self) -> list[str]:
        return self._buffers.wrong

    def write(self, start: int, bucket: Tensor) -> None:
        self._payload[start : start + len(bucket)].copy_(bucket)

    def finish(self) -> None:
        """Every tensor of the target is verified, those without a change as well."""
        try:
            found = patches(self._payload, self._entries)
            for entry in self._entries:
                self._buffers.patch(self.base.tensors[entry.name], islice(found, len(blocks_of(entry))))
        except ValueError:  # wrong bytes concern this member only: it reports them as any others
            self._buffers.reject()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _fits(manifest: Manifest, into: Mapping[str, Tensor], device: torch.device) -> bool:
    """Whether all tensors exist with the right form and device and can be written byte by byte."""
    forms = forms_of(into)
    return all(
        forms.get(entry.name) == (entry.shape, entry.dtype)
        and into[entry.name].device.type == device.type
        and into[entry.name].is_contiguous()
        and not into[entry.name].is_inference()
        for entry in manifest.entries
    )
