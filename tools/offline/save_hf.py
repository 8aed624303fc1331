"""Converts a checkpoint to a Hugging Face folder: `python -m tools.offline.save_hf`, for `tools/save_hf.py`."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoConfig

from actors.learner.checkpoint.checkpoint import MASTER, POLICY, WHOLE_OPTIMIZER
from actors.learner.checkpoint.shards import ShardReader
from actors.models.loading import load_model, load_tokenizer
from actors.models.model_config import base_of
from actors.runtime.process import leave
from areal_bus.errors import ArealBusError, ConfigError
from areal_bus.storage.versioned_dirs import temporary_folder


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """A verified checkpoint and where its model goes."""

    checkpoint: str
    folder: str
    dtype: str  # "": that of the checkpoint
    shard_gb: float


def save_hf(order: SaveOrder) -> None:
    """Write the folder, whole or not at all. Raises ConfigError when the model does not load or the disk is full."""
    source, final = Path(order.checkpoint) / "model", Path(order.folder)
    dtype = order.dtype or dtype_of(source)
    model = load_model(str(source), dtype, "cpu")
    n_exact = take_masters(model, Path(order.checkpoint)) if dtype == "float32" else 0
    try:
        with temporary_folder(final) as building:
            model.save_pretrained(building, max_shard_size=f"{order.shard_gb:g}GB")
            load_tokenizer(str(source)).save_pretrained(building)
            if final.is_dir():
                final.rmdir()  # an empty one
            building.rename(final)
    except OSError as error:
        raise ConfigError(f"cannot write the model folder {final} ({error})") from error
    n_millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    exact = f", {n_exact} tensors from the learner's float32 weights" if n_exact else ""
    print(f"{final}: {n_millions:.1f} million parameters in {dtype}{exact}", flush=True)


def dtype_of(folder: Path) -> str:
    """The type of the model's weights by its configuration; of adapters, that of their base."""
    config = AutoConfig.from_pretrained(base_of(str(folder)))
    return str(config.dtype or torch.float32).removeprefix("torch.")


def take_masters(model: torch.nn.Module, checkpoint: Path) -> int:
    """Replace rounded parameters by the learner's float32 ones; returns how many. Raises CheckpointError."""
    parameters, whole = dict(model.named_parameters()), checkpoint / WHOLE_OPTIMIZER
    if not whole.is_file():
        reader, prefix = ShardReader(checkpoint), f"{POLICY}{MASTER}/"
        names = list(reader.forms(prefix))
        reader.load({f"{prefix}{name}": parameters[name].detach() for name in names})
        return len(names)
    n, prefix = 0, f"{MASTER}/"
    with safe_open(whole, framework="pt") as file, torch.no_grad():
        for key in file.keys():  # noqa: SIM118  no mapping
            if key.startswith(prefix):
                parameters[key.removeprefix(prefix)].copy_(file.get_tensor(key))
                n += 1
    return n


def main() -> int:
    try:
        save_hf(SaveOrder(**json.loads(sys.stdin.readline())))
    except ArealBusError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    leave(main())
