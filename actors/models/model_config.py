"""Reads the config.json of a model or of adapters, and what a sample may hold. Imports no torch: the head reads it."""

import json
import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from areal_bus.config.learner import LoraConfig
from areal_bus.config.rollout import changes_logits
from areal_bus.config.sections import Config
from areal_bus.config.stages import samplings_of
from areal_bus.core.parts.sample_limits import SampleLimits
from areal_bus.errors import ConfigError

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of the names in peft's files
REFUSED = ("fan_in_fan_out", "lora_bias", "modules_to_save")


def is_adapter_folder(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file()


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Raises ConfigError for another kind of adapter than LoRA, and for its variants."""
    file = folder / CONFIG_FILE
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        odd = [key for key in REFUSED if config.get(key)]
        kind, base = config["peft_type"], config["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"invalid {CONFIG_FILE} of an adapter: {file}: {error!r}; it must have its type and base model"
        ) from None
    if kind != "LORA" or odd or not base:
        what = f"{kind} with {odd[0]}" if odd else f"{kind} of {base!r}"
        raise ConfigError(
            f"only LoRA adapters of linear layers of a named model are supported: {folder} is {what}; merge it with "
            "peft (merge_and_unload) and use the whole model"
        )
    return dict(config)


def base_of(path: str) -> str:
    """The model that an adapter folder belongs to; the path itself for anything else. Raises ConfigError."""
    folder = Path(path)
    return str(read_adapter_config(folder)["base_model_name_or_path"]) if is_adapter_folder(folder) else path


def form_of(config: dict[str, Any], layer: str) -> tuple[int, float]:
    """Rank and alpha of a layer by peft's rules: of the first pattern that matches the end of its name, else common."""

    def chosen(patterns: dict[str, Any] | None, common: Any) -> Any:
        found = (value for name, value in (patterns or {}).items() if re.match(rf"(.*\.)?({name})$", layer))
        return next(found, common)

    rank = chosen(config.get("rank_pattern"), config["r"])
    return int(rank), float(chosen(config.get("alpha_pattern"), config["lora_alpha"]))


def scale_of(config: dict[str, Any], layer: str) -> float:
    """Factor of the product of the two matrices of a layer."""
    rank, alpha = form_of(config, layer)
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def misfit(folder: Path, lora: LoraConfig, layers: Collection[str]) -> str:
    """How the adapters of a folder differ from actor.lora on these layers; "" where they fit."""
    from safetensors import safe_open

    from actors.models.lora import magnitude_of, names_of

    theirs = read_adapter_config(folder)
    kinds = [kind for kind in ("rslora", "dora") if theirs.get(f"use_{kind}")]
    names = {name for layer in layers for name in names_of(layer)}
    names |= {magnitude_of(layer) for layer in layers} if "dora" in lora.variant else set()
    with safe_open(str(folder / WEIGHTS_FILE), framework="np") as file:
        odd = sorted({name.removeprefix(PREFIX) for name in file.keys()} ^ names)  # noqa: SIM118  it is no mapping
    if set(kinds) != set(lora.variant) - {"nf4"}:
        return f"mismatch of actor.lora.variant: {folder} has {kinds}, the settings {sorted({*lora.variant} - {'nf4'})}"
    if odd:
        return f"mismatch of actor.lora.target_modules: {odd[0]!r} is in {folder} or in the settings, not in both"
    for layer in sorted(layers):
        (rank, alpha), ours = form_of(theirs, layer), lora.form(layer)
        if (rank, alpha) != ours:
            found = f"{folder} has rank {rank} and alpha {alpha:g} in {layer}"
            return f"mismatch of actor.lora: {found}, the settings {ours[0]} and {ours[1]:g}"
    return ""


def merge_folder(model: Any, folder: Path) -> None:
    """Merge the adapters into the weights of their base model. Raises ConfigError for those of another model."""
    from safetensors.torch import load_file

    from actors.models.lora import magnitude_of, merged, names_of

    config = read_adapter_config(folder)
    found = {name.removeprefix(PREFIX): tensor for name, tensor in load_file(str(folder / WEIGHTS_FILE)).items()}
    parameters = dict(model.named_parameters())
    suffix = names_of("")[0]
    for layer in [name.removesuffix(suffix) for name in list(found) if name.endswith(suffix)]:
        a, b, m = (found.pop(name, None) for name in (*names_of(layer), magnitude_of(layer)))
        weight = parameters.get(f"{layer}.weight")
        if weight is None or a is None or b is None or weight.shape != (len(b), a.shape[1]):
            raise ConfigError(
                f"mismatch of an adapter and its base model: {folder} adapts {layer!r}, which is missing or has "
                "another shape"
            )
        m = None if m is None else m.to(weight.device)
        weight.data.copy_(merged(weight.data, a.to(weight.device), b.to(weight.device), scale_of(config, layer), m))
    if found:
        raise ConfigError(
            f"unsupported weight {sorted(found)[0]!r} in {folder}: only lora_A, lora_B and magnitudes are read"
        )


HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")  # "owner/name"


def published_number(path: str, name: str) -> int | None:
    """A number of the config.json of a model that is on this host; None where it has none. No torch, no network."""
    path = base_of(path) if path else path
    if HUB_ID.match(path) and not Path(path).is_dir():
        from huggingface_hub import try_to_load_from_cache  # imported only for a model of the hub

        file = try_to_load_from_cache(path, "config.json")
        path = str(Path(file).parent) if isinstance(file, str) else ""
    return number_of(read_json(path, "config.json"), name) if path else None


def number_of(config: dict[str, Any], name: str) -> int | None:
    found = (config.get("text_config") or config).get(name)
    return found if type(found) is int else None


def read_json(folder: str, name: str) -> dict[str, Any]:
    """An object from a model's folder, {} when the file is not there. Raises ConfigError when it is no object."""
    file = Path(folder) / name
    try:
        value = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"invalid {name} of a model: {file}: {error}; it must be a JSON object") from None
    if not isinstance(value, dict):
        raise ConfigError(f"invalid {name} of a model: {file} holds a {type(value).__name__}, not a JSON object")
    return value


def sample_limits(config: Config, model_folder: str) -> SampleLimits:
    """Limits for samples of the model in this folder, or of this Hugging Face id."""
    is_built_in = config.has_plain_prompts
    is_plain = not any(map(changes_logits, samplings_of(config)))
    return SampleLimits(
        vocabulary=published_number(model_folder, "vocab_size"),
        positions=published_number(model_folder, "max_position_embeddings"),
        prompt=config.data.max_prompt_tokens if is_built_in else None,
        bounds_logps=is_built_in and is_plain,
        bounds_guests=is_plain,
    )
