"""Where a push comes down: tensors filled and verified bucket by bucket; knows no group and no store."""

from collections.abc import Mapping

import torch
from torch import Tensor

from areal_bus.checksum import Checksum
from areal_bus.errors import PushFailed
from areal_bus.manifest import Entry, Manifest
from areal_bus.snapshot import forms_of


class Landing:
    """Where buckets come down: copies them to their tensors and verifies each tensor as its last byte arrives."""

    def __init__(self, manifest: Manifest, into: Mapping[str, Tensor] | None, device: torch.device) -> None:
        self.wrong: list[str] = []  # names of tensors whose bytes are not those of the manifest
        self.digest = manifest.digest
        self._entries = manifest.entries
        self._checksums = manifest.checksums
        self._next = 0  # first entry not yet complete
        self._running = Checksum(device)  # of what has come of it
        if into is not None and _fits(manifest, into, device):
            self.tensors = {entry.name: into[entry.name] for entry in manifest.entries}
        else:
            flat = torch.empty(manifest.n_bytes, dtype=torch.uint8, device=device)
            self.tensors = {entry.name: entry.view(flat) for entry in manifest.entries}
        self._bytes = {name: tensor.detach().reshape(-1).view(torch.uint8) for name, tensor in self.tensors.items()}

    def land(self, start: int, bucket: Tensor) -> None:
        """`bucket` is (n,) uint8: bytes `start` to `start + n` of the flat buffer. In order.

        What has come down is summed up, not what it came from, which another process may change meanwhile.
        """
        stop = start + bucket.numel()
        while self._next < len(self._entries):
            entry = self._entries[self._next]
            low, high = max(entry.start, start), min(entry.stop, stop)
            if low < high:
                target = self._bytes[entry.name][low - entry.start : high - entry.start]
                self._running.bring(bucket[low - start : high - start], target)
            if entry.stop > stop:
                return
            self._complete(entry)

    def finish(self) -> None:
        """Raises PushFailed when buckets ended before the last tensor did."""
        if not self._entries or self._entries[-1].stop == 0:
            self.land(0, torch.empty(0, dtype=torch.uint8))  # nothing but empty tensors: no bucket came
        if self._next != len(self._entries):
            raise PushFailed(f"buckets must bring every tensor: {self._entries[self._next].name} is incomplete")

    def _complete(self, entry: Entry) -> None:
        if self._running.value() != self._checksums[self._next]:
            self.wrong.append(entry.name)
        self._next += 1
        self._running.restart()


def _fits(manifest: Manifest, into: Mapping[str, Tensor], device: torch.device) -> bool:
    """Each tensor is there, in the right form and place, and can be written byte by byte."""
    forms = forms_of(into)
    return all(
        forms.get(entry.name) == (entry.shape, entry.dtype)
        and into[entry.name].device.type == device.type
        and into[entry.name].is_contiguous()
        and not into[entry.name].is_inference()
        for entry in manifest.entries
    )
