"""Checks, before a run starts, its models and adapters, and token ids, templates and stop strings against them."""

import tempfile
from pathlib import Path
from typing import Any

from actors.engines.stop_strings import cannot_stop
from actors.learner.link.teacher_server import SAMPLE, check_server
from actors.models.loading import check_model_path, empty_model, load_tokenizer, max_positions
from actors.models.model_config import is_adapter_folder, misfit
from actors.models.scratch import character_tokenizer, check_shape, is_scratch_folder, write_scratch_folder
from areal_bus.config.algorithms import is_url, uses_reference
from areal_bus.config.sections import Config
from areal_bus.config.stages import largest, samplings_of
from areal_bus.errors import ConfigError


def check_model(config: Config, folder: Path) -> str:
    """The model's folder or id; "" for [model.scratch], whose folder is created in the run's. Raises ConfigError."""
    if config.model.scratch is None:
        return check_model_path(config.model.path, folder)
    check_shape(config.model.scratch)
    return ""


def check_packages(config: Config) -> None:
    """Raises ConfigError for a package that the learner lacks, and for a target of uploads that cannot be used."""
    if config.actor.optimizer == "adamw8bit":
        from actors.learner.update.optimizers import check_torchao  # imports torch

        check_torchao()
    if config.checkpoint.upload or config.checkpoint.push_to_hub:
        from actors.learner.checkpoint.upload import check_hub, file_system  # imports fsspec

        if config.checkpoint.upload:
            file_system(config.checkpoint.upload)
        if config.checkpoint.push_to_hub:
            check_hub(config.checkpoint.push_to_hub)


def check_lora(config: Config, model: str) -> None:
    """peft is there, and the model has the layers that get adapters. Raises ConfigError."""
    lora = config.actor.lora
    if lora is None:
        return
    starts = bool(model) and is_adapter_folder(Path(model))
    if starts and uses_reference(config.actor) and not config.reference.path:
        what = f"the reference would be the base of {model}, not version 0, which has its adapters"
        raise ConfigError(f"{what}: set reference.path to this folder, or to that of the base")
    from actors.models.lora import adapted_layers, check_peft  # imports torch

    check_peft()
    with tempfile.TemporaryDirectory() as described:
        if config.model.scratch is not None:
            write_scratch_folder(Path(described), config.model.scratch)
        layers = adapted_layers(empty_model(model or described, "float32", "meta"), lora.target_modules)
    if starts and (why := misfit(Path(model), lora, layers)):
        raise ConfigError(f"{why}; a run that starts from adapters has their settings")


def check_frozen_models(config: Config, folder: Path, model: str) -> None:
    """Reference and teacher have weights, the policy's tokens and room for its sequences. Raises ConfigError."""
    paths = {"reference.path": config.reference.path, "teacher.path": config.teacher.path}
    found = {key: check_model_path(path, folder, key=key) for key, path in paths.items() if path and not is_url(path)}
    if not any(paths.values()):
        return
    scratch = config.model.scratch
    tokenizer: Any = character_tokenizer(scratch) if scratch else load_tokenizer(model)
    if is_url(config.teacher.path):
        text = scratch.characters if scratch else SAMPLE
        ids = tokenizer.encode(text).ids if scratch else tokenizer(text, add_special_tokens=False)["input_ids"]
        check_server(config.teacher.path, text, ids)
    ours = tokenizer.get_vocab()
    for key, other in found.items():
        if is_scratch_folder(Path(other)):
            raise ConfigError(f"{key} needs a trained model: {other} has no weights; name the RUN/model of a run")
        theirs = load_tokenizer(other).get_vocab()
        differing = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
        if differing:
            n = f"{len(differing)} tokens have another id or are in one of them only, the first is {differing[0]!r}"
            raise ConfigError(f"{key} must be a model with the policy's tokenizer: {n} ({other})")
        most, longest = max_positions(other), config.data.max_prompt_tokens + largest(config).gconfig.max_new_tokens
        if most is not None and most < longest:
            sum_ = f"data.max_prompt_tokens + gconfig.max_new_tokens = {longest} tokens"
            raise ConfigError(f"{key} must read whole sequences, up to {sum_}: {other} reads {most}")


def check_token_ids(config: Config, vocabulary: int) -> None:
    """Raises ConfigError for a token id that the model does not have."""
    ways = samplings_of(config)
    stops = [("stop_token_ids", one.stop_token_ids) for one in ways]
    for key, ids in (*stops, *(("logit_bias", (*one.logit_bias,)) for one in ways)):
        if large := [token for token in ids if token >= vocabulary]:
            raise ConfigError(f"unknown token id {large[0]} in gconfig.{key}: the model has {vocabulary} tokens")


def check_tokenizer(config: Config, model: str) -> None:
    """Stop strings need a fast tokenizer, arguments a template that reads them. Raises ConfigError."""
    stops = any(one.stop for one in samplings_of(config))
    if config.model.scratch is not None or not (stops or config.data.chat_template_kwargs):
        return
    tokenizer = load_tokenizer(model)
    if stops and (why := cannot_stop(tokenizer)):
        raise ConfigError(f"gconfig.stop: {why}")
    check_arguments(config, tokenizer)


def check_arguments(config: Config, tokenizer: Any) -> None:
    """Raises ConfigError for an argument that the template does not read: it would change nothing."""
    template = config.workflow.agent.chat_template or str(tokenizer.chat_template or "")
    for name in config.data.chat_template_kwargs:
        if name not in template:
            rule = "data.chat_template_kwargs must name arguments that the chat template reads"
            raise ConfigError(f"{rule}: {name!r} is not in that of {config.model.path}")
