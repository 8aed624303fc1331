"""Names of the experiment trackers, and the package that each needs."""

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Literal

from areal_bus.errors import ConfigError
from areal_bus.process.commands import install_command

Tracker = Literal["tensorboard", "wandb", "trackio", "csv", "parquet"]
PACKAGES: Mapping[Tracker, str] = {  # package to import; "" for the standard library
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "trackio": "trackio",
    "csv": "",
    "parquet": "pyarrow",
}


def check_installed(names: Iterable[Tracker]) -> None:
    """Raises ConfigError for the first tracker whose package is missing. Imports nothing."""
    for name in names:
        package = PACKAGES[name]
        if package and find_spec(package) is None:
            raise ConfigError(
                f"the tracker {name} needs the package {package}, which is not installed: run {install_command(name)}"
            )
