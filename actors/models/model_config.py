"""Reads the config.json of a model. Its imports are small: the head reads it, too."""

import json
import re
from pathlib import Path
from typing import Any

from actors.models.adapter_folder import base_of
from areal_bus.errors import ConfigError

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
        raise ConfigError(f"{name} of a model must be a JSON object: {file}: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{name} of a model must be a JSON object: {file} holds a {type(value).__name__}")
    return value
