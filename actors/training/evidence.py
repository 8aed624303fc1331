"""Keeps the batch whose loss or gradient was not finite, so that it can be looked at; knows nothing of why."""

import json
from dataclasses import fields
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from actors.training.batch import Batch, Item


def save_batch(folder: Path, batch: Batch, *, reason: str) -> Path:
    """Write a rank's share as batch.safetensors (tensors by item) and batch.json (all else); the folder is returned."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    records = []
    for index, item in enumerate(batch.items):
        record = {}
        for field in fields(Item):
            value = getattr(item, field.name)
            if isinstance(value, Tensor):
                tensors[f"{index}/{field.name}"] = value.contiguous()
            else:
                record[field.name] = value
        records.append(record)
        if index in batch.prox:
            tensors[f"{index}/prox"] = batch.prox[index].contiguous()
    if batch.advantages is not None:
        tensors["advantages"] = batch.advantages.contiguous()
    save_file(tensors, str(folder / "batch.safetensors"))
    about = {"reason": reason, "step": batch.step, "clock": batch.clock, "n_groups": batch.n_groups, "items": records}
    (folder / "batch.json").write_text(json.dumps(about, indent=1, ensure_ascii=False))
    return folder
