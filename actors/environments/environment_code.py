"""What a process needs to load an environment."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from areal_bus.config.sections import Config


@dataclass(frozen=True, slots=True)
class EnvironmentCode:
    """An environment by name, with the arguments of its `load_environment`."""

    name: str
    arguments: str  # a JSON object, so that this is hashable
    model: str  # name of the model, for environments that ask for it
    folder: str  # of the config: its modules are found, last
    size: int = 1  # tasks that are taken of an infinite taskset

    @classmethod
    def of(cls, config: Config, name: str, folder: str | Path) -> "EnvironmentCode":
        arguments = json.dumps(dict(config.workflow.arguments), sort_keys=True)
        return cls(name, arguments, config.model.path or "scratch", str(folder), config.data.size)

    @classmethod
    def read(cls, order: Mapping[str, Any]) -> "EnvironmentCode":
        """The inverse of `order`."""
        return cls(**order)

    def order(self) -> dict[str, Any]:
        """As JSON, for another process."""
        return asdict(self)
