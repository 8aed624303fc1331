"""Target tensors of a push on a member: written bucket by bucket, and verified tensor by tensor."""

from collections.abc import Mapping

import torch
from torch import Tensor

from areal_bus.errors import PushFailed
from areal_bus.weights.checksum import Checksum
from areal_bus.weights.manifest import Manifest, TensorEntry
from areal_bus.weights.snapshot import forms_of


class ReceiveBuffers:
    """Target tensors of a push: buckets are copied into them; each tensor is verified when its last byte arrives."""

    def __init__(self, manifest: Manifest, into: Mapping[str, Tensor] | None, device: torch.device) -> None:
        self.wrong: list[str] = []  # names of tensors with wrong checksums
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
        self._bytes = {name: tensor.detach().reshape(-1).view(torch.uint8) for name, tensor in self.tensors.items()}

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

    def _complete(self, entry: TensorEntry) -> None:
        if self._running.value() != self._checksums[self._next]:
            self.wrong.append(entry.name)
        self._next += 1
        self._running.restart()


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
