"""An environment for another process: what it needs to load it, and rows in which its own row is one field."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError

INPUT = "verifiers"  # field of a row: the environment's own row
GROUP = "verifiers"  # reward.group
DEMONSTRATION = "demonstration"  # column that learner.warmup reads

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class EnvironmentCode:
    """An environment by name, with the arguments of its `load_environment`."""

    name: str
    arguments: str  # a JSON object, so that this is hashable
    model: str  # name of the model, for environments that ask for it
    folder: str  # of the config: its modules are found, last
    size: int = 1  # tasks that are taken of an infinite taskset
    is_grouped: bool = False  # reward.group = "verifiers": its rubric scores whole groups

    @classmethod
    def of(cls, config: Config, name: str, folder: str | Path) -> "EnvironmentCode":
        arguments = json.dumps(dict(config.workflow.arguments), sort_keys=True)
        is_grouped = config.reward.group == GROUP
        return cls(name, arguments, config.model.path or "scratch", str(folder), config.data.size, is_grouped)

    @classmethod
    def read(cls, order: Mapping[str, Any]) -> "EnvironmentCode":
        """The inverse of `order`."""
        return cls(**order)

    def order(self) -> dict[str, Any]:
        """As JSON, for another process."""
        return asdict(self)


def row_of(given: Mapping[str, Any], prompt: Any, where: str) -> Row:
    """`prompt`: a text or messages, for logs and warm-up. Raises ConfigError for values that are not JSON."""
    try:
        json.dumps(given, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"invalid row of an environment: {where}: {error}; it must hold JSON values only") from error
    row = {"question": question_of(prompt), "answer": str(given.get("answer", "")), INPUT: dict(given)}
    if isinstance(text := given.get(DEMONSTRATION), str):
        row[DEMONSTRATION] = text
    return row


def question_of(prompt: Any) -> str:
    """The last user message of a prompt."""
    if isinstance(prompt, str):
        return prompt
    contents = [message["content"] for message in prompt or [] if message.get("role") == "user"]
    text = contents[-1] if contents else ""
    return text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
