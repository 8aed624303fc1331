"""The files of a checkpoint, a part a rank: staged on the host, written beside training, loaded by any ranks.

torch's DCP planner decides which piece of the training state each rank writes. The file of a rank has the safetensors
form of DCP (`HuggingFaceStorageReader` reads it). DCP's own save and its `.metadata` file are not used: both pickle.
Each rank plans alone: the meshes say who writes which replicated piece. A file is written block by block, with the
SHA-256 of its bytes: safetensors' own writer holds the GIL while it writes, and training would wait.

The ranks conclude a checkpoint on their writer threads: reports in the store of rank 0, no collective. Shards are
loaded into tensors of any sharding, by DCP's planner; each rank reads what it holds.
"""

import hashlib
import json
import math
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from areal_bus.errors import CheckpointError

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
    """Write and sync the file. `tensors` (on the host) are removed from the dict once written. Raises OSError."""
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


FOLDER = "shards"  # of a checkpoint
RNG = "rng/"  # prefix of the state of a rank's random numbers


@dataclass(slots=True)
class Shard:
    """The pieces that this rank writes, by the key of the whole tensor."""

    tensors: dict[str, Tensor] = field(default_factory=dict)  # on the host
    offsets: dict[str, list[int]] = field(default_factory=dict)  # of the piece in the whole tensor
    file: str = ""

    def write(self, building: Path) -> dict[str, FileRecord]:
        """Write the file of this rank, if it has a piece. Frees the memory. Raises OSError."""
        if not self.tensors:
            return {}
        sharding = {key: {"saved_offsets": offsets} for key, offsets in self.offsets.items()}
        metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(sharding)}
        return {self.file: write_tensors(building / self.file, self.tensors, metadata)}


def stage_shard(state: Mapping[str, Tensor], *, index: int, size: int, replicas: int, copies: bool) -> Shard:
    """The pieces of rank `index` of `size` on the host; `replicas` copies; `copies`: no memory shared with `state`.

    A shared piece is written by one rank: plain tensors by rank 0, sharded ones in turn, in the order of names.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    mine = {key: state[key] for i, key in enumerate(sorted(state)) if _is_mine(key, state[key], i, index, replicas)}
    planner.set_up_planner(mine, is_coordinator=True)
    shard = Shard(file=f"{FOLDER}/shard-{index + 1:05d}-of-{size:05d}.safetensors")
    for item in planner.create_local_plan().items:
        piece = planner.resolve_data(item)
        if not isinstance(piece, Tensor) or not piece.numel():  # a rank beyond the rows of a small tensor
            continue
        key, offset = item.index.fqn, item.index.offset
        shard.tensors[key] = on_host(piece.detach(), copies=copies)
        shard.offsets[key] = [0] * piece.dim() if offset is None else list(offset)
    return shard


def _is_mine(key: str, tensor: Tensor, i: int, index: int, replicas: int) -> bool:
    if not isinstance(tensor, DTensor):
        return index == 0 or key.startswith(RNG)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    return tensor.device_mesh.ndim == 1 or i % replicas == coordinate[0]


def on_host(tensor: Tensor, *, copies: bool) -> Tensor:
    """The tensor in host memory; with `copies` in memory of its own."""
    if tensor.device.type == "cpu" and copies:
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return tensor.cpu()


class ShardReader:
    """The tensors in the shards of a checkpoint, by key."""

    def __init__(self, checkpoint: Path) -> None:
        """Reads the headers of all shards. Raises CheckpointError when one is damaged or a piece is missing."""
        self._folder = checkpoint / FOLDER
        try:
            self._metadata: Metadata = HuggingFaceStorageReader(str(self._folder)).read_metadata()
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise CheckpointError(f"unreadable checkpoint {self._folder}: {error}") from error
        for key, form in self._forms():
            n = sum(math.prod(chunk.sizes) for chunk in form.chunks)
            if n != math.prod(form.size):
                raise CheckpointError(
                    f"incomplete checkpoint: the shards in {self._folder} hold {n} of {math.prod(form.size)} "
                    f"numbers of {key!r}"
                )

    def _forms(self) -> Iterator[tuple[str, TensorStorageMetadata]]:
        for key, form in self._metadata.state_dict_metadata.items():
            if isinstance(form, TensorStorageMetadata):
                yield key, form

    def forms(self, prefix: str) -> dict[str, TensorStorageMetadata]:
        """Key without the prefix -> shape and dtype of the whole tensor."""
        return {key.removeprefix(prefix): form for key, form in self._forms() if key.startswith(prefix)}

    def load(self, targets: Mapping[str, Tensor]) -> None:
        """Fill the tensors, DTensors included: each rank reads its piece, whatever ranks wrote it. No collective."""
        if not targets:
            return
        state = dict(targets)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        reader = HuggingFaceStorageReader(str(self._folder))
        planner.set_up_planner(state, self._metadata, is_coordinator=True)
        reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
        reader.read_data(plan, planner).wait()


POLL_S = 0.05
TIMEOUT_S = 1800.0  # until the slowest rank has written its part

Files = Mapping[str, FileRecord]


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks conclude one checkpoint."""

    index: int  # of this rank
    size: int
    number: int  # of the checkpoint
    store: Store | None  # of rank 0; None for a single rank


