"""journal.tracker: the writer of each experiment tracker, and the package that it needs."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from areal_bus.errors import ConfigError
from areal_bus.process.commands import install_command

MEMBERS = ("takes_undo", "is_rewritten", "takes_samples", "write", "close")  # of `tools.trackers.protocol.Writer`


@dataclass(frozen=True, slots=True)
class TrackerKind:
    """`writer`: "module:constructor", called with a `tools.trackers.protocol.Target`. It returns a `Writer`."""

    writer: str
    package: str = ""  # to import; "" for the standard library


TRACKERS = {
    "tensorboard": TrackerKind("tools.trackers.tensorboard_writer:TensorboardWriter", "tensorboard"),
    "wandb": TrackerKind("tools.trackers.run_writers:wandb_writer", "wandb"),
    "trackio": TrackerKind("tools.trackers.run_writers:trackio_writer", "trackio"),
    "mlflow": TrackerKind("tools.trackers.mlflow_writer:MlflowWriter", "mlflow"),
    "swanlab": TrackerKind("tools.trackers.run_writers:swanlab_writer", "swanlab"),
    "csv": TrackerKind("tools.trackers.tables:csv_writer"),
    "parquet": TrackerKind("tools.trackers.tables:parquet_writer", "pyarrow"),
}


def why_unknown(name: str) -> str:
    """Why no tracker has this name; "" if one has, or if it has the form of a user's."""
    if name in TRACKERS or re.fullmatch(r"[\w.]+:\w+", name):
        return ""
    known = ", ".join(f'"{one}"' for one in TRACKERS)
    return f'unknown journal.tracker {name!r}: it is {known} or "module:Writer"'


def check_trackers(names: Iterable[str]) -> None:
    """Raises ConfigError for the first tracker that is unknown, whose package is missing, or, of the user's own, that
    does not import or lacks a member. A user's module must be on sys.path; others are not imported.
    """
    for name in names:
        kind = TRACKERS.get(name)
        if kind is None:
            check_members(name, constructor_of(name))
        elif kind.package and find_spec(kind.package) is None:
            rule = f"the tracker {name} needs the package {kind.package}, which is not installed"
            raise ConfigError(f"{rule}: run {install_command(name)}")


def constructor_of(name: str) -> Callable[[Any], Any]:
    """Raises ConfigError for a name that is unknown, and for a user's writer that cannot be imported."""
    if why := why_unknown(name):
        raise ConfigError(why)
    module, _, constructor = TRACKERS.get(name, TrackerKind(name)).writer.partition(":")
    try:
        made: Callable[[Any], Any] = getattr(import_module(module), constructor)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"cannot import journal.tracker {name!r}: {type(error).__name__}: {error}") from error
    if not callable(made):
        raise ConfigError(f"journal.tracker {name!r} must name a class: it is a {type(made).__name__}")
    return made


def check_members(name: str, writer: object) -> None:
    """Raises ConfigError for a user's class, or a writer, that lacks a member. A function shows its own when called."""
    if callable(writer) and not isinstance(writer, type):
        return
    wanted = [*MEMBERS, *(("undo",) if getattr(writer, "takes_undo", False) else ())]
    wanted += ["samples"] if getattr(writer, "takes_samples", False) else []
    if missing := [member for member in wanted if not hasattr(writer, member)]:
        raise ConfigError(f"journal.tracker {name!r} has no {', '.join(missing)}: see tools.trackers.protocol.Writer")
