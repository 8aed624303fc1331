"""Which piece of the training state each rank writes, by torch's DCP planner, and its copy on the host.

The file of a rank has the safetensors form of DCP (`HuggingFaceStorageReader` reads it). DCP's own save and its
`.metadata` file are not used: both pickle. Each rank plans alone: the meshes say who writes which replicated piece.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import DTensor

from actors.learner.checkpoint.shards.tensor_file import FileRecord, write_tensors

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
    """The pieces of rank `index` of `size` on the host; `replicas` copies of the model. With `copies`
    no memory is shared with `state`.

    A piece that several ranks hold is written by one of them: a plain tensor by rank 0, a piece of a sharded one by the
    copies of the model in turn, in the order of the names: that of `state` may differ between ranks after a resume.
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
