"""`reward.group = "verifiers"`: the rubric of an environment scores all samples of a prompt, in a reward worker."""

from collections.abc import Mapping, Sequence
from typing import Any

from actors.environments.environment_code import INPUT, EnvironmentCode
from actors.environments.loading import Hosted, load

_environment: Hosted | None = None


def configure(order: Mapping[str, Any]) -> None:
    """Load the environment in this process. Raises ConfigError."""
    global _environment
    _environment = load(EnvironmentCode.read(order))


def score(completions: Sequence[str], row: Mapping[str, Any]) -> list[float]:
    """A reward for each answer. Raises RuntimeError when a reward function fails."""
    if _environment is None:
        raise RuntimeError("the group rubric must be configured: it has no environment")
    return _environment.score_group(row[INPUT], completions)
