"""Checks generation settings against the model: token ids, arguments of the chat template, stop strings."""

from typing import Any

from actors.engines.stop_strings import cannot_stop
from actors.models.loading import load_tokenizer
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError


def check_token_ids(config: Config, vocabulary: int) -> None:
    """Raises ConfigError for a token id that the model does not have."""
    found = {"stop_token_ids": config.gconfig.stop_token_ids, "logit_bias": tuple(config.gconfig.logit_bias)}
    for key, ids in found.items():
        if large := [token for token in ids if token >= vocabulary]:
            raise ConfigError(f"gconfig.{key} must name token ids below {vocabulary} (the model's): {large[0]} is not")


def check_tokenizer(config: Config, model: str) -> None:
    """Stop strings need a fast tokenizer, arguments a template that reads them. Raises ConfigError."""
    if config.model.scratch is not None or not (config.gconfig.stop or config.data.chat_template_kwargs):
        return
    tokenizer = load_tokenizer(model)
    if config.gconfig.stop and (why := cannot_stop(tokenizer)):
        raise ConfigError(f"gconfig.stop: {why}")
    check_arguments(config, tokenizer)


def check_arguments(config: Config, tokenizer: Any) -> None:
    """Raises ConfigError for an argument that the template does not read: it would change nothing."""
    template = config.workflow.agent.chat_template or str(tokenizer.chat_template or "")
    for name in config.data.chat_template_kwargs:
        if name not in template:
            raise ConfigError(
                f"data.chat_template_kwargs must name arguments that the chat template reads: {name!r} is not in that "
                f"of {config.model.path}"
            )
