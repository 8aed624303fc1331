"""Loads the shards of a checkpoint into tensors of any sharding, by DCP's planner. Each rank reads what it holds."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from actors.learner.checkpoint.shards.plan import FOLDER
from areal_bus.errors import CheckpointError


class ShardReader:
    """The tensors in the shards of a checkpoint, by key."""

    def __init__(self, checkpoint: Path) -> None:
        """Reads the headers of all shards. Raises CheckpointError when one is damaged or a piece is missing."""
        self._folder = checkpoint / FOLDER
        try:
            self._metadata: Metadata = HuggingFaceStorageReader(str(self._folder)).read_metadata()
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise CheckpointError(f"a checkpoint is read whole: {self._folder} cannot be: {error}") from error
        for key, form in self._forms():
            n = sum(math.prod(chunk.sizes) for chunk in form.chunks)
            if n != math.prod(form.size):
                raise CheckpointError(
                    f"a checkpoint is read whole: the shards in {self._folder} hold {n} of {math.prod(form.size)} "
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
