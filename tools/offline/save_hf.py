"""Converts a checkpoint to a Hugging Face folder, for `tools/save_hf.py`."""

from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoConfig

from actors.learner.checkpoint.checkpoint import MASTER, POLICY, WHOLE_OPTIMIZER
from actors.learner.checkpoint.shards import ShardReader
from actors.models.loading import load_model, load_tokenizer
from actors.models.model_config import base_of
from areal_bus.errors import ConfigError
from areal_bus.storage.versioned_dirs import temporary_folder


def save_hf(checkpoint: Path, final: Path, *, dtype: str = "", shard_gb: float = 5.0) -> None:
    """Write the folder `final`, whole or not at all. `dtype` "": that of the checkpoint. Raises ConfigError when the
    model does not load or the disk is full, CheckpointError.
    """
    source = checkpoint / "model"
    dtype = dtype or dtype_of(source)
    model = load_model(str(source), dtype, "cpu")
    n_exact = take_masters(model, checkpoint) if dtype == "float32" else 0
    try:
        with temporary_folder(final) as building:
            model.save_pretrained(building, max_shard_size=f"{shard_gb:g}GB")
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
