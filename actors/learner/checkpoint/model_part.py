"""The Hugging Face folder of a checkpoint, of which each rank writes the weights of whole tensors: one file a rank."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion

from actors.learner.checkpoint.shards import FileRecord, on_host, write_tensors
from actors.learner.model.adapters import Adapters
from actors.learner.model.policy import PackedModel, Policy, whole
from actors.models.loading import turn_end

FSDP = "FSDP"  # prefix that FSDP2 gives the class of a sharded model
SETTINGS = "tokenizer_config.json"
NEW_CLASSES = ("TokenizersBackend", "PythonBackend", "SentencePieceBackend")  # of transformers 5
INDEX = "model.safetensors.index.json"


@dataclass(slots=True)
class ModelPart:
    """This rank's part of a folder; rank 0 also writes configuration and tokenizer."""

    folder: str  # in the checkpoint
    model: PackedModel
    is_root: bool
    file: str  # of this rank's weights, in the folder
    tensors: dict[str, Tensor] = field(default_factory=dict)  # on the host, in the type that they are pushed in

    def write(self, building: Path, tokenizer: Any) -> dict[str, FileRecord]:
        """Write this rank's files; returns those that are hashed already. Frees the memory. Raises OSError."""
        folder, model = building / self.folder, self.model
        adapters = adapters_of(model)
        if self.is_root:
            tokenizer.save_pretrained(folder)
            keep_class(folder, tokenizer)
            if adapters is None:
                _describe(folder, model)
                add_turn_end(folder, tokenizer)
            else:
                adapters.write(folder, self.tensors)
                self.tensors.clear()
        if not self.tensors:
            return {}
        found = revert_weight_conversion(model.model, self.tensors)
        return {f"{self.folder}/{self.file}": write_tensors(folder / self.file, found, {"format": "pt"})}


def adapters_of(model: PackedModel) -> Adapters | None:
    return model.adapters if isinstance(model, Policy) else None


def stage_model(folder: str, model: PackedModel, *, copies: bool) -> ModelPart:
    """Gather the tensors, each on the rank that writes it. A collective when sharded. Adapters: rank 0 writes all."""
    ranks = model.ranks
    tensors = _tensors(model)
    owners = _owners(model, tensors, ranks.size)
    files = _file_names(owners)
    part = ModelPart(folder, model, ranks.index == 0, files.get(ranks.index, ""))
    for name, tensor in tensors.items():
        rounded = tensor.detach().to(model.dtype) if _is_rounded(model, name) else tensor.detach()
        full = whole(rounded)
        if owners[name] == ranks.index:
            part.tensors[name] = on_host(full, copies=copies and _shares(full, tensor))
    return part


def write_index(folder: Path) -> None:
    """Write the index of a folder whose weights are in several files. Raises OSError."""
    weight_map: dict[str, str] = {}
    n_bytes = 0
    for path in sorted(folder.glob("model-*-of-*.safetensors")):
        n_bytes += path.stat().st_size
        with safe_open(path, framework="pt") as file:
            weight_map |= dict.fromkeys(file.keys(), path.name)
    if weight_map:
        index = {"metadata": {"total_size": n_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _tensors(model: PackedModel) -> dict[str, Tensor]:
    """Parameters and buffers; of a policy with adapters, the adapters."""
    if adapters_of(model) is not None:
        return dict(model.parameters())
    every = (name for name, _ in model.model.named_parameters(remove_duplicate=False))
    tied = set(every) - set(model.parameters())
    return {name: tensor for name, tensor in model.model.state_dict().items() if name not in tied}


def _is_rounded(model: PackedModel, name: str) -> bool:
    return adapters_of(model) is None and name in model.parameters()


def _shares(full: Tensor, source: Tensor) -> bool:
    """Whether the tensor has the memory of the live one: it was neither rounded nor gathered."""
    live = source.to_local() if isinstance(source, DTensor) else source
    return full.device == live.device and full.untyped_storage().data_ptr() == live.untyped_storage().data_ptr()


def _owners(model: PackedModel, tensors: Mapping[str, Tensor], n_ranks: int) -> dict[str, int]:
    """Name -> the rank that writes it, balanced by size; rank 0 writes all if its files merge tensors of memory."""
    if n_ranks == 1 or adapters_of(model) is not None or _merges(model.model):
        return dict.fromkeys(tensors, 0)
    load = [0] * n_ranks
    owners = {}
    for name in sorted(tensors, key=lambda name: (-tensors[name].numel(), name)):
        owners[name] = load.index(min(load))
        load[owners[name]] += tensors[name].numel()
    return owners


def _merges(model: Any) -> bool:
    conversions: Sequence[Any] | None = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    return any(isinstance(conversion, WeightConverter) for conversion in conversions)


def _file_names(owners: Mapping[str, int]) -> dict[int, str]:
    """Rank -> name of its file, by the convention of transformers."""
    ranks = sorted(set(owners.values()))
    if len(ranks) == 1:
        return {ranks[0]: "model.safetensors"}
    return {rank: f"model-{i + 1:05d}-of-{len(ranks):05d}.safetensors" for i, rank in enumerate(ranks)}


def keep_class(folder: Path, tokenizer: Any) -> None:
    """Name the class that the source of the tokenizer names: transformers 4 does not know those of transformers 5."""
    file, source = folder / SETTINGS, Path(str(getattr(tokenizer, "name_or_path", ""))) / SETTINGS
    if not file.is_file():
        return
    settings = json.loads(file.read_text(encoding="utf-8"))
    if settings.get("tokenizer_class") not in NEW_CLASSES:
        return
    named = json.loads(source.read_text(encoding="utf-8")).get("tokenizer_class") if source.is_file() else None
    settings["tokenizer_class"] = named if named and named not in NEW_CLASSES else "PreTrainedTokenizerFast"
    file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def add_turn_end(folder: Path, tokenizer: Any) -> None:
    """Let generation stop at the token that ends a turn of the chat template: a base model's settings lack it."""
    file, end = folder / "generation_config.json", turn_end(tokenizer)
    if end is None or not file.is_file():
        return
    settings = json.loads(file.read_text(encoding="utf-8"))
    ends = settings.get("eos_token_id")
    known = list(ends) if isinstance(ends, list) else [] if ends is None else [ends]
    if end not in known:
        settings["eos_token_id"] = [*known, end]
        file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _describe(folder: Path, packed: PackedModel) -> None:
    """Write config.json with the type of the weights in the folder, and the generation settings."""
    model = packed.model
    model.config.save_pretrained(folder)
    with contextlib.suppress(AttributeError):  # a model that generates nothing has none
        model.generation_config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["dtype"] = str(packed.dtype).removeprefix("torch.")
    config["architectures"] = [type(model).__name__.removeprefix(FSDP)]
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