@dataclass(frozen=True, slots=True)
class RankReport:
    """What a rank wrote, by path in the checkpoint; or why it could not."""

    files: Files
    error: str = ""

    def to_json(self) -> str:
        files = {name: [record.n_bytes, record.sha256] for name, record in self.files.items()}
        return json.dumps({"files": files, "error": self.error})

    @staticmethod
    def from_json(text: str) -> "RankReport":
        found: dict[str, Any] = json.loads(text)
        return RankReport({name: FileRecord(*record) for name, record in found["files"].items()}, found["error"])


def conclude(meeting: Meeting, mine: RankReport, seal: Callable[[Files], None], give_up: Callable[[], None]) -> None:
    """Rank 0 seals what all ranks wrote. Raises CheckpointError, on every rank, when one could not write or report."""
    if meeting.index == 0:
        error = _conclude_as_root(meeting, mine, seal, give_up)
    else:
        store = _store(meeting)
        store.set(str(meeting.index), mine.to_json())
        error = _wait(store, "word", "rank 0")
    if error:
        raise CheckpointError(error)


def _conclude_as_root(
    meeting: Meeting, mine: RankReport, seal: Callable[[Files], None], give_up: Callable[[], None]
) -> str:
    store = _store(meeting) if meeting.size > 1 else None
    error = "rank 0 could not conclude it"
    try:
        reports = [mine, *_collect(store, meeting.size)]
        errors = [f"rank {i}: {r.error}" if meeting.size > 1 else r.error for i, r in enumerate(reports) if r.error]
        if not errors:
            seal({name: record for report in reports for name, record in report.files.items()})
        error = "; ".join(errors)
    except CheckpointError as found:
        error = str(found)
    except Exception:
        _announce(store, error, give_up)
        raise
    _announce(store, error, give_up)
    return error


def _announce(store: Store | None, error: str, give_up: Callable[[], None]) -> None:
    if error:
        give_up()
    if store is not None:
        store.set("word", error)


def _collect(store: Store | None, n_ranks: int) -> list[RankReport]:
    """Of all ranks but the first."""
    if store is None:
        return []
    return [RankReport.from_json(_wait(store, str(index), f"rank {index}")) for index in range(1, n_ranks)]


def _store(meeting: Meeting) -> Store:
    if meeting.store is None:
        raise CheckpointError("missing store: several ranks need one to conclude a checkpoint")
    return PrefixStore(f"checkpoint/{meeting.number}", meeting.store)


def _wait(store: Store, key: str, who: str) -> str:
    """The value, once it is set. Raises CheckpointError."""
    deadline = time.monotonic() + TIMEOUT_S
    try:
        while not store.check([key]):
            if time.monotonic() > deadline:
                raise CheckpointError(f"{who} has not reported its part of a checkpoint for {TIMEOUT_S:g} s")
            time.sleep(POLL_S)
        return store.get(key).decode()
    except RuntimeError as error:  # the store has ended, and so does this rank
        raise CheckpointError(f"{who} is gone: {error}") from error
